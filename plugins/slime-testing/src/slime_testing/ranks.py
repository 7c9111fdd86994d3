"""Runs a plugin's hooks of learner ranks in two real processes, and reports a hook that one of them never leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import Place
from slime_testing.harness import RESTORE, STATE, ActivePlugin, PlaceStates

__all__ = ["RUN", "RankReport", "run_ranks", "state_mismatch"]

RANKS = (0, 1)
START_LIMIT_S = 300.0
"""Time limit outside of hooks, in seconds: importing torch and the plugin, leaving the group."""

STACKS_S = 0.5
"""Seconds without new output after which a stuck process has written its stacks."""

STACKS_LIMIT_S = 30.0
"""Time limit for writing them, in seconds."""

RUN = "run"
"""Name of the run folder within the folder of both ranks."""

RankLines = dict[int, list[dict[str, str]]]
"""Rank -> the JSON lines that it has written."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Results of the hooks of learner ranks.

    Arguments:
        hung: the hook that did not finish, its rank, and stacks; None if all finished.
        failures: messages of hooks that raised; empty: none did.
        lost: messages about states that a checkpoint did not restore; empty: all were restored.
    """

    hung: str | None = None
    failures: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def run_ranks(plugin: ActivePlugin, options: Any, *, limit_s: float) -> RankReport:
    """Call every hook of place ``rank`` in two processes that share a gloo group.

    Arguments:
        options: the plugin's options object; None if it has none.
        limit_s: longest time without progress in either process, in seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plugin.json").write_text(plugin.to_json(options), encoding="utf-8")
        with _processes(folder) as processes:
            return _watched(folder, processes, limit_s)


def state_mismatch(place: Place, states: PlaceStates, again: PlaceStates) -> str:
    """Return the message about a state that differs after it was restored."""
    return (
        f"on the {place} a checkpoint kept the state {states}; hooks ran on, the checkpoint was restored, and the "
        f"state was {again}. {RESTORE} has to bring back all that {STATE} returned."
    )


@contextmanager
def _processes(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run both ranks, each with output files; kill them at the end."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as opened:
        processes = []
        for rank in RANKS:
            out, err = (opened.enter_context((folder / f"{name}{rank}").open("wb")) for name in ("out", "err"))
            command = [sys.executable, "-m", "slime_testing.rank_hooks", str(folder), str(rank)]
            process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=_run_folder(folder))
            opened.callback(_end, process)
            processes.append(process)
        yield processes


def _run_folder(folder: Path) -> Path:
    """Return the run folder of both ranks, which is also their working directory."""
    run = folder / RUN
    run.mkdir(exist_ok=True)
    return run


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _watched(folder: Path, processes: Sequence[subprocess.Popen[bytes]], limit_s: float) -> RankReport:
    last: RankLines = {}
    moved_s = time.monotonic()
    while any(process.poll() is None for process in processes):
        lines = {rank: _lines(folder, rank) for rank in RANKS}
        if lines != last:
            last, moved_s = lines, time.monotonic()
        if any(process.poll() for process in processes):  # the other rank would wait for the dead one
            break
        # If no rank is in a hook, one is importing or both are leaving. ``inside`` comes from the lines that set
        # ``moved_s``, because a hook that was entered later has only started.
        inside = _inside(lines)
        if time.monotonic() - moved_s > (limit_s if inside else START_LIMIT_S):
            return RankReport(_stuck(folder, processes, inside, limit_s), _values("failed", folder))
        time.sleep(0.05)
    died = [_death(folder, rank) for rank, process in zip(RANKS, processes, strict=True) if process.poll()]
    return RankReport(None, (*_values("failed", folder), *died), _values("lost", folder))


def _stuck(
    folder: Path, processes: Sequence[subprocess.Popen[bytes]], inside: Mapping[int, str], limit_s: float
) -> str:
    if not inside:
        errors = "\n".join(f"rank {rank}:\n{_read(folder, f'err{rank}')[-2000:]}" for rank in RANKS)
        return (
            f"two learner ranks got nowhere for {START_LIMIT_S:g} s, in no hook. Does importing the plugin wait for "
            f"something?\n{errors}"
        )
    _dump(folder, {rank: processes[rank] for rank in inside})
    where = " and ".join(f"rank {rank} is in {hook}" for rank, hook in inside.items())
    others = "".join(f", which rank {rank} has left" for rank in RANKS if rank not in inside)
    stacks = "\n".join(f"rank {rank}:\n{_read(folder, f'err{rank}')}" for rank in inside)
    return (
        f"the hooks of two learner ranks got stuck: after {limit_s:g} s {where}{others}. A collective must be called "
        f"by every rank, in the same order.\n{stacks}"
    )


def _dump(folder: Path, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Make processes write their stacks into their error files."""
    deadline_s = time.monotonic() + STACKS_LIMIT_S
    before = size = {rank: len(_read(folder, f"err{rank}")) for rank in processes}
    for process in processes.values():
        process.send_signal(signal.SIGUSR1)
    while time.monotonic() < deadline_s:
        time.sleep(STACKS_S)
        last, size = size, {rank: len(_read(folder, f"err{rank}")) for rank in processes}
        if size == last and all(size[rank] > before[rank] for rank in processes):
            return


def _inside(written: RankLines) -> dict[int, str]:
    """Return rank -> the hook that it has entered and not left."""
    last = {rank: [line for line in lines if "failed" not in line][-1:] for rank, lines in written.items()}
    return {rank: line["enter"] for rank, lines in last.items() for line in lines if "enter" in line}


def _values(key: str, folder: Path) -> tuple[str, ...]:
    return tuple(line[key] for rank in RANKS for line in _lines(folder, rank) if key in line)


def _death(folder: Path, rank: int) -> str:
    hook = _inside({rank: _lines(folder, rank)}).get(rank)
    return f"rank {rank} died{f' in {hook}' if hook else ''}:\n{_read(folder, f'err{rank}')[-2000:]}"


def _lines(folder: Path, rank: int) -> list[dict[str, str]]:
    """Return the JSON lines that the rank has written so far; other lines are output of the plugin."""
    lines = _read(folder, f"out{rank}").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith('{"') and line.endswith("\n")]


def _read(folder: Path, name: str) -> str:
    return (folder / name).read_text(encoding="utf-8", errors="replace")
