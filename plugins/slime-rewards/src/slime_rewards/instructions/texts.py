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
"""An abbreviation or initial at the end of a text; the sentence usually continues after it."""

LONGEST_SHORT = 8
"""Length of the longest match of ``_SHORT``, in characters, including its dot and the character before it."""

_DASHES = str.maketrans(dict.fromkeys("–—", " "))
_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”‘’…、。！？")

RELATIONS = ("less than", "at least")


def words(text: str) -> list[str]:
    """Return runs of letters, digits and underscores, in order; ``it's`` is two words."""
    return _WORD.findall(text)


def bare_words(text: str) -> list[str]:
    """Split ``text`` at white space and dashes, remove punctuation, and drop words that become empty."""
    return text.translate(_DASHES).translate(_PUNCTUATION).split()


def paragraphs(text: str) -> list[str]:
    """Return the parts of the text between empty lines, stripped and without empty parts."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(text: str) -> list[str]:
    """Return the sentences, stripped, in order.

    A sentence ends with ``.``, ``!`` or ``?`` before white space, or with its paragraph, but not after an abbreviation
    (``Dr.``, ``e.g.``) or an initial.
    """
    return [sentence for part in paragraphs(text) for sentence in _sentences(part)]


def _sentences(paragraph: str) -> list[str]:
    sentences_of_paragraph, start, length = [], 0, len(paragraph.rstrip())
    for end in _END.finditer(paragraph):
        candidate = paragraph[start : end.end()].strip()
        if end.end() < length and _SHORT.search(candidate, max(0, len(candidate) - LONGEST_SHORT)):
            continue
        sentences_of_paragraph.append(candidate)
        start = end.end()
    last = paragraph[start:].strip()
    return [sentence for sentence in [*sentences_of_paragraph, last] if sentence]


def one_of(listed: str) -> re.Pattern[str]:
    """Return a pattern that matches any word of ``listed``, in which spaces separate the words."""
    return re.compile(listed.replace(" ", "|"))


def compare(count: int, relation: str, limit: int) -> bool:
    """Return whether ``count`` is ``less than`` or ``at least`` ``limit``.

    Raises:
        DataError: the relation is neither.
    """
    if relation not in RELATIONS:
        raise DataError(f"relation = {relation!r}; accepted: {' and '.join(map(repr, RELATIONS))}.\nCorrect the row.")
    return count < limit if relation == RELATIONS[0] else count >= limit


def fenced(text: str) -> str:
    """Return the content of a code fence that encloses the whole text, else the text; stripped."""
    match = re.fullmatch(r"```[A-Za-z]*\s*\n?(.*?)\n?\s*```", text.strip(), re.DOTALL)
    return (match[1] if match else text).strip()


def detected(text: str) -> str:
    """Return the language of ``text`` as an ISO 639-1 code, detected by ``py3langid``."""
    # In lower case, because the library takes text in capitals for another language.
    return str(_languages().classify(text.lower())[0])


def require_language(code: str) -> str:
    """Return ``code`` without its region, such as ``zh`` for ``zh-cn``.

    Raises:
        DataError: the language is unknown.
    """
    language, labels = code.lower().partition("-")[0], sorted(_languages().labels)
    if language not in labels:
        raise DataError(f"language = {code!r}; known are {', '.join(labels)}.\nCorrect the row.")
    return language


@cache
def _languages() -> Any:
    """Load the library's model, once: it needs 130 MB.

    Languages without a two-letter code are removed, because short texts are sometimes taken for one of them.
    """
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages([label for label in identifier.labels if len(label) == 2])
    return identifier
