"""Splits a response into sentences, words and paragraphs, and detects its language."""

from __future__ import annotations

import re
import string
from functools import cache
from typing import Any

from slime_core.errors import DataError

__all__ = [
    "bare_words",
    "compare",
    "detected",
    "fenced",
    "one_of",
    "paragraphs",
    "require_language",
    "sentences",
    "words",
]

_WORD = re.compile(r"\w+")
_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)|[。！？]+[」』”’）]*")
_SHORT = re.compile(
    r"(?:^|[\s(\"'“])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|e\.g|i\.e|etc|No|Fig|approx)\.$", re.IGNORECASE
)
"""An abbreviation or initial at the end of a text; what follows it usually belongs to the same sentence."""

LONGEST_SHORT = 8
"""Characters of the longest of those, with its dot and what stands before it."""

_DASHES = str.maketrans(dict.fromkeys("–—", " "))
_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”‘’…、。！？")

RELATIONS = ("less than", "at least")


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, in order; ``it's`` are two."""
    return _WORD.findall(text)


def bare_words(text: str) -> list[str]:
    """What white space and dashes separate, without punctuation; what is nothing else leaves no word."""
    return text.translate(_DASHES).translate(_PUNCTUATION).split()


def paragraphs(text: str) -> list[str]:
    """Parts of the text between empty lines, stripped; none is empty."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(text: str) -> list[str]:
    """Sentences, stripped, in order.

    One ends with ``.``, ``!`` or ``?`` before white space, or with its paragraph; an abbreviation (``Dr.``, ``e.g.``)
    or an initial ends none.
    """
    return [sentence for part in paragraphs(text) for sentence in _sentences(part)]


def _sentences(paragraph: str) -> list[str]:
    found, start, length = [], 0, len(paragraph.rstrip())
    for end in _END.finditer(paragraph):
        candidate = paragraph[start : end.end()].strip()
        if end.end() < length and _SHORT.search(candidate, max(0, len(candidate) - LONGEST_SHORT)):
            continue
        found.append(candidate)
        start = end.end()
    rest = paragraph[start:].strip()
    return [one for one in [*found, rest] if one]


def one_of(listed: str) -> re.Pattern[str]:
    """What matches each of the words that ``listed`` holds, with a space between them."""
    return re.compile(listed.replace(" ", "|"))


def compare(count: int, relation: str, wanted: int) -> bool:
    """Whether ``count`` is ``less than`` or ``at least`` as large as ``wanted``.

    Raises:
        DataError: the relation is another one.
    """
    if relation not in RELATIONS:
        raise DataError(
            f"relation = {relation!r}; accepted are {' and '.join(map(repr, RELATIONS))}.\nCorrect the row."
        )
    return count < wanted if relation == RELATIONS[0] else count >= wanted


def fenced(text: str) -> str:
    """What stands between the lines of a code fence that is all of the text; else the text, stripped."""
    found = re.fullmatch(r"```[A-Za-z]*\s*\n?(.*?)\n?\s*```", text.strip(), re.DOTALL)
    return (found[1] if found else text).strip()


def detected(text: str) -> str:
    """The language of ``text`` as an ISO 639-1 code, by ``py3langid``."""
    # In lower case: capitals alone look like another language to it.
    return str(_languages().classify(text.lower())[0])


def require_language(code: str) -> str:
    """``code`` without its region, ``zh`` of ``zh-cn``.

    Raises:
        DataError: no such language is known.
    """
    language, known = code.lower().partition("-")[0], sorted(_languages().labels)
    if language not in known:
        raise DataError(f"language = {code!r}; known are {', '.join(known)}.\nCorrect the row.")
    return language


@cache
def _languages() -> Any:
    """The library's model, loaded once: it holds 130 MB.

    Without the languages that have no code of two letters: short texts read as one of them now and then.
    """
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    found = LanguageIdentifier.from_model_file(MODEL_FILE)
    found.set_languages([one for one in found.labels if len(one) == 2])
    return found
