"""The built-in retriever: BM25 over a corpus in memory.

The library is bm25s (MIT): it depends on numpy only, stores the scores of all words as a sparse matrix, and answers a
query over hundreds of thousands of passages in about a millisecond. rank_bm25 has had no release since 2022 and scores
every passage in Python. Results and their order are those of Lucene's BM25 (k1 = 1.5, b = 0.75).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bm25s

from slime_core.errors import DataError

__all__ = ["CORPUS", "Index", "Passage", "read_corpus"]

CORPUS = Path(__file__).parent / "world" / "data" / "corpus.jsonl"
"""The passages that ship with the plugin: facts about the invented world."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One search result.

    Arguments:
        contents: the title in the first line, then the text.
        score: BM25 score, higher is better; None if unknown.
    """

    contents: str
    score: float | None = None


class Index:
    """A BM25 index over passages; words are compared in lower case, without English stop words.

    Arguments:
        contents: text of each passage; at least one.

    Raises:
        ValueError: there is no passage, or none has a word.
    """

    def __init__(self, contents: Sequence[str]) -> None:
        self._contents = list(contents)
        words = bm25s.tokenize(self._contents, stopwords="en", show_progress=False)
        if not words.vocab:
            raise ValueError("the corpus has no word that could be searched for")
        self._scores = bm25s.BM25()
        self._scores.index(words, show_progress=False)

    def __len__(self) -> int:
        return len(self._contents)

    def search(self, query: str, count: int) -> list[Passage]:
        """Return at most ``count`` passages that share a word with ``query``, best first; ties in corpus order."""
        words = bm25s.tokenize([query], stopwords="en", show_progress=False, return_ids=False)
        if not words[0]:
            return []
        scores_B = self._scores.get_scores(words[0])
        best = (-scores_B).argsort(kind="stable")[:count]
        return [Passage(self._contents[index], float(scores_B[index])) for index in best if scores_B[index] > 0]


def read_corpus(path: Path) -> list[str]:
    """Read the passages of a JSON Lines file with a field ``contents``, the format of the paper's corpora.

    Raises:
        DataError: the file cannot be read, or a line has no text ``contents``.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return [_contents(line, path, number) for number, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeError) as problem:
        raise DataError(f"corpus {path} cannot be read: {problem}. Give a JSON Lines file with --corpus") from problem


def _contents(line: str, path: Path, number: int) -> str:
    try:
        contents = json.loads(line)["contents"]
    except (ValueError, TypeError, KeyError, RecursionError):
        contents = None
    if not isinstance(contents, str):
        raise DataError(
            f'{path}, line {number}: no text "contents". Accepted: one object a line, '
            '{"id": "0", "contents": "TITLE\\nTEXT"}'
        )
    return contents
