"""Contracts of a rollout: prompt formats, data sources, generate functions, reward models, sample transforms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime_core.types import JsonValue, Prompt, PromptGroup, Reward, RewardFailure, Sample

if TYPE_CHECKING:
    from slime_core.contracts.run import RunView
    from slime_core.generation import GenerateContext, SamplingParams

__all__ = [
    "CheckedRewardModel",
    "DataSource",
    "GenerateFunction",
    "GroupGenerateFunction",
    "GroupTransform",
    "PromptFilter",
    "PromptFormat",
    "PromptRequest",
    "PromptScreen",
    "PromptTable",
    "RawRow",
    "RewardModel",
    "RolloutBatch",
    "RolloutSource",
    "RolloutTransform",
    "ScreenedDataSource",
    "TrainSamples",
    "Transformed",
]


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as its file holds it.

    Example: ``RawRow(Path("a.parquet"), 3, {"prompt": "2+2", "label": "4"})``.

    Arguments:
        file: that holds it.
        number: from 1.
        content: field -> value; or, of a text file, the bytes of a line that is a JSON object.
    """

    file: Path
    number: int
    content: bytes | Mapping[str, object]

    @property
    def place(self) -> str:
        """File and row, for messages."""
        return f"{self.file}, {'line' if isinstance(self.content, bytes) else 'row'} {self.number}"

    @property
    def is_blank(self) -> bool:
        """Whether it is an empty line."""
        return isinstance(self.content, bytes) and not self.line.strip()

    @property
    def line(self) -> bytes:
        """The bytes of a line, without the byte order mark that a file may start with; empty for fields."""
        found = self.content if isinstance(self.content, bytes) else b""
        return found.removeprefix(BYTE_ORDER_MARK) if self.number == 1 else found


class PromptTable(Protocol):
    """The rows of one file, numbered from 0 in the order of the file; read as they are needed.

    The file must not change while it is open: a method raises a DataError where it finds that it did.
    """

    def reaches(self, row: int) -> bool:
        """Whether there is a row ``row``; reads no further than that."""
        ...

    def total(self) -> int:
        """The number of rows; may take as long as reading the whole file."""
        ...

    def read(self, start: int, stop: int) -> Iterator[RawRow]:
        """Rows ``start`` to ``stop - 1``, as far as there are; of any part of the file, any number of times.

        Raises:
            DataError: the file is not what its format says; names file and row.
        """
        ...

    def stamp(self) -> str:
        """Tells this content from another, wherever the file lies; resuming a run compares it."""
        ...


