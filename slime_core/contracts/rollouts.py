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
        """One reward a sample, in the order of ``samples``; changes none of them."""
        ...


class CheckedRewardModel(RewardModel, Protocol):
    """A reward model that checks rows before anything starts. Both methods are optional, and static: the core calls
    them on the class."""

    @staticmethod
    def check_row(label: JsonValue, metadata: Mapping[str, JsonValue]) -> str | None:
        """Return why no response to a row could be rewarded, such as ``the label is empty``; None if one could.

        ``slime_core.types.needs_label`` and ``needs_text_label`` are such functions. A mistake is an error of the row,
        with file and line; ``on_bad_data`` applies.

        Arguments:
            label: as the row has it: text, a number, an object, a list, or null.
            metadata: of the row.
        """
        ...

    @staticmethod
    def perfect_response(label: str) -> str:
        """Return a response that should get full marks: a reward of 1, each number of it if there are several.

        The core scores the responses to a file's labels before a run and names the labels that do not get full marks.
        """
        ...


class GenerateFunction(Protocol):
    """Makes the response to one sample's prompt (scope ``sample``)."""

    async def __call__(
        self, context: GenerateContext, sample: Sample, sampling: SamplingParams
    ) -> Sample | list[Sample]:
        """The finished sample, or several that one generation fanned out into and that share a ``rollout_id``.

        A sample whose generation was ended from outside, in whichever turn, comes back as ``ABORTED``, with the tokens
        that it has. With ``partial_rollout`` it is handed over again: as it is where the function's traits say
        ``resumes``, else again; a fan-out restarts as the one sample that it was made from.
        """
        ...


class GroupGenerateFunction(Protocol):
    """Makes the responses to one prompt group (scope ``group``)."""

    async def __call__(self, context: GenerateContext, samples: PromptGroup, sampling: SamplingParams) -> list[Sample]:
        """The finished samples of the group.

        Aborted samples are as in :class:`GenerateFunction`; their finished siblings come with them, to be returned as
        they are, where the traits say ``resumes``. Else all of the group is restarted. Failed samples may come alone
        (``failed_samples = retry``).
        """
        ...


class PromptFilter:
    """Decides which prompts a run uses, and counts the others. This base class uses all of them.

    A data source checks each row, selects among the prompts that it read, and reports what it leaves out.
    """

    def check(self, metadata: Mapping[str, JsonValue], label: JsonValue, where: str) -> None:
        """Return if the run supports what a row requests, and its reward model can reward a response to it.

        Arguments:
            metadata: of the row.
            label: as the row has it: text, a number, an object, a list, or null.
            where: file and line, for the message.

        Raises:
            DataError: the row names a component that the run lacks, or sampling that it cannot train on; or no response
                to the row could be rewarded.
        """
        del metadata, label, where

    def check_prompt(self, prompt: Prompt, metadata: Mapping[str, JsonValue], where: str) -> None:
        """Return if the chat template renders the whole prompt.

        Arguments:
            metadata: of the row, with its tools.
            where: file and line, for the message.

        Raises:
            DataError: the template refuses the prompt, or leaves a message or the tools out.
        """
        del prompt, metadata, where

    def select(self, prompts: Sequence[tuple[Prompt, list[JsonValue] | None]]) -> Sequence[bool]:
        """Return for each prompt, given with its tools, whether it is short enough.

        Raises:
            DataError: a prompt cannot be turned into tokens.
        """
        return [True] * len(prompts)

    def count_left_out(self, reason: str, count: int) -> None:
        """Count further rows that are left out for ``TOO_LONG``, ``BAD``, or a reason of the data source."""
        del reason, count

    def report_bad_row(self, mistake: str) -> None:
        """Report the mistake in a row that is left out because it cannot be read; it starts with file and line."""
        del mistake


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """The request to a data source.

    Arguments:
        path: the prompts; the data source decides what a path may be.
        input_key, label_key, metadata_key, tool_key: fields of a row.
        n_samples_per_prompt: samples of a group.
        shuffle: a new order each epoch, by ``seed``; False: file order.
        multimodal_keys: pairs of a kind of input, such as ``image``, and the field of a row that holds it.
        skips_bad: leave out rows that cannot be read; False: they are an error.
        vocab_size: number of ids of the model; None: unknown.
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
        prompt: text, or chat messages; JSON text of messages has become messages.
        label: the ground truth as text; None: the row has none.
        metadata: further fields for rewards and reports; ``tools`` holds the tools for the chat template.
        inputs: kind -> the row's images or other inputs; None: it has none.
        place: file and line, for messages.
    """

    prompt: Prompt
    label: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    inputs: dict[str, JsonValue] | None = None
    place: str = field(default="", compare=False)

    @property
    def tools(self) -> list[JsonValue] | None:
        """The tools for the chat template; None: there are none."""
        return tools_of(self.metadata)


