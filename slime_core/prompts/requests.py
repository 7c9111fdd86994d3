"""Makes the requests for prompt files from the settings of a run, and selects the prompts that are short enough.

Prompts are counted in this process or in several. A counting process (``python -m slime_core.prompts.requests``) reads
lines of JSON, each a list of ``[prompt, tools]``, and answers each with a line of numbers; it ends with its input, so
that none outlives the process that started it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from slime_core.config.eval_sets import EvalSet
from slime_core.config.sampling import DataConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import DataError, RunError
from slime_core.plugins.contracts import PromptFilter, PromptFormat, PromptRequest
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.left_out import LeftOut
from slime_core.prompts.rows import Prompt
from slime_core.types import JsonValue

__all__ = [
    "Counting",
    "PromptLengths",
    "RunFilter",
    "ShortEnough",
    "evaluation_request",
    "short_enough",
    "template_arguments",
    "training_request",
]


PromptWithTools = tuple[Prompt, list[JsonValue] | None]
"""A prompt and its tools."""

CHUNK = 64
"""Prompts that a process is sent at once."""


@dataclass(frozen=True, slots=True)
class Counting:
    """The settings on which the tokens of prompts depend; see :class:`~slime_core.prompts.chat.PromptEncoder`."""

    folder: str
    apply_chat_template: bool
    template_arguments: str = "{}"
    trust_remote_code: bool = False

    def encoder(self) -> PromptEncoder:
        """The encoder that counts."""
        return PromptEncoder(
            Path(self.folder),
            apply_chat_template=self.apply_chat_template,
            template_arguments=json.loads(self.template_arguments),
            trust_remote_code=self.trust_remote_code,
        )


class PromptLengths:
    """Counts tokens in ``num_workers`` processes, which start with the first question.

    Raises:
        DataError: a prompt cannot be turned into tokens; says why, and the caller where it stands.
        RunError: a process ended.
    """

    def __init__(self, counting: Counting, *, num_workers: int) -> None:
        self._counting = counting
        self._num_workers = num_workers
        self._workers: list[_Worker] = []

    def __call__(self, prompts: Sequence[PromptWithTools]) -> list[int]:
        """The tokens of each prompt, in order."""
        chunks = [prompts[start : start + CHUNK] for start in range(0, len(prompts), CHUNK)]
        while len(self._workers) < min(self._num_workers, len(chunks)):
            self._workers.append(_Worker(self._counting))
        with ThreadPoolExecutor(max(1, len(self._workers))) as threads:
            shares = [chunks[place :: len(self._workers)] for place in range(len(self._workers))]
            found = list(threads.map(_Worker.answers, self._workers, shares))
        return [count for number in range(len(chunks)) for count in found[number % len(found)][number // len(found)]]

    def close(self) -> None:
        """End the processes."""
        while self._workers:
            self._workers.pop().end()


class ShortEnough:
    """Says of prompts whether they have at most ``longest`` tokens.

    Arguments:
        encoder: counts in this process.
        lengths: counts in others; None: this process counts all of them.
    """

    def __init__(self, longest: int, encoder: PromptEncoder, *, lengths: PromptLengths | None = None) -> None:
        self._longest = longest
        self._encoder = encoder
        self._lengths = lengths

    def select(self, prompts: Sequence[PromptWithTools]) -> list[bool]:
        """For each prompt with its tools, whether it is short enough."""
        if self._lengths is None:
            return [len(self._encoder.encode(prompt, tools=tools)) <= self._longest for prompt, tools in prompts]
        return [count <= self._longest for count in self._lengths(prompts)]


class _Worker:
    """One counting process."""

    def __init__(self, counting: Counting) -> None:
        command = [sys.executable, "-m", "slime_core.prompts.requests", json.dumps(asdict(counting))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answers(self, chunks: Sequence[Sequence[PromptWithTools]]) -> list[list[int]]:
        return [self._answer(chunk) for chunk in chunks]

    def _answer(self, chunk: Sequence[PromptWithTools]) -> list[int]:
        asks, tells = self._pipes()
        try:
            asks.write(json.dumps(chunk, default=str) + "\n")
            asks.flush()
            answer = json.loads(tells.readline())
        except (OSError, ValueError):
            raise RunError(
                f"a process that counts the tokens of prompts ended (exit code {self._process.wait()}); its output "
                "is in this process's log. Try --num-data-workers 0"
            ) from None
        if isinstance(answer, str):
            raise DataError(answer)
        return list(answer)

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        asks, tells = self._process.stdin, self._process.stdout
        if asks is None or tells is None:
            raise AssertionError("started without pipes")
        return asks, tells

    def end(self) -> None:
        for pipe in self._pipes():
            with suppress(OSError):  # closing writes what is left, which a process that has ended does not take
                pipe.close()
        self._process.wait()


def _answers(lines: Iterator[str], encoder: PromptEncoder) -> Iterator[str]:
    for line in lines:
        try:
            yield json.dumps([len(encoder.encode(prompt, tools=tools)) for prompt, tools in json.loads(line)])
        except DataError as problem:
            yield json.dumps(str(problem))


def main(counting: str) -> None:
    """The counting process."""
    for answer in _answers(iter(sys.stdin.readline, ""), Counting(**json.loads(counting)).encoder()):
        print(answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])


class RunFilter(PromptFilter):
    """Which prompts a run uses, for training or in an evaluation.

    Arguments:
        left_out: counts the others.
        checks: of what rows ask for.
        short: says which prompts are short enough; None: all are.
    """

    def __init__(self, left_out: LeftOut, checks: PromptFilter | None = None, short: ShortEnough | None = None) -> None:
        self._left_out = left_out
        self._checks = checks or PromptFilter()
        self._short = short

    def check(self, metadata: Mapping[str, JsonValue], where: str) -> None:
        """See :class:`~slime_core.PromptFilter`."""
        self._checks.check(metadata, where)

    def select(self, prompts: Sequence[tuple[Prompt, list[JsonValue] | None]]) -> Sequence[bool]:
        """See :class:`~slime_core.PromptFilter`."""
        return self._checks.select(prompts) if self._short is None else self._short.select(prompts)

    def count_left_out(self, reason: str, count: int) -> None:
        """See :class:`~slime_core.PromptFilter`."""
        self._left_out.count_left_out(reason, count)

    def report_bad_row(self, mistake: str) -> None:
        """See :class:`~slime_core.PromptFilter`."""
        self._left_out.report_bad_row(mistake)


def template_arguments(data: DataConfig) -> dict[str, JsonValue]:
    """Arguments of the chat template in addition to the messages."""
    return dict(json.loads(data.apply_chat_template_kwargs))


def training_request(
    config: RunConfig,
    path: Path,
    filter: PromptFilter,
    formats: Mapping[str, PromptFormat],
    *,
    vocab_size: int | None = None,
) -> PromptRequest:
    """The request to the run's data source, for training.

    Arguments:
        path: of the prompts.
        filter: which prompts the run uses.
        formats: name -> how prompt files are read, in addition to JSON Lines.
        vocab_size: ids that the model has; None: not known.
    """
    data = config.data
    return PromptRequest(
        path=path,
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        multimodal_keys=() if data.multimodal_keys is None else tuple(json.loads(data.multimodal_keys).items()),
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        shuffle=data.rollout_shuffle,
        seed=config.run.seed,
        skips_bad=data.on_bad_data == "skip",
        formats=formats,
        vocab_size=vocab_size,
        filter=filter,
    )


def evaluation_request(
    config: RunConfig, one: EvalSet, filter: PromptFilter, formats: Mapping[str, PromptFormat]
) -> PromptRequest:
    """The request for the prompts of one evaluation set, in the order of the file."""
    return PromptRequest(
        path=one.path,
        input_key=one.input_key,
        label_key=one.label_key,
        metadata_key=one.metadata_key,
        tool_key=config.data.tool_key,
        n_samples_per_prompt=one.n_samples,
        shuffle=False,
        formats=formats,
        filter=filter,
    )


def short_enough(config: RunConfig, encoder: PromptEncoder) -> ShortEnough | None:
    """Which prompts have at most ``rollout_max_prompt_len`` tokens; None: all are kept."""
    longest = config.data.rollout_max_prompt_len
    if longest is None:
        return None
    workers = config.data.num_data_workers
    lengths = PromptLengths(_counting(config, encoder.folder), num_workers=workers) if workers else None
    return ShortEnough(longest, encoder, lengths=lengths)


def _counting(config: RunConfig, folder: Path) -> Counting:
    return Counting(
        folder=str(folder),
        apply_chat_template=config.data.apply_chat_template,
        template_arguments=config.data.apply_chat_template_kwargs,
        trust_remote_code=config.model.trust_remote_code,
    )
