"""What may stand where a prompt file is named: a file, a folder, a pattern, and a slice of their rows.

    train.jsonl            JSON Lines, one object a line; a file of any other ending is read so too
    train.parquet          Parquet
    data/                  every .jsonl, .ndjson and .parquet file in the folder, by name
    saved/                 a folder that the datasets library saved (save_to_disk): one split of it
    data/*.jsonl           what the pattern matches, by name; ** reaches into folders, but for those behind links
    train.jsonl@[100:200]  rows 100 to 199 of any of these, counted from 0; either end may be left out

Names that begin with . or _ are passed over, of files and of folders on the way to them, as Spark and the datasets
library do: such are drafts, markers and caches. A file, or a pattern, that spells such a name has it. A pattern whose
last part says nothing of an ending (``data/*``) takes files of the endings above and those without one.

An empty line is a row for a slice, so that a slice means the same however a file is read.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import DataError

__all__ = ["PromptPath", "is_saved_dataset", "unreadable"]

ENDINGS = (".jsonl", ".ndjson", ".parquet")
"""Of the files that a folder is looked through for."""

HIDDEN = (".", "_")
"""How names of files begin that nobody means unless he spells them."""

SAVED = "state.json"
SAVED_SPLITS = "dataset_dict.json"
"""What the datasets library writes into a folder of one split, and into a folder of several."""

ACCEPTED = "accepted: a prompt file"


@dataclass(frozen=True, slots=True)
class PromptPath:
    """Rows of one or more files, read as one.

    Example: ``PromptPath.read(Path("data/*.jsonl@[10:]"))`` is ``PromptPath(Path("data/*.jsonl"), 10, None)``.

    Arguments:
        pattern: a file, a folder or a pattern.
        start: the first row, from 0.
        stop: the row behind the last; None: to the end.
    """

    pattern: Path
    start: int = 0
    stop: int | None = None

    @classmethod
    def read(cls, path: Path) -> PromptPath:
        """What ``path`` says.

        Raises:
            DataError: its slice is empty, or counts from the end.
        """
        text = str(path)
        found = re.fullmatch(r"(.+)@\[(-?\d*):(-?\d*)\]", text, re.DOTALL)
        if found is None:
            if re.fullmatch(r".+@(\[[^/\[\]]*\])?", text) and not path.exists():
                raise DataError(f"{text}: what stands behind @ is no slice; accepted: @[a:b] with 0 <= a < b, no steps")
            return cls(path)
        pattern, start, stop = found.groups()
        ends = int(start or 0), int(stop) if stop else None
        if min(ends[0], ends[1] or 0) < 0 or "-" in (start, stop):
            raise DataError(f"{text}: a slice counts rows from the start; accepted: @[a:b] with 0 <= a < b")
        if ends[1] is not None and ends[1] <= ends[0]:
            raise DataError(f"{text}: the slice holds no rows; accepted: @[a:b] with 0 <= a < b")
        return cls(Path(pattern), *ends)

    def files(self) -> list[Path]:
        """The files, and folders of the datasets library, in the order in which they are read.

        Raises:
            DataError: there are none.
        """
        if self.pattern.exists() or not glob.has_magic(str(self.pattern)):
            return _of_one(self.pattern)
        files = [file for path in _matches(self.pattern) for file in _of_one(path)]
        if not files:
            raise DataError(f"{self.pattern} matches no file; {ACCEPTED}, or a pattern that matches some")
        return files


def is_saved_dataset(path: Path) -> bool:
    """Whether the datasets library saved one split there."""
    return (path / SAVED).is_file()


def unreadable(path: Path) -> Iterator[str]:
    """What keeps this user from reading the prompts that ``path`` names."""
    try:
        files = PromptPath.read(path).files()
    except DataError as problem:
        yield str(problem)
        return
    for file in files:
        if not os.access(file, os.R_OK):
            yield f"{file} may not be read by this user"


def _matches(pattern: Path) -> list[Path]:
    """Files and saved data sets that ``pattern`` matches, by name. Folders behind links are not gone into by ``**``, so
    that a link to a folder above ends nothing."""
    parts = pattern.parts
    first = next(place for place, part in enumerate(parts) if glob.has_magic(part))
    base, asked = Path(*parts[:first]), [part if part == "**" else part.replace("**", "*") for part in parts[first:]]
    asked += ["*"] * (asked[-1] == "**")
    found = (path for path in base.glob("/".join(asked)) if _is_meant(path.relative_to(base).parts, asked))
    return [path for path in sorted(found, key=str) if path.is_file() or is_saved_dataset(path)]


def _is_meant(names: tuple[str, ...], asked: Sequence[str]) -> bool:
    """Whether a pattern of the parts ``asked``, which matches, means it."""
    hides = {name[0] for name in names if name.startswith(HIDDEN)}
    ending = Path(names[-1]).suffix
    return hides <= {part[0] for part in asked} and ("." in asked[-1] or ending in ("", *ENDINGS))


def _of_one(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path} does not exist; {ACCEPTED}")
        if not path.is_file():
            raise DataError(f"{path} is no file but a pipe or a device, whose rows come once; {ACCEPTED}")
        return [path]
    if is_saved_dataset(path):
        return [path]
    if (path / SAVED_SPLITS).is_file():
        splits = sorted(each.name for each in path.iterdir() if is_saved_dataset(each))
        raise DataError(
            f"{path} holds a data set of several splits, {', '.join(splits) or 'none of which is there'}; name one, "
            f"such as {path / (splits or ['train'])[0]}"
        )
    files = [each for each in sorted(path.iterdir()) if each.suffix in ENDINGS and not each.name.startswith(HIDDEN)]
    if not files:
        raise DataError(
            f"{path} is a folder without {', '.join(ENDINGS)} files; {ACCEPTED}, or a folder that holds some"
        )
    return files
