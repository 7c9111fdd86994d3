"""Records which files of the core handle a sample; Python imports it at start where this folder is on ``PYTHONPATH``.

A file handles a sample if one of its functions is called with, or returns, a value that carries samples: a record of
``CARRIERS``, or a container of one. Files on the stack of an optimizer's ``step`` count too. Each process writes a line
for every file when it first sees it, because Ray ends processes without notice: time, file, function.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

FOLDER = os.environ["SLIME_SAMPLE_TRACE"]
CARRIERS = {
    *("Sample", "Trajectory", "Turn", "Generation", "RolloutBatch", "Transformed", "TrainSamples"),
    *("GroupedRewards", "SampledRollout", "SampledShards", "TrainBatch", "StepPlan", "MicroBatch", "ResponseTokens"),
    *("LossTerms", "CorrectionTerms"),
}
STEP = "optimizer.step"
"""Function of the lines that the first optimizer step writes."""

_files: dict[CodeType, str | None] = {}
_written: set[str] = set()
_has_stepped = False


def _core_file(code: CodeType) -> str | None:
    if code not in _files:
        _, found, rest = code.co_filename.rpartition("/slime_core/")
        _files[code] = rest if found else None
    return _files[code]


def _carries(value: Any, depth: int = 2) -> bool:
    kind = type(value)
    if kind.__name__ in CARRIERS and kind.__module__.startswith("slime"):
        return True
    if depth and kind in (list, tuple):
        return any(_carries(one, depth - 1) for one in value[:2])
    if depth and kind is dict:
        return any(_carries(one, depth - 1) for one in list(value.values())[:2])
    return False


def _write(file: str, function: str) -> None:
    if file not in _written or function == STEP:
        _written.add(file)
        with open(os.path.join(FOLDER, str(os.getpid())), "a") as lines:
            lines.write(f"{time.monotonic_ns()}\t{file}\t{function}\n")


def _profile(frame: FrameType, event: str, value: Any) -> None:
    global _has_stepped
    code = frame.f_code
    if event == "call" and code.co_name == "step" and "/optimizer/" in code.co_filename and not _has_stepped:
        _has_stepped = True
        caller = frame.f_back
        while caller is not None:
            if file := _core_file(caller.f_code):
                _write(file, STEP)
            caller = caller.f_back
        return
    if event == "return" and code.co_name == "<module>" and _core_file(code) == "learner/actor.py":
        _trace_thread_of(frame.f_globals["LearnerActor"])
    if event not in ("call", "return") or not (file := _core_file(code)) or file in _written:
        return
    if event == "return":
        carries = _carries(value)
    else:
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        carries = any(_carries(frame.f_locals.get(name)) for name in names)
    if carries:
        _write(file, code.co_qualname)


def _trace_thread_of(actor: Any) -> None:
    """Ray calls the methods of this actor in a thread that Python did not start, which ``threading`` cannot profile."""
    train = actor.train

    @functools.wraps(train)
    def traced(*arguments: Any, **named: Any) -> Any:
        sys.setprofile(_profile)
        return train(*arguments, **named)

    actor.train = traced


threading.setprofile(_profile)
sys.setprofile(_profile)
