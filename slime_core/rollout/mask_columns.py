"""The columns of a shard that say what each response token was drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slime_core.types import Sample

__all__ = ["mask_columns"]

Ints = NDArray[np.int64]


def mask_columns(
    samples: Sequence[Sample], masks: Sequence[NDArray[np.float32]], *, cuts: bool
) -> tuple[Ints | None, Ints | None]:
    """How many tokens each response token of ``samples`` was drawn from, int64 [u], and which, int64 [s].

    Both None where no sample says it and none has to.

    Arguments:
        masks: of each sample, float32 [response length].
        cuts: top-p or top-k left something out, so every trained token has to say it.

    Raises:
        ValueError: one does not; or a sample says it for another number of tokens than it has, or of a token that was
            left out.
    """
    if not cuts and all(sample.rollout_top_p_token_offsets is None for sample in samples):
        return None, None
    found = [_of(sample, mask_T, cuts) for sample, mask_T in zip(samples, masks, strict=True)]
    counts, ids = zip(*found, strict=True)
    return np.concatenate(counts), np.concatenate(ids)


def _of(sample: Sample, mask_T: NDArray[np.float32], cuts: bool) -> tuple[Ints, Ints]:
    ids_S, counts_T = _read(sample)
    trained_T = mask_T != 0
    if cuts and bool((trained_T & (counts_T == 0)).any()):
        raise ValueError(
            f"sample {sample.index}: rollout_top_p and rollout_top_k leave tokens out, and place "
            f"{int(np.flatnonzero(trained_T & (counts_T == 0))[0])} of the response does not say what it was drawn "
            "from, so its log-probability can mean nothing. A generate function takes answers of context.client and "
            "hands each one's kept to slime_core.generation.keep, or leave --rollout-top-p and --rollout-top-k out"
        )
    places_S = np.repeat(np.arange(len(counts_T)), counts_T)
    targets_T = np.asarray(sample.tokens, np.int64)[sample.prompt_length :]
    has_T = np.bincount(places_S[ids_S == targets_T[places_S]], minlength=len(counts_T)) > 0
    missing_T = trained_T & (counts_T > 0) & ~has_T
    if missing_T.any():
        place = int(np.flatnonzero(missing_T)[0])
        raise ValueError(
            f"sample {sample.index}: token {targets_T[place]} at place {place} of the response is none of the "
            f"{counts_T[place]} that rollout_top_p_token_ids says it was drawn from; keep the ids and what they were "
            "drawn from as the engine sent them"
        )
    return counts_T, ids_S


def _read(sample: Sample) -> tuple[Ints, Ints]:
    """Ids, and their number at each place of the response."""
    if sample.rollout_top_p_token_offsets is None:
        return np.zeros(0, np.int64), np.zeros(sample.response_length, np.int64)
    ids_S = np.asarray(sample.rollout_top_p_token_ids or (), np.int64)
    offsets = np.asarray(sample.rollout_top_p_token_offsets, np.int64)
    rises = len(offsets) == sample.response_length + 1 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    if not rises or offsets[-1] != len(ids_S) or bool((ids_S < 0).any()):
        raise ValueError(
            f"sample {sample.index}: rollout_top_p_token_offsets needs {sample.response_length + 1} entries for "
            f"{sample.response_length} response tokens, rising from 0 to the {len(ids_S)} rollout_top_p_token_ids, "
            f"none of which is negative; found {offsets[:6].tolist()}{' ...' if len(offsets) > 6 else ''}"
        )
    return ids_S, np.diff(offsets)
