"""``custom_reward_post_process_path``, ``custom_convert_samples_to_train_data_path``: training data of a rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_compat.check import Loaded
from slime_core.errors import PluginError
from slime_core.types import LogProbs, Mask, Sample, Status, TokenIds

__all__ = ["converted", "post_processed"]

NEEDED = ("tokens", "response_lengths", "rewards", "loss_masks")

READ = (*NEEDED, "rollout_log_probs", "sample_indices", "rollout_ids", "truncated")


def post_processed(loaded: Loaded, returned: Any, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the second of the two lists of rewards that the function returned.

    Raises:
        PluginError: it returned something else than two lists of finite numbers, one per sample.
    """
    pair = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (None, None)
    raw, rewards = (_finite(one) for one in pair)
    if raw is None or rewards is None or not len(raw) == len(rewards) == len(samples):
        raise PluginError(
            f"{loaded.source}: it returned {returned!r:.80} for {len(samples)} samples; accepted: two lists of finite "
            "numbers, the raw rewards and those that train, one per sample."
        )
    return [replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True)]


def converted(loaded: Loaded, returned: Any, samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample for each row of the columns that the function returned.

    ``tokens``, ``response_lengths``, ``rewards`` and ``loss_masks`` are required; ``rollout_log_probs``,
    ``sample_indices``, ``rollout_ids`` and ``truncated`` default to those of the samples. The other columns of slime
    follow from these. Rows without ``sample_indices`` belong to the samples in order.

    Raises:
        PluginError: a column is missing, columns differ in length, a row is inconsistent, or its sample is not
            determined.
    """
    columns = _columns(loaded, returned)
    rewards = _finite(columns["rewards"])
    if rewards is None:
        raise _refusal(loaded, f"rewards {columns['rewards']!r:.60}", "finite numbers")
    parents = _parents(loaded, columns, samples)
    return [_row(loaded, columns, place, parent, rewards[place]) for place, parent in enumerate(parents)]


def _columns(loaded: Loaded, returned: Any) -> dict[str, list[Any]]:
    given = returned if isinstance(returned, Mapping) else {}
    plain = {str(name): _plain(column) for name, column in given.items() if hasattr(column, "__len__")}
    columns = {name: column for name, column in plain.items() if isinstance(column, list)}
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        found = f"{type(returned).__name__} without {', '.join(missing)}"
        raise _refusal(loaded, found, f"a dict of {', '.join(NEEDED)}")
    lengths = {name: len(columns[name]) for name in columns if name in READ}
    if len(set(lengths.values())) != 1 or not lengths["tokens"]:
        raise _refusal(loaded, f"columns of the lengths {lengths}", "one entry per sample in each, and at least one")
    return columns


def _parents(loaded: Loaded, columns: Mapping[str, list[Any]], samples: Sequence[Sample]) -> list[Sample]:
    """Return the sample of each row; siblings of a fan-out share an index, so their position or tokens decide."""
    count, own = len(columns["tokens"]), [sample.index for sample in samples]
    indices = columns.get("sample_indices", own)
    siblings: dict[Any, list[Sample]] = {}
    for sample in samples:
        siblings.setdefault(sample.index, []).append(sample)
    if len(indices) != count or not all(isinstance(index, int) and index in siblings for index in indices):
        raise _refusal(
            loaded, f"{count} rows, and sample_indices do not say which sample each comes from", "the index of each"
        )
    if indices == own:
        return list(samples)
    return [_parent(loaded, columns, place, siblings[index]) for place, index in enumerate(indices)]


def _parent(loaded: Loaded, columns: Mapping[str, list[Any]], place: int, siblings: Sequence[Sample]) -> Sample:
    if len(siblings) == 1:
        return siblings[0]
    tokens = _plain(columns["tokens"][place])
    fitting = [sample for sample in siblings if list(sample.tokens) == tokens]
    if len(fitting) != 1:
        raise _refusal(
            loaded,
            f"row {place} of sample_indices {siblings[0].index}, which {len(siblings)} samples share; its tokens are "
            f"those of {len(fitting)} of them",
            "rows with the tokens of exactly one; or a row for every sample, in their order",
        )
    return fitting[0]


def _row(loaded: Loaded, columns: Mapping[str, list[Any]], place: int, parent: Sample, reward: float) -> Sample:
    tokens = _numbers(loaded, columns, "tokens", place)
    mask = _numbers(loaded, columns, "loss_masks", place)
    given = "rollout_log_probs" in columns
    log_probs = _numbers(loaded, columns, "rollout_log_probs", place) if given else list(parent.rollout_log_probs or ())
    length = columns["response_lengths"][place]
    if not _is_id(length) or not 0 < length < len(tokens) or len(mask) != length or len(log_probs) != length:
        raise _refusal(
            loaded,
            f"row {place} of {len(tokens)} tokens with response_lengths {length!r:.60}, {len(mask)} entries of "
            f"loss_masks and {len(log_probs)} of rollout_log_probs",
            "as many entries of both as the response has tokens, and a prompt before it",
        )
    truncated = columns["truncated"][place] if "truncated" in columns else parent.status is Status.TRUNCATED
    return replace(
        parent,
        tokens=TokenIds(tokens),
        response_length=length,
        reward=reward,
        loss_mask=Mask(map(int, mask)),
        rollout_log_probs=LogProbs(log_probs),
        rollout_id=columns["rollout_ids"][place] if "rollout_ids" in columns else parent.rollout_id,
        status=Status.TRUNCATED if truncated else Status.COMPLETED,
        # If the sample stayed removed, the mask that the function gave it would have no effect.
        remove_sample=False,
    )


def _numbers(loaded: Loaded, columns: Mapping[str, list[Any]], name: str, place: int) -> list[Any]:
    """Return one row of a column of lists; every entry must be valid for the column."""
    fits, accepted = ENTRIES[name]
    found = _plain(columns[name][place])
    if not isinstance(found, list):
        raise _refusal(loaded, f"{found!r:.60} in row {place} of {name}", f"a list of {accepted}")
    wrong = [one for one in found if not fits(one)]
    if wrong:
        raise _refusal(loaded, f"{wrong[0]!r:.60} among the {name} of row {place}", accepted)
    return found


def _is_id(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < 2**31


def _is_mask(number: Any) -> bool:
    return isinstance(number, int | float) and number in (0, 1)


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)


ENTRIES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "tokens": (_is_id, "token ids, which are whole numbers"),
    "loss_masks": (_is_mask, "0 or 1 for each token of the response"),
    "rollout_log_probs": (_is_finite, "finite numbers"),
}


def _finite(values: Any) -> list[float] | None:
    numbers = _plain(values)
    if not isinstance(numbers, list) or not all(map(_is_finite, numbers)):
        return None
    return [float(one) for one in numbers]


def _plain(values: Any) -> Any:
    """Convert tuples, arrays and tensors to lists."""
    found = values.tolist() if hasattr(values, "tolist") else values
    listed = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else found
    if isinstance(listed, list):
        return [one.item() if getattr(one, "ndim", None) == 0 and hasattr(one, "item") else one for one in listed]
    return listed


def _refusal(loaded: Loaded, found: str, accepted: str) -> PluginError:
    return PluginError(f"{loaded.source}: it returned {found}; accepted: {accepted}.")
