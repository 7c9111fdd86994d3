"""Contracts of a rollout: data sources, generate functions, reward models, sample transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime_core.types import JsonValue, Prompt, PromptGroup, Reward, RewardFailure, Sample, tools_of

if TYPE_CHECKING:
    from slime_core.generation import GenerateContext, SamplingParams

__all__ = [
    "CheckedRewardModel",
    "DataSource",
    "GenerateFunction",
    "GroupGenerateFunction",
    "GroupTransform",
    "PromptFilter",
    "PromptLimits",
    "PromptRequest",
    "PromptRow",
    "PromptScreen",
    "RewardModel",
    "RolloutBatch",
    "RolloutSource",
    "RolloutTransform",
    "TrainSamples",
    "Transformed",
]


class RewardModel(Protocol):
    """Scores finished responses."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[Reward | RewardFailure]:
        """Return one reward for each sample, in the order of ``samples``. Do not change the samples."""
        ...


class CheckedRewardModel(RewardModel, Protocol):
    """A reward model that checks rows before the run starts. Both methods are optional and static: the core calls them
    on the class."""

    @staticmethod
    def check_row(label: JsonValue, metadata: Mapping[str, JsonValue]) -> str | None:
        """Return why no response to a row could be rewarded, such as ``the label is empty``, or None.

        ``slime_core.types.needs_label`` and ``needs_text_label`` are such functions. A mistake is reported with file
        and line, and handled by ``on_bad_data``.

        Arguments:
            label: value in the row: text, a number, an object, a list, or null.
            metadata: of the row.
        """
        ...

    @staticmethod
    def perfect_response(label: str) -> str:
        """Return a response that should be rewarded with 1. If the reward has several numbers, with 1 for each.

        Before a run, the core scores such responses for labels of a file, and lists the labels with another reward.
        """
        ...


class GenerateFunction(Protocol):
    """Generates the response to one sample's prompt (scope ``sample``)."""

    async def __call__(
        self, context: GenerateContext, sample: Sample, sampling: SamplingParams
    ) -> Sample | list[Sample]:
        """Return the finished sample, or several samples of one generation that share a ``rollout_id``.

        If the core aborts a generation, return the sample as ``ABORTED`` with the tokens so far. With
        ``partial_rollout`` the sample is requeued: unchanged if the function ``resumes``, otherwise from the start.
        Several samples of one generation restart as the original sample.
        """
        ...


class GroupGenerateFunction(Protocol):
    """Generates the responses to one prompt group (scope ``group``)."""

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """Return the finished samples of the group.

        Aborted samples are requeued as in :class:`GenerateFunction`. If the function ``resumes``, the group contains
        their finished siblings, which must be returned unchanged; otherwise the complete group restarts. With
        ``failed_samples = retry`` the group may contain only its failed samples.
        """
        ...


