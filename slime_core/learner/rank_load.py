"""Measures the load of a rank in a rollout: seconds, memory, share of its GPU's peak. Ranks measure; the driver
reads their reports.

    ComputeClock   seconds of a rank's forward and backward passes, without the wait for other ranks' gradients
    RankLoad       what one rank reports; rank_load measures it
    load_metrics   ``perf/`` metrics of all ranks: their memory, the slowest one, and the use of their machines
    peak_flops     peak FLOP/s of a GPU, by its name

torch is imported inside functions, because the driver does not load it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

if TYPE_CHECKING:
    import torch

GIB = 2**30

PEAK_TFLOPS = {
    "NVIDIA B200": 2250.0,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA H200": 989.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100": 989.5,
    "NVIDIA H800 PCIe": 756.5,
    "NVIDIA H800": 989.5,
    "NVIDIA H20": 148.0,
    "NVIDIA A100": 312.0,
    "NVIDIA A800": 312.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A30": 165.0,
    "NVIDIA A10": 125.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
}
"""Start of the name that CUDA gives -> dense bfloat16 TFLOP/s of the tensor cores; the first match counts. From
NVIDIA's data sheets, which since A100 state twice as much for sparse matrices."""


def peak_flops(name: str) -> float | None:
    """Return the FLOP/s in bfloat16 of the GPU that CUDA calls ``name``, if it is known.

    Example: ``peak_flops("NVIDIA H100 80GB HBM3")`` is 989.5e12.
    """
    matches = [tera for start, tera in PEAK_TFLOPS.items() if f"{name} ".startswith((f"{start} ", f"{start}-"))]
    return matches[0] * 1e12 if matches else None


class ComputeClock:
    """Sums the time from :meth:`start` to :meth:`stop`, on a GPU by the GPU's clock.

    A GPU's kernels run later than they are launched, so the host's clock would be wrong.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._started: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Record the start of a pass."""
        self._started = self._now()

    def stop(self) -> None:
        """Record the end of the pass; do nothing if none has started, as in a critic."""
        if self._started is not None:
            self._spans.append((self._started, self._now()))
            self._started = None

    def take_seconds(self) -> float:
        """Return the seconds of the passes since the last call."""
        spans, self._spans = self._spans, []
        if not self._on_gpu:
            return float(sum(end - start for start, end in spans))
        import torch

        torch.cuda.synchronize()
        return float(sum(start.elapsed_time(end) for start, end in spans)) / 1000

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.monotonic()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load that one rank reports of a rollout.

    Arguments:
        seconds: of its forward and backward passes; 0: it trained nothing.
        work: of these passes, in any unit that is the same on all ranks.
        allocated: bytes; on a GPU the peak of tensors, on a CPU the memory of the process.
        reserved: bytes; on a GPU the peak of torch's allocator, on a CPU ``allocated``.
        cpu, memory: fraction of its machine's cores and memory that is in use.
    """

    seconds: float
    work: float
    allocated: int
    reserved: int
    cpu: float
    memory: float


def rank_load(clock: ComputeClock, device: torch.device, *, work: float) -> RankLoad:
    """Measure the load of this process since the last call."""
    if device.type == "cuda":
        import torch

        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
    else:
        allocated = reserved = psutil.Process().memory_info().rss
    cpu, memory = psutil.cpu_percent() / 100, psutil.virtual_memory().percent / 100
    return RankLoad(clock.take_seconds(), work, allocated, reserved, cpu, memory)


def load_metrics(loads: Sequence[RankLoad]) -> dict[str, float]:
    """Return the metrics of the ranks' memory, of the slowest rank, and of the use of their busiest machine."""
    allocated = [load.allocated / GIB for load in loads]
    return {
        "perf/rank_memory/mean": statistics.fmean(allocated),
        "perf/rank_memory/max": max(allocated),
        "perf/rank_memory_reserved/max": max(load.reserved for load in loads) / GIB,
        "perf/machine_cpu": max(load.cpu for load in loads),
        "perf/machine_memory": max(load.memory for load in loads),
        **_slowest_rank(loads),
    }


def _slowest_rank(loads: Sequence[RankLoad]) -> dict[str, float]:
    """Return the rank that is slowest for its work, compared with the median of the others; {} if none compares."""
    if len(loads) < 2 or not all(load.seconds and load.work for load in loads):
        return {}
    pace = [load.seconds / load.work for load in loads]
    slowest = max(range(len(pace)), key=pace.__getitem__)
    ratio = pace[slowest] / statistics.median(pace[:slowest] + pace[slowest + 1 :])
    return {
        "perf/slowest_rank": slowest,
        "perf/slowest_rank_ratio": ratio,
        "perf/slowest_rank_lost_time": loads[slowest].seconds * (1 - 1 / ratio),
    }
