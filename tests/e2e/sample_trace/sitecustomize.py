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
from types import FrameType
from typing import Any

FOLDER = os.environ["SLIME_SAMPLE_TRACE"]
CARRIERS = {
    *("Sample", "Trajectory", "Turn", "Generation", "RolloutBatch", "Transformed", "TrainSamples"),
    *(
        "GroupedRewards",
        "SampledRollout",
        "SampledShards",
        "TrainBatch",
        "StepPlan",
        "PackedMicroBatch",
        "ResponseTokens",
    ),
    *("LossTerms", "CorrectionTerms"),
}
STEP = "optimizer.step"
"""Function of the lines that the first optimizer step writes."""

_written: set[str] = set()


@functools.cache
def _core_file(path: str) -> str:
    return path.rpartition("/slime_core/")[2] if "/slime_core/" in path else ""


def _carries(value: Any, depth: int = 2) -> bool:
    kind = type(value)
    if kind in (list, tuple, dict) and depth:
        items = [*value.values()] if kind is dict else value
        return any(_carries(item, depth - 1) for item in items[:2])
    return kind.__name__ in CARRIERS and kind.__module__.startswith("slime")


def _write(file: str, function: str) -> None:
    _written.add(file)
    with open(os.path.join(FOLDER, str(os.getpid())), "a") as lines:
        lines.write(f"{time.monotonic_ns()}\t{file}\t{function}\n")


def _profile(frame: FrameType, event: str, value: Any) -> None:
    code = frame.f_code
    file = _core_file(code.co_filename)
    if event == "call" and code.co_name == "step" and "/optimizer/" in code.co_filename and STEP not in _written:
        _written.add(STEP)
        while (caller := frame.f_back) is not None:
            frame = caller
            if caller_file := _core_file(frame.f_code.co_filename):
                _write(caller_file, STEP)
    elif event == "return" and code.co_name == "<module>" and file == "learner/actor.py":
        _trace_thread_of(frame.f_globals["LearnerActor"])
    elif event in ("call", "return") and file and file not in _written:
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [value] if event == "return" else [frame.f_locals.get(name) for name in names]
        if any(map(_carries, values)):
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
