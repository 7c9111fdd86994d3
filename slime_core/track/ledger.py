"""Prompt accounting: where every prompt group of a run has ended, counted from the files of the run folder.

    samples/taken.jsonl          which groups were taken from the data source and put back, and which rollouts
                                 were closed, in the order of the events
    samples/train-000003.jsonl   what became of the samples of rollout 3

A group is *open* from the moment when the data source returns it until a closed rollout records its end:
``trained``, ``filtered`` by a sample transform, ``failed``, or ``evicted`` because it was too old. A group that is put
back is ``returned`` until it is taken again. The sampler must hold every open group: in flight, finished, or
aborted with a part of its response. :meth:`Recount.check` compares the two, so a group that was lost, or trained twice,
ends the run.

No counter is maintained: counts follow from the ids in the files. Each call reads only new lines, so the cost of a step
depends on its samples alone.

:class:`PromptLedger` is the ledger of a run in progress. It closes a rollout once its file of samples is written; then
every open group must be pending in the sampler. A checkpoint holds the position in the journal and the pending groups,
so that a resumed run discards later lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.errors import CheckpointError, RunError
from slime_core.track.record import room_for
from slime_core.untrusted import as_object, parse_long_json

JOURNAL = "taken.jsonl"
"""In the folder of samples."""

MARKED = 4096
"""Bytes before a position whose hash identifies a journal."""

ENDS = ("trained", "filtered", "failed", "evicted")
STALE, REQUEUED = "stale", "requeued"
"""Marks of samples that were too old: discarded, or put back, which does not end their group."""

FAILED_GROUP = "failed_sample"
"""Mark of samples that are discarded because another sample of their group failed."""

READ = ("index", "status", "dropped", "cause")
"""Fields of a sample's row from which its end follows."""

SHOWN = 5
"""Ids that a message names."""

Groups = Mapping[int, Sequence[int]]
"""Number of a group -> the numbers of its samples."""


