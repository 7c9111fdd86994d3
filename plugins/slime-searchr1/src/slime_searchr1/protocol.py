"""The text protocol of Search-R1 (2503.09516): parses searches and answers in turns, and formats search results.

A response is a series of turns. A turn ends with ``</search>`` or ``</answer>``. After a search, the passages follow
between ``<information>`` and ``</information>``; the model did not write them and is not trained on them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_TAGS = "search|information|answer"
STOPS = ("</search>", "</answer>")
"""Texts that end a turn."""

NO_ACTION = "\nThat was no action. Begin a query with <search> or the final answer with <answer>, and close the tag.\n"
"""Appended after a turn without an action. Its tags are not closed, so that no answer is parsed from it."""

_FAILED = "The search failed."
"""Text between the information tags if the retriever gave no answer."""

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(rf"</?(?:{_TAGS})>")
_PLAIN = rf"(?:(?!</?(?:{_TAGS})>).)*"
_WELL_FORMED = re.compile(
    rf"(?:{_PLAIN}<search>{_PLAIN}</search>\s*<information>{_PLAIN}</information>)*+{_PLAIN}<answer>{_PLAIN}</answer>\s*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Action:
    """The action of a turn: a search or the final answer.

    Example: ``Action("search", "river of Zorin")``.
    """

    kind: Literal["search", "answer"]
    text: str


def read_turn(text: str) -> Action | None:
    """Return the first action of a turn, or None if it has none."""
    match = _ACTION.search(text)
    if match is None:
        return None
    return Action("search" if match[1] == "search" else "answer", match[2].strip())


def information(contents: Sequence[str], *, max_chars: int) -> str:
    """Format passages for the model, each with its number and its title.

    Example: ``["Zorin\\nThe river of Zorin is Malka."]`` becomes ``Doc 1(Title: Zorin) The river of Zorin is Malka.``
    between the tags. The protocol's tags are removed from passages, because only the model may act.

    Arguments:
        contents: texts of the passages: the title in the first line, then the text.
        max_chars: limit on all passages together, in characters; the rest is left out.
    """
    return _shown("\n".join(_passage(number, text[:max_chars]) for number, text in enumerate(contents, 1))[:max_chars])


def failed() -> str:
    """Return the text that the model reads if the retriever gave no answer."""
    return _shown(_FAILED)


def _passage(number: int, contents: str) -> str:
    title, _, text = contents.partition("\n")
    return _TAG.sub("", f"Doc {number}(Title: {title}) {text}").strip()


def _shown(text: str) -> str:
    return f"\n\n<information>{text.strip()}</information>\n\n"


def is_well_formed(response: str) -> bool:
    """Return whether a response consists of searches, each with its information, and one answer at its end."""
    return _WELL_FORMED.fullmatch(response) is not None
