"""Runs process groups: ranks are forked from a process that has imported the engines, and write files.

Jobs run concurrently as far as there are cores for their ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Job", "run_jobs"]

LIMIT_S = 300.0
"""Of one job; some seconds on idle cores."""


@dataclass
class Job:
    """Some processes that need each other.

    Arguments:
        run: called in every process with its rank.
        folder: where the job writes; made if it is not there.

    Attributes:
        failure: the last line of what the first rank that failed had to say; empty: all ranks ended well.
    """

    ranks: int
    run: Callable[[int], None]
    folder: Path
    failure: str = ""
    processes: list[Any] = field(default_factory=list)
    began: float = 0.0


def run_jobs(jobs: Sequence[Job], *, cores: int | None = None) -> None:
    """All of them to their ends, successful or not."""
    cores = cores or os.cpu_count() or 1
    waiting, running = list(jobs), list[Job]()
    while waiting or running:
        busy = sum(job.ranks for job in running)
        if waiting and (not running or busy + waiting[0].ranks <= cores):
            running.append(_started(waiting.pop(0)))
            continue
        running = [job for job in running if not _ended(job)]
        time.sleep(0.01)


def _started(job: Job) -> Job:
    job.folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    job.processes = [context.Process(target=_guarded, args=(job, rank)) for rank in range(job.ranks)]
    job.began = time.monotonic()
    for process in job.processes:
        process.start()
    return job


def _guarded(job: Job, rank: int) -> None:
    """What a rank has to say stays in its own file: where a rank is broken on purpose, it belongs to the table."""
    with (job.folder / f"errors-{rank}.txt").open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
        try:
            job.run(rank)
        except BaseException:
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(1)
        os._exit(0)  # what the parent registered for its own end is not to run here


def _ended(job: Job) -> bool:
    codes = [process.exitcode for process in job.processes]
    late = time.monotonic() - job.began > LIMIT_S
    if None in codes and not any(codes) and not late:
        return False
    for process in job.processes:
        process.kill()
        process.join()
    if any(codes) or late:
        job.failure = _last_words(job, codes)
    return True


def _last_words(job: Job, codes: list[int | None]) -> str:
    rank = next((rank for rank, code in enumerate(codes) if code), None)
    if rank is None:
        return f"still running after {LIMIT_S:g} s"
    lines = (job.folder / f"errors-{rank}.txt").read_text().strip().splitlines()
    return lines[-1] if lines else f"rank {rank} ended with code {codes[rank]}"
