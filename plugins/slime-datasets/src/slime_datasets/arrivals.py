"""Reads trajectories that another program wrote, for training: JSON Lines of samples, checked, never unpickled.

    {"group_index": 3, "prompt": "2+2=", "tokens": [7, 15, 7, 4, 9, 1], "response_length": 2, "response": "4",
     "reward": 1.0, "status": "completed", "rollout_log_probs": [-0.1, -0.02]}

A line is :meth:`~slime_core.types.Sample.to_dict` of one sample; ``tokens``, ``response_length``, ``status`` and
``rollout_log_probs`` are required, other fields may be left out. Adjacent lines with one ``group_index`` are a group; a
line without ``group_index`` is a separate group. Each file is read once: the named file, or each ``.jsonl`` file of a
folder, by name, as it appears. Move complete files into the folder; names that start with a dot or an underscore are
ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from slime_core import RunView
from slime_core.errors import DataError
from slime_core.provisional import PromptRequest
from slime_core.types import BAD, PromptGroup
from slime_datasets.lines import LineTable
from slime_datasets.numbered import report_left_out
from slime_datasets.rows import content_of
from slime_datasets.tables import Row, Rows
from slime_datasets.trajectories import Fit, read_trajectories

__all__ = ["Arrivals", "screen_arrivals"]

MOST_BYTES = 32 * 2**20
"""Limit on the bytes checked before the run starts; the rest is checked when it is read."""


class Arrivals:
    """The groups of a file, or of the files that appear in a folder.

    Arguments:
        path: the file or folder; None if there are no trajectories.
    """

    def __init__(self, path: Path | None, request: PromptRequest, run: RunView) -> None:
        self._path = path
        self._request = request
        self._read: dict[str, None] = {}  # names in the order of reading
        self._fit = Fit.of(request, run)
        self._groups = 0

    def take(self) -> list[PromptGroup]:
        """Return the groups of all files that were not read before.

        Raises:
            DataError: a line is not a finished sample; with ``skips_bad`` its group is left out and counted.
        """
        new = [file for file in ([] if self._path is None else _files(self._path)) if file.name not in self._read]
        groups = [group for file in new for group in self._of_file(file)]
        self._read |= dict.fromkeys(file.name for file in new)
        return groups

    def state(self) -> dict[str, Any]:
        """Return the names of the files read so far and the number of their groups."""
        return {"files": list(self._read), "groups": self._groups}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self._read, self._groups = dict.fromkeys(state["files"]), state["groups"]

    def _of_file(self, file: Path) -> list[PromptGroup]:
        groups = []
        for lines in _groups(Rows([LineTable(file)]).read()):
            try:
                groups.append(self._numbered(read_trajectories(lines, self._fit)))
            except DataError as mistake:
                if not self._request.skips_bad:
                    raise
                report_left_out(self._request, BAD, 1, [str(mistake)])
        return groups

    def _numbered(self, group: PromptGroup) -> PromptGroup:
        """Return the group under new indices, below 0, because the indices of prompts start at 0."""
        self._groups += 1
        first = -self._groups * len(group)
        return [replace(sample, group_index=-self._groups, index=first + place) for place, sample in enumerate(group)]


def screen_arrivals(path: Path, fit: Fit, *, most_bytes: int = MOST_BYTES) -> None:
    """Check the groups that exist already, up to ``most_bytes``.

    Raises:
        DataError: a line is not a finished sample, or a group has another size; names file and line.
    """
    for file in _files(path):
        for lines in _groups(Rows([LineTable(file)]).read()):
            if most_bytes <= 0:
                return
            most_bytes -= sum(len(raw.content) for raw in lines)
            read_trajectories(lines, fit)


def _files(path: Path) -> list[Path]:
    """Return the named file, or the files of a folder whose names mark them as complete."""
    if path.is_file():
        return [path]
    return [file for file in sorted(path.glob("*.jsonl")) if file.is_file() and not file.name.startswith((".", "_"))]


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield adjacent lines with one ``group_index``."""
    for _, lines in groupby((raw for raw in rows if not raw.is_blank), key=_group_of):
        yield list(lines)


def _group_of(raw: Row) -> tuple[str, Any]:
    """Return the key of the line's group; a line that is invalid or has no ``group_index`` is a separate group."""
    try:
        number = content_of(raw).get("group_index")
    except DataError:
        number = None
    return ("line", raw.number) if number is None else ("group", number)
