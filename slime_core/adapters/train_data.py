"""``custom_reward_post_process_path``, ``custom_convert_samples_to_train_data_path``: what is trained of a rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_core.adapters.check import Loaded
from slime_core.errors import PluginError
from slime_core.types import LogProbs, Mask, Sample, Status, TokenIds

__all__ = ["converted", "post_processed"]

NEEDED = ("tokens", "response_lengths", "rewards", "loss_masks")


def post_processed(loaded: Loaded, returned: Any, samples: Sequence[Sample]) -> list[Sample]:
    """The samples with the second of the two lists of rewards that the function returned.

    Raises:
        PluginError: it returned something else than two lists of finite numbers, one a sample.
    """
    pair = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (None, None)
    raw, rewards = (_finite(one) for one in pair)
    if raw is None or rewards is None or not len(raw) == len(rewards) == len(samples):
        raise PluginError(
            f"{loaded.source}: it returned {returned!r:.80} for {len(samples)} samples; accepted: two lists of finite "
            "numbers, the raw rewards and those that train, one a sample."
        )
    return [replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True)]


def converted(loaded: Loaded, returned: Any, samples: Sequence[Sample]) -> list[Sample]:
    """A sample a row of the columns that the function returned.

    ``tokens``, ``response_lengths``, ``rewards`` and ``loss_masks`` are needed; ``rollout_log_probs``,
    ``sample_indices``, ``rollout_ids`` and ``truncated`` are those of the samples where they are left out. The other
    columns of slime follow from these.

    Raises:
        PluginError: a column is missing, or they differ in length, or a row does not fit together.
    """
    columns = _columns(loaded, returned)
    count = len(columns["tokens"])
    by_index = {sample.index: sample for sample in samples}
    indices = columns.get("sample_indices", [sample.index for sample in samples])
    if len(indices) != count or not all(index in by_index for index in indices):
        raise _refusal(
            loaded, f"{count} rows, and sample_indices do not say which sample each comes from", "the index of each"
        )
    rewards = _finite(columns["rewards"])
    if rewards is None:
        raise _refusal(loaded, f"rewards {columns['rewards']!r:.60}", "finite numbers")
    parents = [by_index[index] for index in indices]
    return [_row(loaded, columns, place, parent, rewards[place]) for place, parent in enumerate(parents)]


def _columns(loaded: Loaded, returned: Any) -> dict[str, list[Any]]:
    missing = [name for name in NEEDED if not isinstance(returned, Mapping) or name not in returned]
    if missing:
        raise _refusal(
            loaded, f"{type(returned).__name__} without {', '.join(missing)}", f"a dict of {', '.join(NEEDED)}"
        )
    columns = {str(name): _plain(column) for name, column in returned.items() if hasattr(column, "__len__")}
    lengths = {name: len(columns[name]) for name in columns if name in (*NEEDED, "rollout_log_probs", "sample_indices")}
    if len(set(lengths.values())) != 1 or not lengths["tokens"]:
        raise _refusal(loaded, f"columns of the lengths {lengths}", "one entry a sample in each, and at least one")
    return columns


def _row(loaded: Loaded, columns: Mapping[str, list[Any]], place: int, parent: Sample, reward: float) -> Sample:
    tokens, length = _plain(columns["tokens"][place]), int(columns["response_lengths"][place])
    mask = _plain(columns["loss_masks"][place])
    given = "rollout_log_probs" in columns
    log_probs = _plain(columns["rollout_log_probs"][place]) if given else list(parent.rollout_log_probs or ())
    if not 0 < length < len(tokens) or len(mask) != length or len(log_probs) != length:
        raise _refusal(
            loaded,
            f"row {place} of {len(tokens)} tokens with response_lengths {length}, {len(mask)} entries of loss_masks "
            f"and {len(log_probs)} of rollout_log_probs",
            "as many entries of both as the response has tokens, and a prompt before it",
        )
    truncated = columns["truncated"][place] if "truncated" in columns else parent.status is Status.TRUNCATED
    return replace(
        parent,
        tokens=TokenIds(tokens),
        response_length=length,
        reward=reward,
        loss_mask=Mask(mask),
        rollout_log_probs=LogProbs(log_probs),
        rollout_id=columns["rollout_ids"][place] if "rollout_ids" in columns else parent.rollout_id,
        status=Status.TRUNCATED if truncated else Status.COMPLETED,
        # A removed sample would lose the mask that the function gave it.
        remove_sample=False,
    )


def _finite(values: Any) -> list[float] | None:
    numbers = _plain(values)
    if not isinstance(numbers, list) or not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
        return None
    return [float(one) for one in numbers]


def _plain(values: Any) -> Any:
    """Lists, of what may be tuples, arrays and tensors."""
    found = values.tolist() if hasattr(values, "tolist") else values
    listed = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else found
    if isinstance(listed, list):
        return [one.item() if getattr(one, "ndim", None) == 0 and hasattr(one, "item") else one for one in listed]
    return listed


def _refusal(loaded: Loaded, found: str, accepted: str) -> PluginError:
    return PluginError(f"{loaded.source}: it returned {found}; accepted: {accepted}.")
