"""What ranks report of a rollout: memory, share of a GPU's peak, and which rank is slow."""

from __future__ import annotations

import time
from dataclasses import replace

import psutil
import pytest
import torch

from slime_core.learner.rank_load import GIB, ComputeClock, RankLoad, load_metrics, peak_flops, rank_load

FAST = RankLoad(seconds=10.0, work=5.0, allocated=2 * GIB, reserved=3 * GIB, cpu=0.5, memory=0.25)
SLOW = replace(FAST, seconds=20.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("loads", "slowest"),
    [
        ([FAST, FAST, SLOW, FAST], (2, 2.0, 10.0)),
        ([FAST, FAST, FAST, SLOW, SLOW], (3, 2.0, 10.0)),  # the median of the others counts
        ([FAST, replace(SLOW, work=10.0)], (0, 1.0, 0.0)),
        ([SLOW], None),
        ([replace(FAST, seconds=0.0), SLOW], None),  # no training
    ],
)
def test_the_slowest_rank_is_compared_with_the_median_of_the_others_for_the_same_work(
    loads: list[RankLoad], slowest: tuple[int, float, float] | None
) -> None:
    metrics = load_metrics(loads)
    values = [metrics[name] for name in metrics if name.startswith("perf/slowest_rank")]
    assert values == list(slowest or ())


def test_memory_is_the_largest_and_the_mean_of_the_ranks() -> None:
    loads = [FAST, replace(FAST, allocated=4 * GIB, cpu=0.75, seconds=0.0)]
    assert load_metrics(loads) == {
        "perf/rank_memory/mean": 3.0,
        "perf/rank_memory/max": 4.0,
        "perf/rank_memory_reserved/max": 3.0,
        "perf/machine_cpu": 0.75,
        "perf/machine_memory": 0.25,
    }


def test_on_a_cpu_a_rank_reports_its_process() -> None:
    clock = ComputeClock(CPU)
    clock.stop()
    before_s = time.perf_counter()
    clock.start()
    time.sleep(0.05)
    clock.stop()
    found = rank_load(clock, CPU, work=7.0)
    assert 0.05 <= found.seconds <= time.perf_counter() - before_s
    assert found.work == 7.0
    assert found.allocated == found.reserved
    assert 0.5 < found.allocated / psutil.Process().memory_info().rss < 2
    assert 0 < found.memory < 1
    assert rank_load(clock, CPU, work=1.0).seconds == 0


def test_on_a_gpu_the_clock_reads_events_and_the_peak_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Event:
        count = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.count += 1
            self.at_ms = 1000.0 * Event.count

        def elapsed_time(self, end: Event) -> float:
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 6)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    device = torch.device("cuda", 0)
    clock = ComputeClock(device)
    for _ in range(2):
        clock.start()
        clock.stop()
    found = rank_load(clock, device, work=1.0)
    assert (found.seconds, found.allocated, found.reserved) == (2.0, 5, 6)
    assert calls == ["reset", "synchronize"]


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA L40", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)