class PromptFilter:
    """Decides which prompts a run uses, and counts the others. This base class accepts all prompts.

    A data source checks each row, selects prompts, and reports the rows that it skips.
    """

    def check(self, metadata: Mapping[str, JsonValue], label: JsonValue, where: str) -> None:
        """Return if the run supports the settings of a row, and its reward model can reward a response to it.

        Arguments:
            metadata: of the row.
            label: value in the row: text, a number, an object, a list, or null.
            where: file and line, for the message.

        Raises:
            DataError: the row names a component that the run does not have, or sampling that it cannot train on, or no
                response to the row could be rewarded.
        """
        del metadata, label, where

    def check_prompt(self, prompt: Prompt, metadata: Mapping[str, JsonValue], where: str) -> None:
        """Return if the chat template renders the complete prompt.

        Arguments:
            metadata: of the row, with its tools.
            where: file and line, for the message.

        Raises:
            DataError: the template refuses the prompt, or omits a message or the tools.
        """
        del prompt, metadata, where

    def select(self, prompts: Sequence[tuple[Prompt, list[JsonValue] | None]]) -> Sequence[bool]:
        """Return for each prompt, paired with its tools, whether it is short enough.

        Raises:
            DataError: a prompt cannot be turned into tokens.
        """
        return [True] * len(prompts)

    def count_left_out(self, reason: str, count: int) -> None:
        """Count rows that are skipped for the reason ``TOO_LONG``, ``BAD``, or a reason of the data source."""
        del reason, count

    def report_bad_row(self, mistake: str) -> None:
        """Report the mistake in a row that is skipped because it cannot be read. The text starts with file and line."""
        del mistake


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """The request to a data source.

    Arguments:
        path: the prompts: a file, or anything else that the data source accepts.
        input_key, label_key, metadata_key, tool_key: fields of a row.
        n_samples_per_prompt: samples of a group.
        shuffle: whether each epoch has a new random order, from ``seed``. False means file order.
        multimodal_keys: pairs of a kind of input, such as ``image``, and the field of a row with it.
        skips_bad: whether rows that cannot be read are skipped instead of being an error.
        vocab_size: number of ids of the model. None if unknown.
        filter: decides which prompts the run uses.
    """

    path: Path
    input_key: str = "prompt"
    label_key: str | None = "label"
    metadata_key: str = "metadata"
    n_samples_per_prompt: int = 1
    shuffle: bool = True
    seed: int = 0
    tool_key: str | None = None
    multimodal_keys: tuple[tuple[str, str], ...] = ()
    skips_bad: bool = False
    vocab_size: int | None = None
    filter: PromptFilter = field(default_factory=PromptFilter)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt of a file.

    Example: the line ``{"prompt": "37+45", "label": "82", "metadata": {"carries": 1}}``.

    Arguments:
        prompt: text, or chat messages (parsed if the row has them as JSON text).
        label: the ground truth as text, or None.
        metadata: other fields, for rewards and reports. ``tools`` are the tools for the chat template.
        inputs: kind -> images or other inputs of the row, or None.
        place: file and line, for messages.
    """

    prompt: Prompt
    label: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    inputs: dict[str, JsonValue] | None = None
    place: str = field(default="", compare=False)

    @property
    def tools(self) -> list[JsonValue] | None:
        """The tools for the chat template, or None."""
        return tools_of(self.metadata)


class DataSource(Protocol):
    """Returns prompt groups, and can continue from a stored state.

    The settings of ``[data]`` are in ``run.prompts``, a :class:`PromptRequest`. A data source never ends: it repeats
    its prompts in a new epoch, or makes new ones.

    A class may have a class method ``screen(options, run, screen: PromptScreen) -> Sequence[str]``, which checks its
    files before the run starts, also in ``slime check``. It returns a text with file and line for each mistake in rows
    that the run will skip (``on_bad_data = skip``), and raises DataError for prompts that the run cannot use. The data
    source ``prompts`` must have it and ``__len__``, because it also reads evaluation sets.
    """

    def next_groups(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` prompt groups. Their samples are ``PENDING``."""
        ...

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Accept unfinished groups, which ``next_groups`` returns first."""
        ...

    def state(self) -> dict[str, JsonValue]:
        """Return the state for ``restore``, as JSON-ready values."""
        ...

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from ``state``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """The rendering of prompts, and the limit on their length.

    Example: with ``context=128`` and ``response=8``, a prompt may have 120 tokens.

    Arguments:
        context: context length of the model in tokens, for prompt and response. None if unknown before it runs.
        response: limit on a response, in tokens.
        folder: Hugging Face folder with the tokenizer.
        apply_chat_template: whether the tokenizer's template renders prompts.
        leaves_out: number of tokens above which a prompt is skipped, or None.
        template_arguments: additional arguments of the template.
    """

    context: int | None
    response: int
    folder: Path
    apply_chat_template: bool
    leaves_out: int | None = None
    template_arguments: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScreen:
    """The arguments with which a data source checks its prompts before a run.

    Arguments:
        setting: the setting with the path, for messages. Empty for the data of the demo.
        limits: for rows that name no generate function. None if the generate function changes prompts.
        keys: setting -> field that at least one row must have.
        see: called with a path and its checked rows.
    """

    setting: str
    limits: PromptLimits | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    see: Callable[[Path, Sequence[PromptRow]], None] = lambda path, rows: None


class RolloutBatch(Protocol):
    """The rollout that a :class:`RolloutSource` fills.

    Attributes:
        wanted: number of groups to collect, ``rollout_batch_size`` by default. A source may set another number.
    """

    wanted: int

    @property
    def rollout(self) -> int:
        """Number of the rollout, from 0."""
        ...

    @property
    def missing(self) -> int:
        """Number of groups still to collect. Groups that sample transforms drop, or that are too old, do not count."""
        ...

    @property
    def prompts(self) -> DataSource:
        """The run's data source. Pass each group that it returns to :meth:`add`, or put it back."""
        ...

    def generation(self, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """Return the arguments of a generate function for ``sample`` and its group: the context, and the sampling
        parameters of the run, with the stop conditions of the sample's row.

        Example, one turn for every sample of a group::

            context, sampling = batch.generation(group[0])
            await slime_core.generation.generate_group(context, group, sampling)

        Raises:
            DataError: the row has sampling parameters that do not exist or cannot be trained on.
        """
        ...

    async def add(self, groups: Sequence[PromptGroup]) -> None:
        """Add finished groups. The reward model scores samples without a reward, groups above the limit on staleness
        are discarded, and sample transforms are applied to the others.

        Raises:
            SlimeError: a reward model or a sample transform failed.
        """
        ...


class RolloutSource(Protocol):
    """Makes complete rollouts, instead of the run's generate function (``--rollout-source``).

    Only one call runs at a time. The core then computes advantages, loss weights and shards. A source may generate with
    the run's engines (:meth:`RolloutBatch.generation`), which have the weights that were published last.
    """

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add the groups of rollout ``batch.rollout`` to ``batch``.

        Returns:
            Additional metrics of the rollout by full name.
        """
        ...

    def state(self) -> Mapping[str, JsonValue]:
        """Return the state for ``restore``, without that of the data source, which the core saves."""
        ...

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from ``state``. Not called if it is empty."""
        ...


@dataclass(frozen=True, slots=True)
class TrainSamples:
    """Training samples that replace those of a rollout; see ``slime_before_shards``.

    Arguments:
        samples: with tokens, log-probabilities, masks and rewards; at least one for each optimizer step and learner
            rank.
        rewards_are_advantages: whether rewards are used as advantages, without an estimator of scope ``sample``.
    """

    samples: list[Sample]
    rewards_are_advantages: bool = False


@dataclass(frozen=True, slots=True)
class Transformed:
    """The result of a sample transform for one prompt group.

    Example, a group whose rewards are all equal::

        Transformed(samples, dropped="zero_std")

    Arguments:
        samples: the new group: fewer samples, other rewards, ``loss_mask`` or ``remove_sample`` set.
        dropped: why the group is not trained on, counted as ``rollout/dropped/REASON``. None if it is trained on.
        changed: reason -> number of samples changed for it, counted as ``rollout/changed/REASON``.
    """

    samples: PromptGroup
    dropped: str | None = None
    changed: Mapping[str, int] = field(default_factory=dict)


class GroupTransform(Protocol):
    """Keeps, drops, masks or shapes one finished, rewarded prompt group (scope ``group``).

    It receives the completed and truncated samples, at least one. A dropped group is replaced by a group of another
    prompt, in up to ``rollout_max_refills`` rounds.
    """

    def __call__(self, samples: PromptGroup) -> Transformed:
        """Transform one group; may change the samples that it receives."""
        ...


class RolloutTransform(Protocol):
    """Keeps, drops, masks or shapes all prompt groups of a rollout together (scope ``rollout``).

    If groups are replaced, it is called again with all groups in their original state.
    """

    def __call__(self, groups: Sequence[PromptGroup]) -> Sequence[Transformed]:
        """Transform each group, in order; may change the samples that it receives."""
        ...
