"""Rows of prompt files that a run leaves out: the reasons, the counts, and the messages about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from slime_core.errors import DataError
from slime_core.plugins.contracts import PromptRequest
from slime_core.prompts.rows import PromptRow

__all__ = [
    "BAD",
    "EMPTY",
    "MOST_REPORTED",
    "TOO_LONG",
    "BadRows",
    "LeftOut",
    "nothing_left",
    "report_left_out",
    "select_short",
]

TOO_LONG, BAD, EMPTY = "too_long", "bad", "empty"
"""Why rows are left out; empty lines are not counted."""


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
        known = path is not None and path.is_file()
        self._known = dict.fromkeys(
            path.read_text(encoding="utf-8", errors="replace").splitlines() if path and known else ()
        )
        self._new: list[str] = []
        self._num_new = 0

    def add(self, mistake: str) -> None:
        """Add a bad row; ``mistake`` starts with file and line."""
        text = " ".join(mistake.split())[:MOST_LETTERS]
        self._num_new += 1
        if len(self._new) < MOST_REPORTED:
            self._new.append(text)
        if text not in self._known and len(self._known) < MOST_WRITTEN:
            self._known[text] = None
            self._write(text)

    def news(self) -> list[str]:
        """The first few since the last call, and where the others are written."""
        reported, more = self._new, self._num_new - len(self._new)
        self._new, self._num_new = [], 0
        there = "" if self._path is None else f"; the first {MOST_WRITTEN:,} of all stand in {self._path}"
        return [*reported, *([f"and {more} more{there}"] if more else [])]

    def _write(self, text: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{text}\n")


class LeftOut:
    """Counts the rows that a run leaves out, for metrics and messages.

    Arguments:
        bad_rows: the file for messages about rows that cannot be read; None: none is written.
    """

    def __init__(self, bad_rows: Path | None = None) -> None:
        self._bad_rows = BadRows(bad_rows)
        self._counts: Counter[str] = Counter()
        self._reported: dict[str, int] = {}

    def count_left_out(self, reason: str, count: int) -> None:
        """Count ``count`` more rows that were left out for ``reason``."""
        self._counts[reason] += count

    def report_bad_row(self, mistake: str) -> None:
        """Record the message about a row that cannot be read, which starts with file and line."""
        self._bad_rows.add(mistake)

    def count(self, reason: str) -> int:
        """Rows that were left out for ``reason``."""
        return self._counts[reason]

    def metrics(self) -> dict[str, float]:
        """``data/left_out/REASON`` -> rows so far, each once however often its epoch comes round."""
        return {f"data/left_out/{reason}": float(count) for reason, count in sorted(self._counts.items())}

    def news(self) -> list[str]:
        """A message for each reason that has more than twice the rows of its last message."""
        new = [reason for reason, count in sorted(self._counts.items()) if count > 2 * self._reported.get(reason, 0)]
        self._reported |= {reason: self._counts[reason] for reason in new}
        return ["\n  ".join([self._text(reason), *(self._bad_rows.news() if reason == BAD else [])]) for reason in new]

    def _text(self, reason: str) -> str:
        return f"{self._counts[reason]} {TEXTS.get(reason, f'rows are left out: {reason}')}"


def select_short(request: PromptRequest, rows: Sequence[PromptRow], places: Sequence[str]) -> Sequence[bool]:
    """For each row, whether its prompt is short enough.

    Arguments:
        places: file and line of each row.

    Raises:
        DataError: one of them cannot be turned into tokens; says which.
    """
    if not rows:
        return []
    try:
        return request.filter.select([(row.prompt, row.tools) for row in rows])
    except DataError as problem:
        if len(rows) == 1:
            raise DataError(f"{places[0]}: {problem}") from None
        for row, place in zip(rows, places, strict=True):
            select_short(request, [row], [place])
        raise


def report_left_out(request: PromptRequest, reason: str, count: int, mistakes: Sequence[str] = ()) -> None:
    """Report ``count`` rows that were left out.

    Arguments:
        mistakes: what is wrong with them, each with file and line.
    """
    if reason != EMPTY and count:
        request.filter.count_left_out(reason, count)
        for mistake in mistakes:
            request.filter.report_bad_row(mistake)


def nothing_left(request: PromptRequest, rows: int, *, bad: int) -> DataError:
    """The error of a request of which no prompt is left.

    Arguments:
        rows: that there are, empty lines aside.
        bad: of them, that cannot be read.
    """
    if bad:
        return DataError(
            f"{request.path}: no prompt is left; {bad} rows cannot be read (--on-bad-data fail shows the first), the "
            f"other {rows - bad} prompts are longer than --rollout-max-prompt-len"
        )
    return DataError(f"{request.path}: all {rows} prompts are longer than --rollout-max-prompt-len; raise it")