class Journal:
    """``taken.jsonl``, to which a run appends. Each method returns after its line is in the file.

    The first line replaces the file of another run, unless :meth:`rewind` was called.

    Arguments:
        folder: of samples. None writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / JOURNAL
        self._is_started = False

    def took(self, groups: Groups) -> None:
        """Record groups that the data source returned."""
        self._append({"take": [[group, list(indices)] for group, indices in groups.items()]})

    def gave_back(self, groups: Iterable[int]) -> None:
        """Record groups that were put back, which the data source will return again."""
        self._append({"back": list(groups)})

    def closed(self, rollout: int, *, is_strict: bool = True) -> None:
        """Record that the file of ``rollout`` is complete. Unless strict, it may have samples that were never taken."""
        self._append({"close": rollout} if is_strict else {"close": rollout, "strict": False})

    def position(self) -> int:
        """Return the number of bytes so far, after they are on the disk."""
        if self._path is None or not self._is_started:
            return 0
        with self._path.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def mark(self, position: int) -> str:
        """Return the SHA-256 of the bytes before ``position``, so that a resume does not continue another journal."""
        if self._path is None or not position or not self._path.exists():
            return ""
        with self._path.open("rb") as file:
            file.seek(max(0, position - MARKED))
            return hashlib.sha256(file.read(min(position, MARKED))).hexdigest()

    def rewind(self, position: int | None, *, held: Groups, mark: str | None = None) -> None:
        """Discard the lines after ``position``.

        Arguments:
            position: result of :meth:`position`. None for a run without journal.
            held: groups that are open at ``position``. If the file is shorter, or is that of another run, the journal
                restarts with these groups.
            mark: result of :meth:`mark` for ``position``, or None.
        """
        if self._path is None:
            return
        self._is_started = False
        reaches = position and self._path.exists() and self._path.stat().st_size >= position
        if position and reaches and mark in (None, self.mark(position)):
            os.truncate(self._path, position)
            self._is_started = True
            return
        self._append({"base": [[group, list(indices)] for group, indices in held.items()]})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        with room_for(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a" if self._is_started else "w", encoding="utf-8") as file:
                self._is_started = True
                file.write(json.dumps(line) + "\n")


End = tuple[str, str]
"""End of a group or a sample, one of :data:`ENDS`, and the reason."""


@dataclass(slots=True)
class Recount:
    """Counts of the lines that were read from the files of ``folder``.

    Example with three groups: one trained, one dropped for ``zero_std``, one still in flight::

        recount = Recount(folder)
        recount.read()
        recount.open == {2: (4, 5)}
        recount.groups == {("trained", ""): 1, ("filtered", "zero_std"): 1}

    Attributes:
        taken: number of groups that were taken. A group that was put back and taken again counts once.
        groups, samples: (end, reason) -> number of groups, or of samples.
        open: groups that were taken and have not ended -> numbers of their samples.
        returned: groups that were put back and not taken again.
        rollouts: number of closed rollouts.
    """

    folder: Path
    taken: int = 0
    rollouts: int = 0
    groups: Counter[End] = field(default_factory=Counter)
    samples: Counter[End] = field(default_factory=Counter)
    open: dict[int, tuple[int, ...]] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    _read: int = 0

    def read(self, *, until: int | None = None) -> None:
        """Count the lines that were added since the last call.

        Arguments:
            until: bytes of the journal to read, by default all. An unfinished last line, as of a killed process, is
                not counted.

        Raises:
            RunError: the files contradict each other; names the groups.
            CheckpointError: a file is missing or malformed.
        """
        path = self.folder / JOURNAL
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read)
            added = file.read() if until is None else file.read(max(0, until - self._read))
        for line in added.splitlines(keepends=True):
            if line.endswith(b"\n"):
                self._read += len(line)
                try:
                    self._apply(_parsed(path, line))
                except (LookupError, TypeError, ValueError, AttributeError) as problem:
                    text = f"holds a line that no run writes ({problem!r}): {line[:80]!r}"
                    raise CheckpointError(f"{path}, or the file of samples that it closes, {text}") from problem

    def check(self, present: Groups) -> None:
        """Compare the open groups with those that the sampler holds.

        Arguments:
            present: groups that are in flight, finished and waiting, or held.

        Raises:
            RunError: a group is lost, or still in the sampler although it ended; names the groups.
        """
        gone = sorted(self.open.keys() - set(present))
        extra = sorted(set(present) - self.open.keys())
        if gone:
            raise _mismatch(f"{_named(gone)} taken and lost: neither in a file of {self.folder} nor in flight nor held")
        if extra:
            raise _mismatch(f"{_named(extra)} in flight or held, although they ended according to the files")

    def metrics(self, *, held: int, in_flight: int) -> dict[str, float]:
        """Return ``ledger/...``: the number of groups in each place. The sum is ``ledger/taken``."""
        places = Counter(dict.fromkeys(ENDS, 0))
        for (place, _), count in self.groups.items():
            places[place] += count
        now = {"held": held, "in_flight": in_flight, "returned": len(self.returned)}
        return {f"ledger/{name}": float(count) for name, count in {"taken": self.taken, **places, **now}.items()}

    # --- One line ----------------------------------------------------------------------------------------------------

    def _apply(self, line: Mapping[str, Any]) -> None:
        if "take" in line:
            self._take(line["take"])
        elif "back" in line:
            self._give_back(line["back"])
        elif "close" in line:
            self._close(int(line["close"]), is_strict=line.get("strict", True))
        else:
            self.open = {int(group): tuple(indices) for group, indices in line["base"]}
            self.taken = len(self.open)

    def _take(self, groups: Iterable[tuple[int, Sequence[int]]]) -> None:
        for group, indices in groups:
            if group in self.open:
                raise _mismatch(f"group {group} was taken again before it ended")
            self.open[group] = tuple(indices)
            self.taken += group not in self.returned
            self.returned.discard(group)

    def _give_back(self, groups: Iterable[int]) -> None:
        for group in groups:
            if group in self.open:
                del self.open[group]
            else:
                # It ended, and a data source for replay trains it again.
                self.taken += group not in self.returned
            self.returned.add(group)

    def _close(self, rollout: int, *, is_strict: bool) -> None:
        path = self.folder / f"train-{rollout:06d}.jsonl"
        rows: dict[int, list[dict[str, Any]]] = {}
        for group, row in _rows(path):
            if group is not None:
                rows.setdefault(group, []).append(row)
        ended = {group: end for group, group_rows in rows.items() if (end := _end(group_rows)) is not None}
        if is_strict:
            self._refuse(path, ended)
        for group, samples in ended.items():
            self.taken += self.open.pop(group, None) is None
            self.groups[_first(samples.values())] += 1
            self.samples.update(samples.values())
        self.rollouts += 1

    def _refuse(self, path: Path, ended: Mapping[int, Mapping[int, End]]) -> None:
        unknown = sorted(ended.keys() - self.open.keys(), key=str)
        if unknown:
            place, _ = _first(ended[unknown[0]].values())
            raise _mismatch(f"{path} has {_named(unknown)} ({place}), which were never taken, or ended before")
        for group, samples in ended.items():
            missing = sorted(set(self.open[group]) - samples.keys())
            if missing:
                raise _mismatch(f"{path} has group {group} without {_named(missing, 'samples')}")


def _end(rows: Sequence[Mapping[str, Any]]) -> dict[int, End] | None:
    """Return the end of each sample of a group by number, or None if the group has not ended in this file. A group may
    occur again within a rollout, and end there."""
    places = [(row["index"], _place(row)) for row in rows if row.get("dropped") != REQUEUED]
    ends: dict[int, End] = {}
    for index, place in places:
        if place is None:
            return None
        ends[index] = _first([ends.get(index, place), place])
    return ends or None


def _first(ends: Iterable[End]) -> End:
    """Return the end that counts for all: the first by :data:`ENDS`, if possible not because of FAILED_GROUP."""
    return min(ends, key=lambda end: (ENDS.index(end[0]), end[1] == FAILED_GROUP))


def _place(row: Mapping[str, Any]) -> End | None:
    """Return the end of a row, or None if its sample has not ended."""
    dropped, status = row.get("dropped"), row["status"]
    if dropped == FAILED_GROUP:
        return "failed", FAILED_GROUP
    if dropped is not None:
        return ("evicted", "") if dropped == STALE else ("filtered", str(dropped))
    if status == "failed":
        return "failed", str(row.get("cause") or "unknown")
    return None if status == "aborted" else ("trained", "")


def _rows(path: Path) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield the group of each row and its fields :data:`READ`, without texts, which would fill the memory."""
    try:
        with path.open("rb") as file:
            for row in (_parsed(path, line) for line in file):
                yield row["group"], {name: row[name] for name in READ if name in row}
    except OSError as problem:
        raise CheckpointError(
            f"{path} cannot be read ({problem.strerror}), so the samples of that rollout cannot be counted. "
            "Restore the file, or resume with --load into a new --output-dir."
        ) from problem


