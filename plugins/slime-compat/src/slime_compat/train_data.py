"""``custom_reward_post_process_path``, ``custom_convert_samples_to_train_data_path``: training data of a rollout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_compat.calling import PathFunction, scalar
from slime_core.errors import PluginError
from slime_core.types import LogProbs, Mask, Sample, Status, TokenIds

__all__ = ["converted", "post_processed"]

NEEDED = ("tokens", "response_lengths", "rewards", "loss_masks")

READ = (*NEEDED, "rollout_log_probs", "sample_indices", "rollout_ids", "truncated")


def post_processed(function: PathFunction, returned: Any, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the second of the two lists of rewards that the function returned.

    Raises:
        PluginError: it returned something else than two lists of finite numbers, one per sample.
    """
    pair = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (None, None)
    raw, rewards = map(_finite, pair)
    if raw is None or rewards is None or not len(raw) == len(rewards) == len(samples):
        count = len(samples)
        raise function.refused(
            returned, f"two lists of {count} finite numbers, the raw rewards and those that train, one per sample"
        )
    return [replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True)]


def converted(function: PathFunction, returned: Any, samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample for each row of the columns that the function returned.

    ``tokens``, ``response_lengths``, ``rewards`` and ``loss_masks`` are required; ``rollout_log_probs``,
    ``sample_indices``, ``rollout_ids`` and ``truncated`` default to those of the samples. The other columns of slime
    follow from these. Rows without ``sample_indices`` belong to the samples in order.

    Raises:
        PluginError: a column is missing, columns differ in length, a row is inconsistent, or its sample is not
            determined.
    """
    columns = _columns(function, returned)
    rewards = _finite(columns["rewards"])
    if rewards is None:
        raise _refusal(function, f"rewards {columns['rewards']!r:.60}", "finite numbers")
    parents = _parents(function, columns, samples)
    return [_row(function, columns, place, parent, rewards[place]) for place, parent in enumerate(parents)]


def _columns(function: PathFunction, returned: Any) -> dict[str, list[Any]]:
    table = returned if isinstance(returned, Mapping) else {}
    plain = {str(name): _plain(column) for name, column in table.items() if hasattr(column, "__len__")}
    columns = {name: column for name, column in plain.items() if isinstance(column, list)}
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        problem = f"{type(returned).__name__} without {', '.join(missing)}"
        raise _refusal(function, problem, f"a dict of {', '.join(NEEDED)}")
    lengths = {name: len(columns[name]) for name in columns if name in READ}
    if len(set(lengths.values())) != 1 or not lengths["tokens"]:
        raise _refusal(function, f"columns of the lengths {lengths}", "one entry per sample in each, and at least one")
    return columns


def _parents(function: PathFunction, columns: Mapping[str, list[Any]], samples: Sequence[Sample]) -> list[Sample]:
    """Return the sample of each row; siblings of a fan-out share an index, so their position or tokens decide."""
    count, in_order = len(columns["tokens"]), [sample.index for sample in samples]
    indices = columns.get("sample_indices", in_order)
    siblings: dict[Any, list[Sample]] = {}
    for sample in samples:
        siblings.setdefault(sample.index, []).append(sample)
    if len(indices) != count or not all(isinstance(index, int) and index in siblings for index in indices):
        raise _refusal(
            function, f"{count} rows, and sample_indices do not determine the sample of each", "the index of each"
        )
    if indices == in_order:
        return list(samples)
    return [_parent(function, columns, place, siblings[index]) for place, index in enumerate(indices)]


def _parent(function: PathFunction, columns: Mapping[str, list[Any]], place: int, siblings: Sequence[Sample]) -> Sample:
    if len(siblings) == 1:
        return siblings[0]
    tokens = _plain(columns["tokens"][place])
    fitting = [sample for sample in siblings if list(sample.tokens) == tokens]
    if len(fitting) != 1:
        raise _refusal(
            function,
            f"row {place} of sample_indices {siblings[0].index}, which {len(siblings)} samples share; its tokens are "
            f"those of {len(fitting)} of them",
            "rows with the tokens of exactly one; or a row for every sample, in their order",
        )
    return fitting[0]


def _row(function: PathFunction, columns: Mapping[str, list[Any]], place: int, parent: Sample, reward: float) -> Sample:
    tokens = _numbers(function, columns, "tokens", place)
    mask = _numbers(function, columns, "loss_masks", place)
    log_probs = list(parent.rollout_log_probs or ())
    if "rollout_log_probs" in columns:
        log_probs = _numbers(function, columns, "rollout_log_probs", place)
    length = columns["response_lengths"][place]
    if not _is_id(length) or not 0 < length < len(tokens) or len(mask) != length or len(log_probs) != length:
        raise _refusal(
            function,
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


def _numbers(function: PathFunction, columns: Mapping[str, list[Any]], name: str, place: int) -> list[Any]:
    """Return one row of a column of lists; every entry must be valid for the column."""
    fits, accepted = ENTRIES[name]
    entries = _plain(columns[name][place])
    if not isinstance(entries, list):
        raise _refusal(function, f"{entries!r:.60} in row {place} of {name}", f"a list of {accepted}")
    for entry in entries:
        if not fits(entry):
            raise _refusal(function, f"{entry!r:.60} among the {name} of row {place}", accepted)
    return entries


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
    return [float(number) for number in numbers]


def _plain(values: Any) -> Any:
    """Convert tuples, arrays and tensors to lists."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        return [scalar(entry) for entry in listed]
    return listed


def _refusal(function: PathFunction, problem: str, accepted: str) -> PluginError:
    return PluginError(f"{function}: it returned {problem}; accepted: {accepted}.")
