"""Parses a path of prompts: a file, a folder, a pattern, and a slice of their rows.

    train.jsonl            JSON Lines, one object a line; a file whose suffix names no format is read so too
    train.SUFFIX           a file of the format that is named by this suffix
    data/                  every .jsonl and .ndjson file in the folder, and every file of another format, by name
    data/                  with a file in it that marks a format: a folder of that format, read as one
    data/*.jsonl           what the pattern matches, by name; ** reaches into folders, but does not follow links
    train.jsonl@[100:200]  rows 100 to 199 of any of these, counted from 0; either end may be left out

A *format* is named by the suffix of its files, without the dot, or by the name of the file that marks a folder of it,
which has a dot. JSON Lines is always there; plugins have others (kind ``prompt_format``).

Names that start with . or _ are passed over, of files and of folders on the way to them, as Spark and the datasets
library do: such are drafts, markers and caches. A file, or a pattern, that spells such a name has it. A pattern whose
last part says nothing of a suffix (``data/*``) takes files of the formats above and those without a suffix.

An empty line is a row for a slice, so that a slice means the same however a file is read.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import DataError

JSON_LINES = ("jsonl", "ndjson")
"""Formats that are always there."""

HIDDEN = (".", "_")
"""First characters of hidden files' names; a pattern matches them only where it spells them."""

ACCEPTED = "accepted: a prompt file"


@dataclass(frozen=True, slots=True)
class PromptPath:
    """Rows of one or more files, read as one.

    Example: ``PromptPath.read(Path("data/*.jsonl@[10:]"))`` is ``PromptPath(Path("data/*.jsonl"), 10, None)``.

    Arguments:
        pattern: a file, a folder or a pattern.
        start: the first row, from 0.
        stop: the row after the last; None: to the end.
    """

    pattern: Path
    start: int = 0
    stop: int | None = None

    @classmethod
    def read(cls, path: Path) -> PromptPath:
        """Parse ``path``.

        Raises:
            DataError: its slice is empty, or counts from the end.
        """
        text = str(path)
        if found := re.fullmatch(r"(.+)@\[(\d*):(\d*)\]", text, re.DOTALL):
            start, stop = int(found[2] or 0), int(found[3]) if found[3] else None
            if stop is None or start < stop:
                return cls(Path(found[1]), start, stop)
        elif path.exists() or not re.fullmatch(r".+@(\[[^/\[\]]*\])?", text):
            return cls(path)
        raise DataError(f"{text}: what follows @ is not a slice of rows; accepted: @[a:b] with 0 <= a < b, no steps")

    def files(self, formats: Collection[str] = ()) -> list[Path]:
        """The files, and the folders of a format, in the order in which they are read.

        Arguments:
            formats: that can be read, in addition to JSON Lines.

        Raises:
            DataError: there are none.
        """
        known = tuple(dict.fromkeys((*JSON_LINES, *formats)))
        if self.is_one:
            return _of_one(self.pattern, known)
        files = [file for path in _matches(self.pattern, known) for file in _of_one(path, known)]
        if not files:
            raise DataError(f"{self.pattern} matches no file; {ACCEPTED}, or a pattern that matches some")
        return files

    def formats(self) -> list[str]:
        """The formats that what it names could be of, as far as the names of files say; empty where it names nothing.

        Example: ``PromptPath(Path("data/*.parquet")).formats()`` is ``["parquet"]`` where the pattern matches a file.
        """
        found = [self.pattern] if self.is_one else _matches(self.pattern, None)
        inside = [file for path in found if path.is_dir() for file in path.iterdir()]
        marks = [file.name for file in inside if "." in file.name[1:]]
        suffixes = [path.suffix.removeprefix(".") for path in (*found, *inside) if not path.is_dir()]
        return sorted({name for name in (*suffixes, *marks) if name})

    @property
    def is_one(self) -> bool:
        """Whether it names one file or folder, and is not a pattern."""
        return self.pattern.exists() or not glob.has_magic(str(self.pattern))


def format_of(path: Path, formats: Collection[str]) -> str | None:
    """Which of ``formats`` a file or a folder is of; None: none, so a file is read as JSON Lines.

    Example: ``format_of(Path("a.jsonl"), ["jsonl"])`` is ``"jsonl"``.
    """
    if path.is_dir():
        return next((name for name in formats if "." in name and (path / name).is_file()), None)
    suffix = path.suffix.removeprefix(".")
    return suffix if suffix in formats else None


def prompt_formats(path: Path) -> list[str]:
    """The possible formats of the files that ``path`` names, each once; empty where it names none.

    Example: ``train.parquet@[:100]`` has the format ``parquet``.
    """
    try:
        return PromptPath.read(path).formats()
    except (DataError, OSError):
        return []


def unreadable(path: Path) -> Iterator[str]:
    """The reason why this user cannot read the prompts at ``path``, whatever their formats: nothing is there, or
    it may not be read."""
    try:
        where = PromptPath.read(path)
        files = [where.pattern] if where.is_one else _matches(where.pattern, None)
        if not files:
            raise DataError(f"{where.pattern} matches no file; {ACCEPTED}, or a pattern that matches some")
        for file in files:
            _refuse_no_file(file)
    except DataError as problem:
        yield str(problem)
        return
    for file in files:
        if not os.access(file, os.R_OK):
            yield f"{file} may not be read by this user"


def _matches(pattern: Path, formats: Collection[str] | None) -> list[Path]:
    """Files, and folders of a format, that ``pattern`` matches, by name; of any format where ``formats`` is None.
    ``**`` does not follow links, because a link to a folder above would make an endless loop."""
    parts = pattern.parts
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    base = Path(*parts[:first])
    requested = [part if part == "**" else part.replace("**", "*") for part in parts[first:]]
    requested += ["*"] * (requested[-1] == "**")
    found = []
    for path in sorted(base.glob("/".join(requested)), key=str):
        is_format = path.is_dir() and (formats is None or format_of(path, formats) is not None)
        if (path.is_file() or is_format) and _is_meant(path.relative_to(base).parts, requested, formats):
            found.append(path)
    return found


def _is_meant(names: tuple[str, ...], requested: Sequence[str], formats: Collection[str] | None) -> bool:
    """Whether a pattern of the parts ``requested``, which matches, means it."""
    hides = {name[0] for name in names if name.startswith(HIDDEN)}
    suffix = Path(names[-1]).suffix.removeprefix(".")
    return hides <= {part[0] for part in requested} and (
        "." in requested[-1] or not suffix or formats is None or suffix in formats
    )


def _of_one(path: Path, formats: Collection[str]) -> list[Path]:
    _refuse_no_file(path)
    if not path.is_dir() or format_of(path, formats) is not None:
        return [path]
    known = tuple(f".{name}" for name in formats if "." not in name)
    files = [each for each in sorted(path.iterdir()) if each.suffix in known and not each.name.startswith(HIDDEN)]
    if not files:
        raise DataError(f"{path} is a folder without {', '.join(known)} files; {ACCEPTED}, or a folder that holds some")
    return files


def _refuse_no_file(path: Path) -> None:
    if not path.exists():
        raise DataError(f"{path} does not exist; {ACCEPTED}")
    if not (path.is_file() or path.is_dir()):
        raise DataError(f"{path} is not a file but a pipe or a device, whose rows come once; {ACCEPTED}")
