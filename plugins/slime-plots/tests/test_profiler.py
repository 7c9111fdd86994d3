"""Plugin ``profiler``: which optimizer steps have a trace, and what is in it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_core import TrainStep
from slime_core.provisional import LearnerInfo
from slime_plots import profiler
from slime_plots.options import ProfilerOptions
from slime_testing import LifecycleSuite


class TestHooks(LifecycleSuite):
    plugin = "profiler"


def train(folder: Path | None, options: ProfilerOptions, *, rollout: int = 1, rank: int = 0, number: int = 0) -> None:
    """An optimizer step that multiplies two matrices."""
    step = TrainStep(rollout, number, LearnerInfo(rank, 2, {}, folder=folder))
    profiler.slime_before_train_step(step, options)
    _ = torch.ones(3, 5) @ torch.ones(5, 7)
    profiler.slime_after_train_step(step, options)


def events(path: Path) -> list[Mapping[str, Any]]:
    return list(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def test_each_step_of_a_chosen_rollout_and_rank_has_a_trace(tmp_path: Path) -> None:
    options = ProfilerOptions(rollouts=(1, 3), ranks=(1,))
    for rollout, rank in ((rollout, rank) for rollout in range(4) for rank in range(2)):
        train(tmp_path, options, rollout=rollout, rank=rank)
    train(tmp_path, options, rollout=3, rank=1, number=1)
    train(None, ProfilerOptions())  # a run without a folder
    names = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert names == [f"rollout-00000{k}-step-{n}-rank-1.json.gz" for k, n in ((1, 0), (3, 0), (3, 1))]


@pytest.mark.parametrize("is_full", [False, True])
def test_shapes_and_allocations_are_in_the_trace_if_they_are_recorded(tmp_path: Path, is_full: bool) -> None:
    train(tmp_path, ProfilerOptions(shapes=is_full, memory=is_full))
    trace = events(tmp_path / "profiles" / "rollout-000001-step-0-rank-0.json.gz")
    (product,) = (event for event in trace if event["name"] == "aten::mm")
    assert (product["args"].get("Input Dims") == [[3, 5], [5, 7]]) is is_full
    assert any(event["name"] == "[memory]" for event in trace) is is_full


def test_a_gpu_has_a_snapshot_of_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the calls, with torch's functions replaced; the content only a GPU shows."""
    calls: list[tuple[str, object]] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled="all", **_: calls.append(("record", enabled)))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda file: calls.append(("dump", file)))
    train(tmp_path, ProfilerOptions(memory=True))
    snapshot = f"{tmp_path}/profiles/rollout-000001-step-0-rank-0.pickle"
    assert calls == [("record", "all"), ("dump", snapshot), ("record", None)]
