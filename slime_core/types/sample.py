"""One response to one prompt: the public record :class:`Sample`, with the field names of slime's samples.

User code (generate functions, rewards, hooks) gets it; the sampler fills it in. Token ids, log-probabilities and masks
are flat arrays (:class:`Numbers`) that behave like the lists that user code expects. :class:`SampleRecord` is a sample
as trackers read it from a run's files.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Union

from slime_core.errors import DataError
from slime_core.opaque import json_of, read_json
from slime_core.types.rollout import Reward

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

JsonValue = Union[None, bool, int, float, str, Sequence["JsonValue"], Mapping[str, "JsonValue"]]  # noqa: UP007 - recursive
"""A value that JSON can hold. Reading JSON gives lists and dictionaries; any sequence or mapping may be given."""

Prompt = str | list[dict[str, JsonValue]]
"""A prompt: text, or chat messages with ``role`` and ``content``."""


class Numbers(array):  # type: ignore[type-arg]
    """A flat array that reads, adds and compares like a list of numbers, with 1 to 4 bytes per entry."""

    __slots__ = ()
    code = "i"

    def __new__(cls, values: Iterable[float] = ()) -> Numbers:
        return super().__new__(cls, cls.code, values)

    def __add__(self, other: Iterable[Any]) -> Any:
        return type(self)([*self, *other])

    def __radd__(self, other: Iterable[Any]) -> Any:
        return type(self)([*other, *self])

    def __iadd__(self, other: Iterable[Any]) -> Any:
        self.extend(type(self)(other))
        return self

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(index)
        return type(self)(value) if isinstance(index, slice) else value

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence | array) else NotImplemented

    __hash__ = None

    def __copy__(self) -> Any:
        return type(self)(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self)


class TokenIds(Numbers):
    """Token ids, int32."""

    code = "i"


class LogProbs(Numbers):
    """Natural-log probabilities, float32."""

    code = "f"


class Mask(Numbers):
    """Zeros and ones, int8."""

    code = "b"


class JsonLabel(str):
    """A label that is an object or a list in its row: the text of it, in JSON."""


NUMBERS: dict[str, type[Numbers]] = {
    "tokens": TokenIds,
    "rollout_log_probs": LogProbs,
    "loss_mask": Mask,
    "rollout_top_p_token_ids": TokenIds,
    "rollout_top_p_token_offsets": TokenIds,
}
"""Fields of a sample that are lists in JSON -> the kind of their array."""

REWARD_KEY = "reward_key"
"""Key of a sample's metadata: which of several named rewards counts for it."""

GENERATE_FUNCTION, REWARD_MODEL = "generate_function", "rm_type"
"""Keys of a sample's metadata: the components that its row names."""

SAMPLING_PARAMS = "sampling_params"
"""Key of a sample's metadata: sampling parameters of its row."""

TOO_LONG, BAD = "too_long", "bad"
"""Reasons for which rows of prompts are left out."""

TOOLS = "tools"
"""Key of a sample's metadata: the tools for the chat template, as in THUDM's slime."""


class Status(StrEnum):
    """The state of a sample; only ``COMPLETED`` and ``TRUNCATED`` samples are trained on."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineColumn:
    """Data that an engine returns for each token that it samples, read by a policy loss or a correction.

    Example, the log-probabilities of the two likeliest tokens::

        def likeliest(meta_info):
            return [[entry[0] for entry in row[:2]] for row in meta_info["output_top_logprobs"]]

        column = EngineColumn({"top_logprobs_num": 2}, likeliest, width=2)
        add.policy_loss("centered", Centered, reads_engine={"likeliest": column})

    Arguments:
        request: fields to add to the body of a request to SGLang's ``/generate``. If several columns set a field, the
            largest value is sent. A router forwards only the fields that it knows.
        read: called with ``meta_info`` of a response of t >= 1 tokens; returns [t, width] numbers, stored as float32,
            which holds integers up to 2**24 exactly.
        width: numbers per token.
    """

    request: Mapping[str, JsonValue]
    read: Callable[[Mapping[str, JsonValue]], NDArray[np.float32] | Sequence[Sequence[float]]]
    width: int


class RewardArguments(Protocol):
    """The arguments that slime's functions pass to :meth:`Sample.get_reward_value`."""

    @property
    def reward_key(self) -> str | None:
        """The name of the reward that counts. None if rewards are numbers."""
        ...


