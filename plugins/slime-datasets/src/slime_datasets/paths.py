"""Paths of prompts: a file, a folder, a pattern, and a slice of their rows.

    train.jsonl            JSON Lines, one object a line; so is a file with any other suffix
    train.parquet          a Parquet file
    data/                  every prompt file in the folder, by name
    data/                  with a state.json in it: a data set that the datasets library saved
    data/*.jsonl           the files that the pattern matches, by name; ** enters folders, but does not follow links
    train.jsonl@[100:200]  rows 100 to 199 of any of these, counted from 0; either end may be left out

Files and folders whose names start with . or _ are skipped, as Spark and the datasets library do: such are drafts,
markers and caches. A path or pattern that spells such a name reads it. A pattern whose last part has no suffix
(``data/*``) matches prompt files and files without a suffix.

An empty line counts as a row of a slice, so that a slice means the same however a file is read.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import DataError

__all__ = ["PromptPath", "format_of"]

SUFFIXES = ("jsonl", "ndjson", "parquet")
MARKERS = ("state.json", "dataset_dict.json")
"""Files in a folder that make it one data set."""

HIDDEN = (".", "_")

ACCEPTED = "name a prompt file, a folder that holds some, or a pattern that matches some"


@dataclass(frozen=True, slots=True)
class PromptPath:
    """Rows of one or more files, read as one.

    Example: ``PromptPath.read(Path("data/*.jsonl@[10:]"))`` is ``PromptPath(Path("data/*.jsonl"), 10, None)``.

    Arguments:
        pattern: a file, a folder or a pattern.
        start: the first row, from 0.
        stop: the row after the last; None means to the end.
    """

    pattern: Path
    start: int = 0
    stop: int | None = None

    @classmethod
    def read(cls, path: Path) -> PromptPath:
        """Parse ``path``.

        Raises:
            DataError: its slice is empty or malformed.
        """
        text = str(path)
        if match := re.fullmatch(r"(.+)@\[(\d*):(\d*)\]", text, re.DOTALL):
            start, stop = int(match[2] or 0), int(match[3]) if match[3] else None
            if stop is None or start < stop:
                return cls(Path(match[1]), start, stop)
        elif path.exists() or not re.fullmatch(r".+@(\[[^/\[\]]*\])?", text):
            return cls(path)
        raise DataError(f"{text}: the text after @ is not a slice of rows; write @[a:b] with 0 <= a < b")

    def files(self) -> list[Path]:
        """Return the files and the folders of saved data sets, in the order in which they are read.

        Raises:
            DataError: there are none.
        """
        if self.pattern.exists() or not glob.has_magic(str(self.pattern)):
            return _files_at(self.pattern)
        files = [file for path in _matches(self.pattern) for file in _files_at(path)]
        if not files:
            raise DataError(f"{self.pattern} matches no prompt file; {ACCEPTED}")
        return files


def format_of(path: Path) -> str | None:
    """Return the format of a file or folder: its suffix or marker; None means JSON Lines, or a folder of prompt files.

    Example: ``format_of(Path("a.parquet"))`` is ``"parquet"``.
    """
    if path.is_dir():
        return next((marker for marker in MARKERS if (path / marker).is_file()), None)
    suffix = path.suffix.removeprefix(".")
    return suffix if suffix in SUFFIXES else None


def _matches(pattern: Path) -> list[Path]:
    """Return the files and saved data sets that ``pattern`` matches, by name.

    ``**`` does not follow links, because a link to a parent folder would make an endless loop.
    """
    parts = pattern.parts
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    base = Path(*parts[:first])
    spelled = [part if part == "**" else part.replace("**", "*") for part in parts[first:]]
    spelled += ["*"] * (spelled[-1] == "**")
    return [
        path
        for path in sorted(base.glob("/".join(spelled)), key=str)
        if (path.is_file() or (path.is_dir() and format_of(path) is not None))
        and _is_meant(path.relative_to(base).parts, spelled)
    ]


def _is_meant(names: tuple[str, ...], spelled: Sequence[str]) -> bool:
    """Return whether a pattern of the parts ``spelled`` is meant to match the path with the parts ``names``."""
    hidden = {name[0] for name in names if name.startswith(HIDDEN)}
    suffix = Path(names[-1]).suffix.removeprefix(".")
    return hidden <= {part[0] for part in spelled} and ("." in spelled[-1] or not suffix or suffix in SUFFIXES)


def _files_at(path: Path) -> list[Path]:
    if not (path.is_file() or path.is_dir()):  # a pipe or a device gives its rows only once
        raise DataError(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}; {ACCEPTED}")
    if not path.is_dir() or format_of(path) is not None:
        return [path]
    files = [
        file
        for file in sorted(path.iterdir())
        if file.suffix.removeprefix(".") in SUFFIXES and not file.name.startswith(HIDDEN)
    ]
    if not files:
        raise DataError(f"{path} holds no .{', .'.join(SUFFIXES)} file; {ACCEPTED}")
    return files
