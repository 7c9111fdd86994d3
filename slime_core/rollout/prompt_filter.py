"""Makes the requests for prompt files from the settings of a run, selects the prompts that are short enough, and counts
the rows that are left out. The sampler and the checks before a run call it.

Prompt tokens are counted in this process or in worker processes. A worker runs this module, reads lines of JSON, each
a list of ``[prompt, tools]``, and writes one line of token counts for each. It exits at the end of its input, so it
does not outlive the process that started it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from slime_core.config.sampling import DataConfig
from slime_core.config.schema import EvalSet, RunConfig
from slime_core.contracts import PromptFilter, PromptRequest
from slime_core.errors import DataError, RunError
from slime_core.prompts.chat import PromptEncoder, PromptTokenizer
from slime_core.types import BAD, GENERATE_FUNCTION, TOO_LONG, JsonValue, Prompt, tools_of

__all__ = ["BadRows", "PromptLengths", "RunFilter", "evaluation_request", "template_arguments", "training_request"]

PromptWithTools = tuple[Prompt, list[JsonValue] | None]
"""A prompt and its tools."""

CHUNK = 64
"""Prompts in one message to a worker process."""

MOST_REPORTED = 3
"""New bad rows that one message lists."""

MOST_WRITTEN = 1000
MOST_LETTERS = 500
"""Characters of one text; its start names file and line."""

TEXTS = {
    TOO_LONG: "prompts are longer than --rollout-max-prompt-len and are left out",
    BAD: "rows of the prompt files, or groups of --buffer-data, cannot be read and are left out (--on-bad-data skip)",
}


class BadRows:
    """Messages about bad rows, each once: a resumed run finds the same rows again.

    Arguments:
        path: receives a line for each of the first 1,000; lines of an earlier start count. None: nothing is written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        found = path.read_text(encoding="utf-8", errors="replace") if path is not None and path.is_file() else ""
        self._known = set(found.splitlines())
        self._new: list[str] = []
        self._num_new = 0

    def add(self, mistake: str) -> None:
        """Add a bad row; ``mistake`` starts with file and line."""
        text = " ".join(mistake.split())[:MOST_LETTERS]
        self._num_new += 1
        if len(self._new) < MOST_REPORTED:
            self._new.append(text)
        if text not in self._known and len(self._known) < MOST_WRITTEN:
            self._known.add(text)
            self._write(text)

    def news(self) -> list[str]:
        """Return the first bad rows since the last call, and where the others are written."""
        reported, more = self._new, self._num_new - len(self._new)
        self._new, self._num_new = [], 0
        there = "" if self._path is None else f"; the first {MOST_WRITTEN:,} of all stand in {self._path}"
        return [*reported, *([f"and {more} more{there}"] if more else [])]

    def _write(self, text: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{text}\n")


class RunFilter(PromptFilter):
    """Filter for the prompts of a run or of an evaluation; counts the rows that are left out.

    Arguments:
        checks: checks of the rows' metadata; None: every row passes.
        longest: largest number of tokens of a prompt; None: no limit.
        lengths: counts the tokens of prompts; needed with ``longest``.
        bad_rows: the file for messages about rows that cannot be read; None: none is written.
        encoder: renders prompts to check them; None: the generate function decides what it makes of prompts.
    """

    def __init__(
        self,
        checks: PromptFilter | None = None,
        *,
        encoder: PromptTokenizer | None = None,
        longest: int | None = None,
        lengths: PromptLengths | None = None,
        bad_rows: Path | None = None,
    ) -> None:
        self._checks = checks or PromptFilter()
        self._encoder = encoder
        self._longest = longest
        self._lengths = lengths
        self._bad_rows = BadRows(bad_rows)
        self._counts: Counter[str] = Counter()
        self._reported: dict[str, int] = {}

    def check(self, metadata: Mapping[str, JsonValue], label: JsonValue, where: str) -> None:
        """See :class:`~slime_core.contracts.PromptFilter`."""
        self._checks.check(metadata, label, where)

    def check_prompt(self, prompt: Prompt, metadata: Mapping[str, JsonValue], where: str) -> None:
        """See :class:`~slime_core.contracts.PromptFilter`."""
        if self._encoder is not None and not metadata.get(GENERATE_FUNCTION):
            try:
                self._encoder.check(prompt, tools=tools_of(metadata))
            except DataError as problem:
                raise DataError(f"{where}: {problem}") from None

    def select(self, prompts: Sequence[PromptWithTools]) -> Sequence[bool]:
        """See :class:`~slime_core.contracts.PromptFilter`."""
        if self._longest is None or self._lengths is None:
            return self._checks.select(prompts)
        return [count <= self._longest for count in self._lengths(prompts)]

    def count_left_out(self, reason: str, count: int) -> None:
        """See :class:`~slime_core.contracts.PromptFilter`."""
        self._counts[reason] += count

    def report_bad_row(self, mistake: str) -> None:
        """See :class:`~slime_core.contracts.PromptFilter`."""
        self._bad_rows.add(mistake)

    def count(self, reason: str) -> int:
        """Return the number of rows that were left out for ``reason``."""
        return self._counts[reason]

    def metrics(self) -> dict[str, float]:
        """Return ``data/left_out/REASON`` -> rows so far; a row counts once, not once per epoch."""
        return {f"data/left_out/{reason}": float(count) for reason, count in sorted(self._counts.items())}

    def news(self) -> list[str]:
        """Return a message for each reason whose count has more than doubled since its last message."""
        new = [reason for reason, count in sorted(self._counts.items()) if count > 2 * self._reported.get(reason, 0)]
        self._reported |= {reason: self._counts[reason] for reason in new}
        return ["\n  ".join([self._text(reason), *(self._bad_rows.news() if reason == BAD else [])]) for reason in new]

    def _text(self, reason: str) -> str:
        return f"{self._counts[reason]} {TEXTS.get(reason, f'rows are left out: {reason}')}"


class PromptLengths:
    """Counts the tokens of prompts.

    Arguments:
        encoder: counts in this process; worker processes make an equal one.
        num_workers: worker processes, started with the first prompts; 0: this process counts.

    Raises:
        DataError: a prompt cannot be turned into tokens; the message has the reason, the caller adds file and line.
        RunError: a worker process ended.
    """

    def __init__(self, encoder: PromptEncoder, *, num_workers: int = 0) -> None:
        self._encoder = encoder
        self._num_workers = num_workers
        self._workers: list[_Worker] = []

    def __call__(self, prompts: Sequence[PromptWithTools]) -> list[int]:
        """Count the tokens of each prompt, in order."""
        if not self._num_workers:
            return _count(self._encoder, prompts)
        chunks = [prompts[start : start + CHUNK] for start in range(0, len(prompts), CHUNK)]
        while len(self._workers) < min(self._num_workers, len(chunks)):
            self._workers.append(_Worker(self._encoder))
        with ThreadPoolExecutor(max(1, len(self._workers))) as threads:
            shares = [chunks[place :: len(self._workers)] for place in range(len(self._workers))]
            counts = list(threads.map(_Worker.count, self._workers, shares))
        size = len(counts)
        return [count for number in range(len(chunks)) for count in counts[number % size][number // size]]

    def close(self) -> None:
        """End the worker processes."""
        while self._workers:
            self._workers.pop().end()


class _Worker:
    """One counting process."""

    def __init__(self, encoder: PromptEncoder) -> None:
        command = [sys.executable, "-m", "slime_core.rollout.prompt_filter", json.dumps(encoder.arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stdin = cast(IO[str], self._process.stdin)
        self._stdout = cast(IO[str], self._process.stdout)

    def count(self, chunks: Sequence[Sequence[PromptWithTools]]) -> list[list[int]]:
        return [self._count_chunk(chunk) for chunk in chunks]

    def _count_chunk(self, chunk: Sequence[PromptWithTools]) -> list[int]:
        try:
            self._stdin.write(json.dumps(chunk, default=str) + "\n")
            self._stdin.flush()
            answer = json.loads(self._stdout.readline())
        except (OSError, ValueError):
            raise RunError(
                f"a process that counts the tokens of prompts ended (exit code {self._process.wait()}); its output "
                "is in this process's log. Try --num-data-workers 0"
            ) from None
        if isinstance(answer, str):
            raise DataError(answer)
        return list(answer)

    def end(self) -> None:
        for pipe in (self._stdin, self._stdout):
            with suppress(OSError):  # close() flushes, which fails if the process has ended
                pipe.close()
        self._process.wait()


def _count(encoder: PromptEncoder, prompts: Sequence[PromptWithTools]) -> list[int]:
    return [len(encoder.encode(prompt, tools=tools)) for prompt, tools in prompts]


def main(arguments: str) -> None:
    """Run a worker process: count the tokens of the prompts on standard input."""
    given = json.loads(arguments)
    encoder = PromptEncoder(Path(given.pop("folder")), **given)
    for line in iter(sys.stdin.readline, ""):
        try:
            answer: list[int] | str = _count(encoder, json.loads(line))
        except DataError as problem:
            answer = str(problem)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])


def template_arguments(data: DataConfig) -> dict[str, JsonValue]:
    """Return the arguments of the chat template in addition to the messages."""
    return dict(json.loads(data.apply_chat_template_kwargs))


def training_request(
    config: RunConfig,
    path: Path,
    filter: PromptFilter,
    *,
    vocab_size: int | None = None,
) -> PromptRequest:
    """Make the request to the run's data source, for training.

    Arguments:
        path: of the prompts.
        filter: which prompts the run uses.
        vocab_size: number of ids that the model has; None: unknown.
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
        vocab_size=vocab_size,
        filter=filter,
    )


def evaluation_request(config: RunConfig, eval_set: EvalSet, filter: PromptFilter) -> PromptRequest:
    """Make the request for the prompts of one evaluation set, in the order of the file."""
    return PromptRequest(
        path=eval_set.path,
        input_key=eval_set.input_key,
        label_key=eval_set.label_key,
        metadata_key=eval_set.metadata_key,
        tool_key=config.data.tool_key,
        n_samples_per_prompt=eval_set.n_samples_per_eval_prompt,
        shuffle=False,
        filter=filter,
    )