def _parsed(path: Path, line: bytes) -> dict[str, Any]:
    try:
        return as_object(parse_long_json(line))
    except ValueError as problem:
        raise CheckpointError(f"{path} holds a line that is not a JSON object ({problem}): {line[:80]!r}") from problem


def _mismatch(problem: str) -> RunError:
    return RunError(
        f"The ledger does not balance: {problem}. Every prompt group ends in one place, once; this is a fault of slime "
        "or of a plugin that takes, keeps or makes groups. Look the groups up in the files of samples; resume from the "
        "last checkpoint."
    )


def _named(ids: Sequence[int], what: str = "groups") -> str:
    shown = ", ".join(map(str, ids[:SHOWN]))
    return f"{what} {shown}" + (f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else "")


LEDGER = "ledger"
"""Key of a sampler's state in a checkpoint."""


@dataclass(frozen=True, slots=True)
class PendingGroups:
    """Groups in the sampler: number -> numbers of their samples.

    Arguments:
        in_flight: not finished.
        held: finished and waiting for a rollout, or aborted with a part of their responses.
    """

    in_flight: Groups = field(default_factory=dict)
    held: Groups = field(default_factory=dict)

    @property
    def groups(self) -> dict[int, Any]:
        """All groups."""
        return {**self.in_flight, **self.held}


class PromptLedger:
    """Accounts for every prompt group of a run.

    Arguments:
        folder: of samples. None keeps no ledger.
        is_strict: whether the sampler handles every group. False if a rollout source takes and keeps prompts itself, so
            that it may have the open groups.
    """

    def __init__(self, folder: Path | None, *, is_strict: bool = True) -> None:
        self.journal = Journal(folder)
        self._is_strict = is_strict
        self._recount = None if folder is None else Recount(folder)

    def close(self, rollout: int, present: PendingGroups) -> dict[str, float]:
        """Count the groups after the samples of ``rollout`` are written. Return ``ledger/...``.

        Raises:
            RunError: a group is lost, or ended twice; names it.
        """
        if self._recount is None:
            return {}
        started_s = time.monotonic()
        self.journal.closed(rollout, is_strict=self._is_strict)
        self._recount.read()
        if self._is_strict:
            self._recount.check(present.groups)
        held = len(present.held) if self._is_strict else len(self._recount.open)
        metrics = self._recount.metrics(held=held, in_flight=len(present.in_flight))
        return {**metrics, "perf/ledger_time": time.monotonic() - started_s}

    def state(self, present: PendingGroups) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON-ready values."""
        groups = {"in_flight": present.in_flight, "held": present.held}
        parts = {name: [[group, list(ids)] for group, ids in group_ids.items()] for name, group_ids in groups.items()}
        position = self.journal.position()
        return {"journal": position, "mark": self.journal.mark(position), **parts}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Discard the lines after ``state``. None is the state of a run without ledger."""
        state = state or {}
        held = {group: ids for name in ("in_flight", "held") for group, ids in state.get(name, [])}
        self.journal.rewind(state.get("journal"), held=held, mark=state.get("mark"))
        if self._recount is not None:
            self._recount = Recount(self._recount.folder)