@dataclass(slots=True)
class SpecInfo:
    """Counters of speculative decoding for one sample, as the engine reports them."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class Sample:
    """One response to one prompt, for user code and for training.

    User code may set additional attributes. Rewards receive them; files do not contain them.

    Example: the prompt ``"2+2"`` answered with ``"4"`` by weights of version 7::

        Sample(group_index=0, index=0, prompt="2+2", tokens=[5, 14, 5, 7, 1], response="4", response_length=2,
               label="4", reward=1.0, loss_mask=[1, 1], status=Status.COMPLETED, weight_versions=["7"],
               rollout_log_probs=[-0.11, -0.02])

    Arguments:
        group_index: number of the prompt group within the run; it identifies the group.
        index: number of the sample within the run.
        rollout_id: number of the generation that made the sample, unique in its group. Samples of one generation
            (siblings) share it and count once. None: the only sample of its generation.
        prompt: text, or chat messages ``[{"role": ..., "content": ...}]``.
        tokens: prompt ids followed by response ids, exactly as the engine read and returned them.
        response: the decoded response. It is never tokenised again.
        response_length: number of response ids at the end of ``tokens``.
        prompt_text: the prompt rendered with the chat template, for functions written for THUDM's slime. None: not
            rendered; only slime-compat sets it.
        label: ground truth for the reward; a :class:`JsonLabel` if the row has an object or a list.
        reward: a number, or named numbers.
        loss_mask: one entry per response id, 1 for trained ids, 0 for others (tool output). None means all ones.
        status: see :class:`Status`.
        multimodal_inputs: kind of input, such as ``image`` -> the data row's value, for the engine.
        multimodal_train_inputs: for the model that is trained: name -> array or tensor, see :mod:`slime_core.opaque`.
        metadata: the fields of the data row; ``generate_function`` and ``rm_type`` name components of the run's plugins
            for this row, ``reward_key`` one of the named rewards, see :mod:`slime_core.rollout.row_checks`.
        generate_function_path: slime's name for ``generate_function``, with precedence over it; the name of a
            component, never a path.
        weight_versions: the versions of the weights that produced the response, oldest first.
        weight_spans: the version that sampled each token of the response, as ``(version, start, end)`` with ``end``
            excluded. Tokens that no engine sampled are in no span. Empty if not recorded, because one version sampled
            the whole response.
        rollout_log_probs: the engine's log-probability of each response id, in the distribution that it was sampled
            from: after division by the temperature, and normalised over the tokens that remain after top-p and top-k.
        rollout_top_p_token_ids: the truncated-sampling mask: the tokens that remain after top-p and top-k at each
            position of the response, concatenated. None if the whole vocabulary remains everywhere.
        rollout_top_p_token_offsets: start of each position in these ids, followed by the end of the last position. A
            position without ids, such as one of a tool, has no mask.
        rollout_routed_experts: int8 or int16 [tokens - 1, layers, experts per token], the experts of a mixture that
            processed each token. None if not requested (``use_rollout_routing_replay``).
        engine_columns: name -> float32 [response_length, width], engine data for the run's loss and corrections
            (:class:`EngineColumn`). 0 for tokens that no engine sampled.
        remove_sample: exclude the sample from the loss. It still counts in the statistics of its group.
        custom_rm_path: a field of THUDM slime's samples, stored and written to files. Nothing reads it. ``rm_type`` in
            the metadata names the reward model of a sample.
        session_id: id of a conversation, for functions that route requests by it.
        error: why the sample failed, for ``FAILED``.
        failure_cause: the kind of failure, as ``rollout/failures/CAUSE`` counts it: ``engine``, ``timeout``.
    """

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Prompt = ""
    tokens: list[int] | TokenIds = field(default_factory=TokenIds)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, float] | None = None
    loss_mask: list[int] | Mask | None = None
    status: Status = Status.PENDING
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    multimodal_inputs: JsonValue = None
    multimodal_train_inputs: Mapping[str, object] | None = field(default=None, compare=False)
    weight_versions: list[str] = field(default_factory=list)
    weight_spans: list[tuple[str, int, int]] = field(default_factory=list)
    rollout_log_probs: list[float] | LogProbs | None = None
    rollout_top_p_token_ids: list[int] | TokenIds | None = None
    rollout_top_p_token_offsets: list[int] | TokenIds | None = None
    rollout_routed_experts: NDArray[np.int8 | np.int16] | list[list[list[int]]] | None = field(
        default=None, compare=False
    )
    engine_columns: dict[str, NDArray[np.float32]] = field(default_factory=dict, compare=False)
    remove_sample: bool = False
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    session_id: str | None = None
    train_metadata: dict[str, JsonValue] | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    error: str | None = None
    failure_cause: str | None = None
    prompt_text: str | None = None

    Status: ClassVar[type[StrEnum]] = Status

    @property
    def prompt_length(self) -> int:
        """Number of prompt ids at the start of ``tokens``."""
        return len(self.tokens) - self.response_length

    def reward_key(self, default: str | None = None) -> str | None:
        """Return the name of the reward that counts: the one in the row's metadata, else ``default``."""
        named = self.metadata.get(REWARD_KEY)
        return str(named) if named else default

    def reward_value(self, key: str | None = None) -> float:
        """Return the reward as one number: itself, or its entry ``key``; a key in the row's metadata takes precedence.

        Raises:
            ValueError: the sample has no reward, or holds named rewards and ``key`` is not one of them.
        """
        key = self.reward_key(key)
        if isinstance(self.reward, dict):
            if key not in self.reward:
                raise ValueError(
                    f"sample {self.index} has rewards {sorted(self.reward)}; reward key {key!r} names none of them"
                )
            return float(self.reward[key])
        if self.reward is None:
            raise ValueError(f"sample {self.index} has no reward (status {self.status})")
        return float(self.reward)

    def get_reward_value(self, args: RewardArguments) -> float:
        """Return the reward as one number, as :meth:`reward_value` does with ``args.reward_key``."""
        return self.reward_value(args.reward_key)

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that train."""
        return self.response_length if self.loss_mask is None else int(sum(self.loss_mask))

    def append_response_tokens(
        self,
        args: object = None,
        *,
        tokens: Iterable[int],
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, JsonValue] | None = None,
        text: str = "",
        update_terminal_info: bool = True,
    ) -> None:
        """Add tokens to the end of the response; the prompt's ids must be in ``Sample.tokens`` already.

        Arguments:
            args: ignored; slime's functions pass it.
            tokens: ids that the engine sampled, or ids of an observation.
            log_probs: natural, one per id that the engine sampled; None for an observation, whose ids do not train.
            trainable: False: an observation.
            meta_info: ``meta_info`` of the engine's answer: its finish reason and weight versions.
            text: for reading.
            update_terminal_info: take the status from ``meta_info``.

        Raises:
            ValueError: trained tokens without as many log-probs, or an observation with log-probs.
        """
        ids, sampled = list(tokens), None if log_probs is None else list(log_probs)
        if trainable is (sampled is None) or (sampled is not None and len(sampled) != len(ids)):
            shown = "no log-probs" if sampled is None else f"{len(sampled)} log-probs"
            accepted = "one for each token" if trainable else "none, since it does not train"
            raise ValueError(f"sample {self.index}: {len(ids)} more response tokens with {shown}; accepted: {accepted}")
        self.tokens = TokenIds([*self.tokens, *ids])
        trained = [int(trainable)] * len(ids)
        if isinstance(self.loss_mask, list):
            self.loss_mask += trained  # in place: functions written for slime hold on to their list
        else:
            self.loss_mask = Mask([*self._mask_so_far(), *trained])
        self.rollout_log_probs = LogProbs([*(self.rollout_log_probs or ()), *(sampled or [0.0] * len(ids))])
        if self.rollout_top_p_token_offsets is not None:
            end = self.rollout_top_p_token_offsets[-1]
            self.rollout_top_p_token_offsets = TokenIds([*self.rollout_top_p_token_offsets, *([end] * len(ids))])
        self.response_length += len(ids)
        self.response += text
        if meta_info is not None:
            self._take_over(meta_info, len(ids), is_last=update_terminal_info)

    def _mask_so_far(self) -> Iterable[int]:
        return [1] * self.response_length if self.loss_mask is None else self.loss_mask

    def _take_over(self, meta_info: Mapping[str, Any], added: int, *, is_last: bool) -> None:
        spans = meta_info.get("weight_versions") or [{"version": meta_info.get("weight_version")}]
        self.weight_versions += [
            span["version"] for span in spans if span["version"] not in (None, *self.weight_versions)
        ]
        offset = self.response_length - added
        places = [(span["version"], span.get("start", 0), span.get("end", added)) for span in spans]
        self.weight_spans += [
            (name, offset + start, offset + end) for name, start, end in places if name and end > start
        ]
        if is_last:
            ends = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}
            reason = meta_info["finish_reason"]
            self.status = ends[reason["type"] if isinstance(reason, dict) else reason]

    def to_dict(self) -> dict[str, JsonValue]:
        """Return every field by name, for JSON: arrays as lists, opaque ones as objects. :meth:`from_dict` reads it."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        plain = {name: list(value) if isinstance(value, Numbers) else value for name, value in values.items()}
        experts: Any = self.rollout_routed_experts
        plain["rollout_routed_experts"] = experts if experts is None or isinstance(experts, list) else experts.tolist()
        plain["engine_columns"] = {name: column.tolist() for name, column in self.engine_columns.items()}
        plain["multimodal_train_inputs"] = json_of(self.multimodal_train_inputs)
        plain["label"] = json.loads(self.label) if isinstance(self.label, JsonLabel) else self.label
        counters = {entry.name: getattr(self.spec_info, entry.name) for entry in fields(self.spec_info)}
        return {**plain, "status": self.status.value, "spec_info": counters}

    @staticmethod
    def from_dict(values: Mapping[str, JsonValue]) -> Sample:
        """Return the sample that :meth:`to_dict` described.

        Raises:
            TypeError: an entry is not a field of a sample.
            TypeError, ValueError, OverflowError: an entry has another type than its field.
        """
        entries: dict[str, Any] = dict(values)
        numbers = {name: kind(entries[name]) for name, kind in NUMBERS.items() if entries.get(name) is not None}
        counters = SpecInfo(**entries.get("spec_info", {}))
        status = Status(entries.get("status", Status.PENDING))
        spans = [(version, start, end) for version, start, end in entries.get("weight_spans", ())]
        inputs = read_json(entries.get("multimodal_train_inputs"))
        if entries.get("engine_columns"):
            import numpy as np  # here, so that importing this module does not load numpy

            entries["engine_columns"] = {
                name: np.array(column, np.float32) for name, column in entries["engine_columns"].items()
            }
        if isinstance(entries.get("label"), dict | list):
            entries["label"] = JsonLabel(json.dumps(entries["label"]))
        read = {"status": status, "spec_info": counters, "weight_spans": spans, "multimodal_train_inputs": inputs}
        return Sample(**{**entries, **numbers, **read})


