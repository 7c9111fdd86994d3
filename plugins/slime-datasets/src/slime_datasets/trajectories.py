"""Checks trajectories that another program wrote: every field of every line is valid, or the error names the line.

KINDS      accepted values of each field, checked alone
_mistakes  checks of fields against one another
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.provisional import PromptFilter, PromptRequest
from slime_core.types import GENERATE_FUNCTION, SAMPLING_PARAMS, LogProbs, PromptGroup, Sample, SpecInfo, Status
from slime_datasets.rows import content_of, is_chat, names_in
from slime_datasets.tables import Row

__all__ = ["GIVEN", "Fit", "read_trajectories"]

GIVEN = "given"
"""Key of a sample's ``train_metadata``: status and reward of its given response."""

FINISHED = (Status.COMPLETED, Status.TRUNCATED)

LARGEST = 3.4028234663852886e38
"""Largest float32; rewards and log-probabilities are trained in float32."""

MOST_LOG_PROB = 0.1
"""Largest accepted log-probability: rounding to 16 bits can raise one slightly above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The requirements of a run on trajectories.

    Arguments:
        size: number of samples of a group.
        vocab_size: size of the model's vocabulary; None if unknown.
        reward_key: name of the reward that is trained, if a sample has several.
        filter: checks components that a trajectory's metadata name.
    """

    size: int = 1
    vocab_size: int | None = None
    reward_key: str | None = None
    filter: PromptFilter = field(default_factory=PromptFilter)

    @classmethod
    def of(cls, request: PromptRequest, run: RunView) -> Fit:
        """Return the requirements of ``run``."""
        size, vocab_size = request.n_samples_per_prompt, request.vocab_size
        return cls(size=size, vocab_size=vocab_size, reward_key=run.reward_key, filter=request.filter)


def read_trajectories(lines: Sequence[Row], fit: Fit) -> PromptGroup:
    """Return the group of ``lines`` with status pending; its real status and reward are stored under :data:`GIVEN`.

    Raises:
        DataError: a line is not a finished sample, or the group has the wrong size; names file and line.
    """
    group = [_sample(raw, fit) for raw in lines]
    if len(group) != fit.size:
        number = group[0].group_index
        which = "a sample without group_index, which is a separate group," if number is None else f"group {number}"
        raise DataError(
            f"{lines[0].place}: {which} has {len(group)} samples, and n_samples_per_prompt = {fit.size}; accepted: "
            "groups of that size, their lines together"
        )
    return group


def _sample(raw: Row, fit: Fit) -> Sample:
    values: dict[str, Any] = content_of(raw)
    for mistake in _of_no_kind(values):
        raise DataError(f"{raw.place}: {mistake}")
    try:
        sample = Sample.from_dict(values)
    except (TypeError, ValueError, OverflowError) as problem:
        raise DataError(f"{raw.place}: not a sample: {problem}") from None
    for mistake in _mistakes(sample, fit):
        raise DataError(f"{raw.place}: {mistake}")
    # The response exists, so its generate function no longer matters; its reward model does if it has no reward.
    metadata = {key: value for key, value in sample.metadata.items() if key != GENERATE_FUNCTION}
    # For the same reason the sampling parameters of its row no longer matter.
    if sample.reward is None:
        fit.filter.check(
            {key: value for key, value in metadata.items() if key != SAMPLING_PARAMS}, sample.label, raw.place
        )
    train_metadata = {**(sample.train_metadata or {}), GIVEN: [sample.status.value, sample.reward]}
    return replace(
        sample,
        rollout_log_probs=sample.rollout_log_probs or LogProbs(),
        metadata=metadata,
        generate_function_path=None,
        train_metadata=train_metadata,
        # Pending until from_buffer restores the status: when a group is reset, pending samples keep given responses.
        status=Status.PENDING,
    )


# --- One field --------------------------------------------------------------------------------------------------------

