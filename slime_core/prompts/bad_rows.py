"""Which rows were left out because they cannot be read: a few are said, the first 1,000 are written down."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MOST_SAID", "BadRows"]

MOST_SAID = 3
"""At once, of those that nobody was told of."""

MOST_WRITTEN = 1000
MOST_LETTERS = 500
"""Of the text of one; the beginning says where it stands."""


class BadRows:
    """What is wrong with rows, each once: a resumed run finds again what it found before.

    Arguments:
        path: receives a line for each of the first 1,000; what stands there is of an earlier start. None: nothing is
            written.
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
        """One more; ``mistake`` begins with file and line."""
        text = " ".join(mistake.split())[:MOST_LETTERS]
        self._num_new += 1
        if len(self._new) < MOST_SAID:
            self._new.append(text)
        if text not in self._known and len(self._known) < MOST_WRITTEN:
            self._known[text] = None
            self._write(text)

    def news(self) -> list[str]:
        """The first few since this was last asked, and where the others are to be found."""
        said, more = self._new, self._num_new - len(self._new)
        self._new, self._num_new = [], 0
        there = "" if self._path is None else f"; the first {MOST_WRITTEN:,} of all stand in {self._path}"
        return [*said, *([f"and {more} more{there}"] if more else [])]

    def _write(self, text: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{text}\n")
