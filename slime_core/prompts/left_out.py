"""Rows that are left out of a stream: which, why, and who is told."""

from __future__ import annotations

from collections.abc import Sequence

from slime_core.errors import DataError
from slime_core.plugins.contracts import PromptRequest
from slime_core.prompts.rows import PromptRow, Reading

__all__ = ["BAD", "EMPTY", "TOO_LONG", "kept", "nothing_left", "reading_of", "tell"]

TOO_LONG, BAD, EMPTY = "too_long", "bad", "empty"
"""Why rows are left out; nobody is told of empty lines."""


def reading_of(request: PromptRequest) -> Reading:
    """How its rows are read."""
    return Reading(
        input_key=request.input_key,
        label_key=request.label_key,
        metadata_key=request.metadata_key,
        tool_key=request.tool_key,
        multimodal_keys=request.multimodal_keys,
        formats=request.formats,
        checks=request.checks,
    )


def kept(request: PromptRequest, rows: Sequence[PromptRow], places: Sequence[str]) -> Sequence[bool]:
    """Which rows are short enough.

    Arguments:
        places: where they stand.

    Raises:
        DataError: one of them cannot be turned into tokens; says which.
    """
    if request.keeps is None or not rows:
        return [True] * len(rows)
    if request.keeps_many is None:
        return [request.keeps(row.prompt) for row in rows]
    try:
        return request.keeps_many([(row.prompt, row.tools) for row in rows])
    except DataError as problem:
        if len(rows) == 1:
            raise DataError(f"{places[0]}: {problem}") from None
        for row, place in zip(rows, places, strict=True):
            kept(request, [row], [place])
        raise


def tell(request: PromptRequest, reason: str, count: int, mistakes: Sequence[str] = ()) -> None:
    """Say that ``count`` rows were left out.

    Arguments:
        mistakes: what is wrong with them, each with file and line.
    """
    if reason != EMPTY and count:
        request.tell(reason, count)
        for mistake in mistakes:
            request.explain(mistake)


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