Accepts = Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_id(value: Any) -> bool:
    return _is_whole(value) and 0 <= value < 2**31


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    """Return whether it is a number that is finite in float32; JSON integers may even exceed float64."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_reward(value: Any) -> bool:
    return all(map(_is_number, value.values())) and bool(value) if isinstance(value, dict) else _is_number(value)


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or is_chat(value)


def _is_span(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and _is_text(value[0]) and all(map(_is_id, value[1:]))


def _are_counters(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() <= SpecInfo.__dataclass_fields__.keys() and _all(_is_id)(value)


def _are_arrays(value: Any) -> bool:
    return isinstance(value, dict) and _all(_is_array)(value)


def _is_array(value: Any) -> bool:
    """Return whether it is an array or a tensor as :meth:`Sample.to_dict` writes it, or lists of numbers."""
    import numpy as np

    try:
        array: Any = (Sample.from_dict({"multimodal_train_inputs": {"": value}}).multimodal_train_inputs or {})[""]
        if array is None or (hasattr(array, "ndim") and not isinstance(array, np.ndarray)):  # a tensor, read from bytes
            return array is None or array.ndim > 0
        values = np.asarray(array)
    except (ValueError, TypeError, OverflowError):
        return False
    return values.dtype.kind in "biuf" and values.ndim > 0


def _are_routes(value: Any) -> bool:
    import numpy as np

    try:
        routes = np.asarray(value)
    except ValueError:
        return False
    return isinstance(value, list) and routes.ndim == 3 and routes.dtype.kind == "i" and routes.min(initial=0) >= 0


def _are_columns(value: Any) -> bool:
    import numpy as np

    if not _is_object(value):
        return False
    try:
        columns = [np.asarray(column) for column in value.values()]
    except ValueError:
        return False
    return all(column.ndim == 2 and column.dtype.kind in "if" and np.isfinite(column).all() for column in columns)


def _all(accepts: Accepts) -> Accepts:
    return lambda values: all(map(accepts, values.values() if isinstance(values, dict) else values))


def _list(accepts: Accepts) -> Accepts:
    return lambda value: isinstance(value, list) and _all(accepts)(value)


def _or_null(accepts: Accepts) -> Accepts:
    return lambda value: value is None or accepts(value)


WHOLE = (_or_null(_is_whole), "a whole number or null")
TEXT = (_or_null(_is_text), "text or null")
OBJECT = (_or_null(_is_object), "an object or null")
IDS = "whole numbers from 0 on"

KINDS: dict[str, tuple[Accepts, str]] = {
    **dict.fromkeys(("group_index", "index", "rollout_id"), WHOLE),
    **dict.fromkeys(
        ("label", "generate_function_path", "custom_rm_path", "session_id", "error", "failure_cause"), TEXT
    ),
    **dict.fromkeys(("train_metadata", "multimodal_inputs"), OBJECT),
    "prompt": (_is_prompt, "text or a list of messages with role and content"),
    "tokens": (_list(_is_id), f"a list of {IDS}"),
    "response": (_is_text, "text"),
    "response_length": (_is_id, "a whole number"),
    "reward": (_or_null(_is_reward), "a finite number, or named ones"),
    "loss_mask": (_or_null(_list(lambda one: _is_whole(one) and one in (0, 1))), "a list of 0 and 1, or null"),
    "metadata": (_is_object, "an object"),
    "multimodal_train_inputs": (_or_null(_are_arrays), "names and arrays of numbers, as objects, or null"),
    "weight_versions": (_list(_is_text), "a list of texts"),
    "weight_spans": (_list(_is_span), "a list of [version, start, end], the version as text"),
    "rollout_log_probs": (_list(_is_number), "a list of finite numbers"),
    "rollout_top_p_token_ids": (_or_null(_list(_is_id)), f"a list of {IDS}, or null"),
    "rollout_top_p_token_offsets": (_or_null(_list(_is_id)), f"a list of {IDS}, or null"),
    "rollout_routed_experts": (_or_null(_are_routes), "lists of whole numbers [tokens - 1, layers, experts], or null"),
    "engine_columns": (_are_columns, "an object of names and lists of finite numbers [response_length, width]"),
    "remove_sample": (lambda value: isinstance(value, bool), "true or false"),
    "non_generation_time": (lambda value: _is_number(value) and value >= 0, "seconds from 0 on"),
    "spec_info": (_are_counters, f"an object of whole numbers under {', '.join(SpecInfo.__dataclass_fields__)}"),
}
"""Field -> check and description of accepted values; ``status`` alone is checked elsewhere."""

NEEDED = ("tokens", "response_length", "status", "rollout_log_probs")


def _of_no_kind(values: Mapping[str, Any]) -> list[str]:
    unknown = [name for name in values if name not in Sample.__dataclass_fields__]
    missing = [name for name in NEEDED if name not in values]
    names = [name for name, (accepts, _) in KINDS.items() if name in values and not accepts(values[name])]
    return [
        *(f"no such field {name:.40}{_nearest(name)}" for name in unknown),
        *(f"no field {name}; a trajectory has {', '.join(NEEDED)}" for name in missing),
        *(f"{name} is {values[name]!r:.80}; accepted: {KINDS[name][1]}" for name in names),
    ]


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, Sample.__dataclass_fields__, n=1)
    return f"; did you mean {close[0]}?" if close else ""


# --- Several fields ---------------------------------------------------------------------------------------------------


def _mistakes(sample: Sample, fit: Fit) -> Iterator[str]:
    yield from _of_the_response(sample)
    yield from _of_the_engine(sample)
    yield from _of_the_run(sample, fit)


def _of_the_response(sample: Sample) -> Iterator[str]:
    length, count, log_probs = sample.response_length, len(sample.tokens), sample.rollout_log_probs or ()
    if sample.status not in FINISHED:
        yield f"status is {sample.status}; accepted: completed or truncated"
    if not 0 < length < count:
        yield f"response_length is {length} of {count} tokens; accepted: at least 1, with a prompt before it"
    if len(log_probs) != length:
        yield f"rollout_log_probs are {len(log_probs)} numbers; accepted: {length}, one per response token"
    if max(log_probs, default=0) > MOST_LOG_PROB:
        yield f"rollout_log_probs hold {max(log_probs):g}; accepted: natural logarithms of probabilities, at most 0"
    if sample.loss_mask is not None and len(sample.loss_mask) != length:
        yield f"loss_mask has {len(sample.loss_mask)} entries; accepted: {length}, one per response token"


def _of_the_engine(sample: Sample) -> Iterator[str]:
    length, routes = sample.response_length, sample.rollout_routed_experts
    if not all(start < end <= length for _, start, end in sample.weight_spans):
        yield f"weight_spans are empty, or end beyond the {length} response tokens; accepted: ranges inside them"
    if not _is_rising(sample):
        yield (
            f"rollout_top_p_token_offsets do not fit; accepted: {length + 1} for {length} response tokens, rising from "
            "0 to the number of rollout_top_p_token_ids"
        )
    if routes is not None and len(routes) != len(sample.tokens) - 1:
        yield f"rollout_routed_experts are of {len(routes)} tokens; accepted: all {len(sample.tokens)} but the last"
    if lengths := [len(column) for column in sample.engine_columns.values() if len(column) != length]:
        yield f"engine_columns have {lengths[0]} rows; accepted: {length}, one per response token"


def _of_the_run(sample: Sample, fit: Fit) -> Iterator[str]:
    largest, reward, key = max(sample.tokens), sample.reward, sample.reward_key(fit.reward_key)
    if fit.vocab_size is not None and largest >= fit.vocab_size:
        yield f"token {largest}, and the model's vocabulary has 0 to {fit.vocab_size - 1}; it is of another tokenizer"
    if isinstance(reward, dict) and key not in list(reward):
        yield (
            f"reward has {names_in(reward)}, and what counts is {key!r:.80}; name one of them with --reward-key, or "
            "under reward_key of the metadata"
        )


def _is_rising(sample: Sample) -> bool:
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if offsets is None:
        return not ids
    ends = len(offsets) == sample.response_length + 1 and (offsets[0], offsets[-1]) == (0, len(ids or ()))
    return ends and all(before <= after for before, after in pairwise(offsets))
