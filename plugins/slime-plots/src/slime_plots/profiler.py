"""Plugin ``profiler``: torch's profiler around optimizer steps of chosen rollouts and ranks, and GPU memory snapshots.

slime run --plugin grpo --plugin profiler --profiler.rollouts 3 --profiler.ranks 0 1

RUN/profiles/rollout-000003-step-0-rank-1.json.gz       https://ui.perfetto.dev opens it
RUN/profiles/rollout-000003-step-0-rank-1.pickle        with --profiler.memory, on a GPU: docs.pytorch.org/memory_viz
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl, observer

if TYPE_CHECKING:
    from torch.profiler import profile

    from slime_core import TrainStep
    from slime_plots.options import ProfilerOptions

__all__: list[str] = []

FOLDER = "profiles"
MEMORY_EVENTS = 1_000_000
"""Limit on recorded allocations; torch drops older ones."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_plots.options:ProfilerOptions")


_running: list[profile] = []
"""The profiler of the current optimizer step in this process; empty: none."""


@hookimpl
@observer
def slime_before_train_step(step: TrainStep, options: ProfilerOptions) -> None:
    if step.rollout not in options.rollouts or step.learner.rank not in options.ranks or step.learner.folder is None:
        return
    import torch
    from torch.profiler import profile

    if options.memory and torch.cuda.is_available():
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    profiler = profile(record_shapes=options.shapes, profile_memory=options.memory)
    profiler.start()
    _running.append(profiler)


@hookimpl
def slime_after_train_step(step: TrainStep, options: ProfilerOptions) -> None:
    if not _running:
        return
    import torch

    profiler = _running.pop()
    profiler.stop()
    assert step.learner.folder is not None
    folder = step.learner.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rollout-{step.rollout:06d}-step-{step.step}-rank-{step.learner.rank}"
    _write(profiler, folder / f"{name}.json.gz")
    if options.memory and torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(f"{folder / name}.pickle")
        torch.cuda.memory._record_memory_history(enabled=None)


def _write(profiler: profile, path: Path) -> None:
    """Write to a temporary file, then replace ``path``."""
    partial = path.with_name(f".{path.name}")  # keeps the suffix .gz, by which torch compresses
    profiler.export_chrome_trace(f"{partial}")
    partial.replace(path)