PromptGroup = list[Sample]


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One row of a run's file of samples: texts, reward and status, without tokens and log-probabilities.

    Example: ``SampleRecord(group=3, index=0, prompt="1+1=", response="2", label="2", reward=1.0, status="completed",
    response_length=2, weight_versions=("4",))``.

    Arguments:
        group, index: ``group_index`` and ``index`` of the :class:`~slime_core.types.Sample`.
        status: ``completed``, ``truncated``, ``aborted`` or ``failed``.
        response_length: tokens.
        weight_versions: versions of the weights that produced it, oldest first.
        eval_set: name of the evaluation set. None for training samples.
        dropped: why it was excluded from training, or None.
        cause: why it failed, or None.
        error: the message of that failure.
        masked: whether the loss ignores its tokens.
    """

    group: int | None
    index: int | None
    prompt: str | list[dict[str, JsonValue]]
    response: str
    label: JsonValue
    reward: Reward | None
    status: str
    response_length: int
    weight_versions: tuple[str, ...] = ()
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    eval_set: str | None = None
    dropped: str | None = None
    cause: str | None = None
    error: str | None = None
    masked: bool = False


REWARD_TOLERANCE = 1e-9
"""Rewards that differ by less count as equal, in pass@k and wherever a group's rewards are compared; of rewards above 1
relative to the largest. Sums of decimals differ by rounding: ``0.7 + 0.2 + 0.1`` is less than 1."""


def tools_of(metadata: Mapping[str, JsonValue]) -> list[JsonValue] | None:
    """Return the tools for the chat template: the objects under ``tools``; None if there are none, or other values."""
    tools = metadata.get(TOOLS)
    return tools if isinstance(tools, list) and tools and all(isinstance(tool, dict) for tool in tools) else None


def equal_rewards(rewards: Iterable[float]) -> bool:
    """Return whether all rewards are equal within :data:`REWARD_TOLERANCE`.

    Example: ``equal_rewards([1.0, 0.7 + 0.2 + 0.1])`` is True.
    """
    values = list(rewards)
    return not values or max(values) - min(values) <= REWARD_TOLERANCE * max(1.0, *map(abs, values))


def reaches(reward: float, threshold: float) -> bool:
    """Return whether a reward is at least ``threshold``, within :data:`REWARD_TOLERANCE`."""
    return reward >= threshold or equal_rewards((reward, threshold))


def label_text(sample: Sample, reward: str) -> str:
    """Return the label as text, without surrounding white space.

    Raises:
        DataError: the sample has no label for reward model ``reward`` to compare with.
    """
    if sample.label is None:
        raise DataError(
            f"reward model {reward!r}: sample {sample.index} of group {sample.group_index} has no label to compare "
            "with.\n"
            "Name the label's field with --label-key, or choose another reward model."
        )
    # A data source of the user may give a number.
    return str(sample.label).strip()


NO_LABEL = "the row has no label to compare with; name its field with --label-key, or choose another reward model"


def needs_label(label: JsonValue, metadata: Mapping[str, JsonValue]) -> str | None:
    """Return what is wrong with a row's label if it is missing or empty; for ``check_row`` of reward models."""
    del metadata
    is_empty = not label.strip() if isinstance(label, str) else label is None or label == [] or label == {}
    return NO_LABEL if is_empty else None


def needs_text_label(label: JsonValue, metadata: Mapping[str, JsonValue]) -> str | None:
    """Return what is wrong with a row's label if it is missing or empty, or an object or a list, which no text equals;
    for ``check_row`` of reward models."""
    if label and isinstance(label, list | dict):
        kind = "a list" if isinstance(label, list) else "an object"
        return f"the label is {kind}; name the field in it that holds the text or number to compare with (--label-key)"
    return needs_label(label, metadata)