class PromptFormat(Protocol):
    """Opens prompt files of one format, for training and evaluation alike.

    A component's name is the suffix of its files, without the dot (``parquet``); or the name of a file that marks a
    folder of the format, which has a dot (``state.json``).
    """

    def open(self, path: Path, *, window: int | None) -> PromptTable:
        """The rows of a file, or of a folder; reads as little as it can.

        Arguments:
            window: how far from file order rows will be read. 0: in file order; N: in any order among N
                neighbours, then among the next N; None: in any order among all.

        Raises:
            DataError: it cannot be read; names the file, and says what to do.
        """
        ...


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
    """Which prompts a run uses; counts the others. This one, for tests and the like, uses all of them.

    A data source checks each row, selects among the prompts that it read, and reports what it leaves out.
    """

    def check(self, metadata: Mapping[str, JsonValue], where: str) -> None:
        """Returns if the run can do what a row asks for; a row that is refused is one that cannot be read.

        Arguments:
            metadata: of the row.
            where: file and line, for the message.

        Raises:
            DataError: the row names a component that the run does not have, or sampling that it cannot train on.
        """
        del metadata, where

    def check_prompt(self, prompt: Prompt, metadata: Mapping[str, JsonValue], where: str) -> None:
        """Return if the chat template renders the prompt of a row whole; a prompt that is refused cannot be read.

        Arguments:
            metadata: of the row, with its tools.
            where: file and line, for the message.

        Raises:
            DataError: the template refuses the prompt, or leaves a message or the tools out.
        """
        del prompt, metadata, where

    def check_label(
        self, label: JsonValue, metadata: Mapping[str, JsonValue], where: str, *, key: str | None = None
    ) -> None:
        """Returns if the row's reward model can reward a response to it; see :class:`CheckedRewardModel`.

        Arguments:
            label: as the row has it: text, a number, an object, a list, or null.
            key: the field that holds it, for the message; None: rows have none.

        Raises:
            DataError: no response to the row could be rewarded.
        """
        del label, metadata, where, key

    def select(self, prompts: Sequence[tuple[Prompt, list[JsonValue] | None]]) -> Sequence[bool]:
        """Which of many prompts, each with its tools, are short enough; on several processes where the run has them.

        Raises:
            DataError: one of them cannot be turned into tokens.
        """
        return [True] * len(prompts)

    def count_left_out(self, reason: str, count: int) -> None:
        """So many rows more are left out: for ``too_long``, ``bad``, or a reason of the data source."""
        del reason, count

    def report_bad_row(self, mistake: str) -> None:
        """The mistake in a row that is left out because it cannot be read, file and line first."""
        del mistake


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """The request to a data source.

    Arguments:
        path: the prompts; a file, a folder, a pattern or a slice of one, as :mod:`slime_core.config.prompt_paths` says.
        input_key, label_key, metadata_key, tool_key: fields of a row.
        n_samples_per_prompt: samples of a group.
        shuffle: a new order each epoch, by ``seed``; False: file order.
        multimodal_keys: pairs of a kind of input, such as ``image``, and the field of a row that holds it.
        skips_bad: leave rows out that cannot be read; False: they are an error.
        vocab_size: ids that the model has; None: not known.
        formats: name -> how prompt files of the format are read; a file of none of them is read as JSON Lines.
        filter: which prompts the run uses; see :class:`PromptFilter`.
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
    formats: Mapping[str, PromptFormat] = field(default_factory=dict)
    vocab_size: int | None = None
    filter: PromptFilter = field(default_factory=PromptFilter)


class DataSource(Protocol):
    """Hands out prompt groups, and can be put back to where it was.

    Its target finds its request in ``run.prompts``, a :class:`PromptRequest`. It never runs out: prompts come
    again in a new epoch, or it makes new ones without end.
    """

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` prompt groups, of pending samples."""
        ...

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Take unfinished groups back; they are handed out first."""
        ...

    def state(self) -> dict[str, JsonValue]:
        """The state that ``restore`` takes, as JSON-ready values."""
        ...

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Continue from where ``state()`` was taken."""
        ...


class PromptScreen(Protocol):
    """Looks through prompt files before anything starts, as the core does for its own data source."""

    def __call__(self, path: Path, *, setting: str, share: float = 1.0) -> Sequence[str]:
        """The mistakes in rows of ``path`` that the run will leave out (``on_bad_data = skip``), with file and line.

        Arguments:
            path: as :class:`PromptRequest` takes it.
            setting: which setting names it, for messages.
            share: of the bytes that are looked at otherwise.

        Raises:
            DataError: a row cannot be read or requests what the run cannot do, or a prompt is too long.
        """
        ...


class ScreenedDataSource(DataSource, Protocol):
    """A data source that looks through its own files before anything starts, in ``slime check`` too. Optional."""

    @classmethod
    def screen(cls, options: object, run: RunView, prompts: PromptScreen) -> Sequence[str]:
        """Look at the files of a run without making the data source.

        Arguments:
            options: of the plugin, as the constructor gets them.
            run: with ``prompts``; what counts tokens is not there yet.
            prompts: for prompt files in the core's form.

        Returns:
            What is wrong with rows that the run will leave out, with file and line; empty: nothing.

        Raises:
            DataError: with file and line.
        """
        ...


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