class DataSource(Protocol):
    """Returns prompt groups, and can continue from an earlier place.

    Its target finds its request in ``run.prompts``, a :class:`PromptRequest`. It never runs out: prompts come
    again in a new epoch, or it makes new ones without end.

    A class may have a class method ``screen(options, run, screen: PromptScreen) -> Sequence[str]``, which looks at its
    files before anything starts, in ``slime check`` too. It returns what is wrong with rows that the run will leave out
    (``on_bad_data = skip``), with file and line, and raises DataError for what the run cannot use. The data source
    ``prompts`` must have it and ``__len__``, because it reads evaluation sets too.
    """

    def next_groups(self, n: int) -> list[PromptGroup]:
        """Return the next ``n`` prompt groups, of pending samples."""
        ...

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Take unfinished groups back; they are returned first."""
        ...

    def state(self) -> dict[str, JsonValue]:
        """Return the state for ``restore``, as JSON-ready values."""
        ...

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from ``state``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """How prompts are rendered, and how many tokens they may have.

    Example: with ``context=128`` and ``response=8``, a prompt may have 120 tokens.

    Arguments:
        context: tokens that the model reads, prompt and response together; None: unknown before it runs.
        response: the longest response.
        folder: Hugging Face folder with the tokenizer.
        apply_chat_template: prompts are rendered with the tokenizer's template.
        leaves_out: prompts of more tokens are left out of the run; None: none are.
        template_arguments: further arguments of the template.
    """

    context: int | None
    response: int
    folder: Path
    apply_chat_template: bool
    leaves_out: int | None = None
    template_arguments: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScreen:
    """What a data source needs to check its prompts before a run.

    Arguments:
        setting: names ``run.prompts.path``, for messages; empty: no setting does, it is the data of the demo.
        limits: of rows that name no generate function; None: the generate function decides what it makes of prompts.
        keys: setting -> field that at least one row must have.
        see: called with a path and its rows, after they were checked.
    """

    setting: str
    limits: PromptLimits | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    see: Callable[[Path, Sequence[PromptRow]], None] = lambda path, rows: None


class RolloutBatch(Protocol):
    """The rollout that is being collected, as a :class:`RolloutSource` fills it.

    Attributes:
        wanted: groups that are to be kept, ``rollout_batch_size`` at first. A source that makes another number sets it.
    """

    wanted: int

    @property
    def rollout(self) -> int:
        """Number of the rollout, from 0."""
        ...

    @property
    def missing(self) -> int:
        """Groups that are still to be kept: sample transforms drop some, and others are too old."""
        ...

    @property
    def prompts(self) -> DataSource:
        """The run's data source. A group that was taken from it ends in :meth:`add`, or is put back."""
        ...

    def generation(self, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """The arguments of a generate function for ``sample`` and its group: the engines and the tokenizer, and how a
        response is sampled, by the run's settings and by what the sample's row says of where responses end.

        Example, one turn for every sample of a group::

            context, sampling = batch.generation(group[0])
            await slime_core.generation.generate_group(context, group, sampling)

        Raises:
            DataError: the row has sampling parameters that do not exist or cannot be trained on.
        """
        ...

    async def add(self, groups: Sequence[PromptGroup]) -> None:
        """Add finished groups. The run's reward model scores samples without a reward, groups above the bound on
        staleness are left out, and sample transforms decide on the others.

        Raises:
            SlimeError: a reward model or a sample transform failed.
        """
        ...


class RolloutSource(Protocol):
    """Makes whole rollouts, in place of the run's generate function (``--rollout-source``).

    One call is under way at a time. What comes after it is the same for every source: advantages, loss weights,
    shards. It may generate with the run's engines (:meth:`RolloutBatch.generation`), which hold the weights that were
    published last.
    """

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add the groups of rollout ``batch.rollout`` to ``batch``.

        Returns:
            Further metrics of the rollout, by their full names; empty: none.
        """
        ...

    def state(self) -> Mapping[str, JsonValue]:
        """The state that ``restore`` takes, besides the data source's, which the core saves; empty: nothing."""
        ...

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from where ``state()`` was taken; not called where that was empty."""
        ...


@dataclass(frozen=True, slots=True)
class TrainSamples:
    """The samples that are trained in place of a rollout's; see ``slime_before_shards``.

    Arguments:
        samples: with tokens, log-probabilities, masks and rewards; one for each optimizer step and learner rank, or
            more.
        rewards_are_advantages: an advantage estimator of scope ``sample`` is not called: rewards are advantages.
    """

    samples: list[Sample]
    rewards_are_advantages: bool = False


@dataclass(frozen=True, slots=True)
class Transformed:
    """The result of a sample transform for one prompt group.

    Example: a group whose rewards are all equal is left out::

        Transformed(samples, dropped="zero_std")

    Arguments:
        samples: the group as it goes on; fewer samples, other rewards, ``loss_mask`` or ``remove_sample`` set.
        dropped: why the whole group is not trained on; None: it is. Counted as ``rollout/dropped/REASON``.
        changed: reason -> number of samples that were changed for it; counted as ``rollout/changed/REASON``.
    """

    samples: PromptGroup
    dropped: str | None = None
    changed: Mapping[str, int] = field(default_factory=dict)


class GroupTransform(Protocol):
    """Keeps, drops, masks or shapes one finished, rewarded prompt group (scope ``group``).

    It sees the samples that can be trained on, completed or truncated; there is at least one. A group that it drops is
    replaced by one of another prompt, up to ``rollout_max_refills`` rounds.
    """

    def __call__(self, samples: PromptGroup) -> Transformed:
        """Transform one group; may change the samples that it receives."""
        ...


class RolloutTransform(Protocol):
    """Keeps, drops, masks or shapes all prompt groups of a rollout, seen together (scope ``rollout``).

    Where groups had to be replaced, it is called again with all of them, as they were before it saw them first.
    """

    def __call__(self, groups: Sequence[PromptGroup]) -> Sequence[Transformed]:
        """Transform each group, in order; may change the samples that it receives."""
        ...
