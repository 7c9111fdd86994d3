"""The words of Search-R1 (2503.09516): how a turn asks for a search or answers, and how the retriever's text is shown.

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
"""What follows a turn without a search or an answer. Its tags have no end, so that no answer is read out of it."""

_FAILED = "The search failed."
"""What stands between the information tags where the retriever gave no answer."""

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_TAG = re.compile(rf"</?(?:{_TAGS})>")
_PLAIN = rf"(?:(?!</?(?:{_TAGS})>).)*"
_WELL_FORMED = re.compile(
    rf"(?:{_PLAIN}<search>{_PLAIN}</search>\s*<information>{_PLAIN}</information>)*+{_PLAIN}<answer>{_PLAIN}</answer>\s*",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Action:
    """What a turn does.

    Example: ``Action("search", "river of Zorin")``.
    """

    kind: Literal["search", "answer"]
    text: str


def read_turn(text: str) -> Action | None:
    """The first action of a turn; None: it has none."""
    found = _ACTION.search(text)
    if found is None:
        return None
    return Action("search" if found[1] == "search" else "answer", found[2].strip())


def information(contents: Sequence[str], *, max_chars: int) -> str:
    """Passages as the model reads them, each with its number and its title.

    Example: ``["Zorin\\nThe river of Zorin is Malka."]`` is shown as ``Doc 1(Title: Zorin) The river of Zorin is
    Malka.`` between the tags. Tags of the protocol in passages are left out: only the model acts.

    Arguments:
        contents: the title in the first line, then the text.
        max_chars: of all passages together; the rest is left out.
    """
    return _shown("\n".join(_passage(number, text[:max_chars]) for number, text in enumerate(contents, 1))[:max_chars])


def failed() -> str:
    """What the model reads where the retriever gave no answer."""
    return _shown(_FAILED)


def _passage(number: int, contents: str) -> str:
    title, _, text = contents.partition("\n")
    return _TAG.sub("", f"Doc {number}(Title: {title}) {text}").strip()


def _shown(text: str) -> str:
    return f"\n\n<information>{text.strip()}</information>\n\n"


def is_well_formed(response: str) -> bool:
    """Whether a response is made of searches, each with its information, and one answer at its end."""
    return _WELL_FORMED.fullmatch(response) is not None
