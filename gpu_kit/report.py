"""Rows of the kit's table; times, memory peaks and differences on the device that this machine has."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
GIB = 2**30

SCRATCH = Path(os.environ.get("SLIME_GPU_KIT", "/tmp"))
ROWS = os.environ.get("SLIME_GPU_KIT_ROWS")

Value = TypeVar("Value")


def sized(gpu: Value, cpu: Value) -> Value:
    """Return the size for this machine's device."""
    return gpu if ON_GPU else cpu


def report(check: str, figure: float | str, unit: str = "", *, expected: str = "", ok: bool | None = None) -> None:
    """Add a row to the table at once, so that a later crash does not lose it.

    Arguments:
        expected: what a reader should find.
        ok: False: the kit has failed; None: for the reader to judge, as all times are.
    """
    row = {"check": check, "figure": figure, "unit": unit, "expected": expected, "ok": ok}
    if ROWS is None:
        print(row, flush=True)
        return
    with Path(ROWS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def report_limit(check: str, figure: float, limit: float, unit: str = "") -> None:
    """Report a figure that must not be above ``limit``."""
    report(check, figure, unit, expected=f"at most {limit:g}", ok=figure <= limit)


def report_equal(check: str, same: bool) -> None:
    """Report a comparison bit for bit."""
    report(check, "equal bits" if same else "different bits", expected="equal bits", ok=same)


def report_difference(check: str, found: torch.Tensor, exact: torch.Tensor, *, limit: float) -> None:
    """Report the largest difference, relative to the largest entry of ``exact``."""
    exact = exact.to(torch.float64)
    report_limit(check, float((found.to(torch.float64) - exact).abs().max() / exact.abs().max()), limit)


def report_peak(check: str, peak: int | None, *, limit: int) -> None:
    """Report the memory that a computation took beyond what was allocated before."""
    if peak is None:
        report(check, "not measured on a CPU", expected=f"at most {limit / GIB:.3g} GiB")
    else:
        report_limit(check, peak / GIB, limit / GIB, "GiB")


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], *, rounds: int = 5) -> float:
    """Return the median time of ``rounds`` calls after a first one."""
    work()
    times = []
    for _ in range(rounds):
        synchronize()
        start_s = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times)


def peak_of(work: Callable[[], object]) -> int | None:
    """Return the bytes that ``work`` allocates on the GPU at most; None without a GPU."""
    if not ON_GPU:
        work()
        return None
    free_memory()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


def free_memory() -> None:
    """Return freed GPU memory to the driver, and measure peaks from here on."""
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return the SHA-256 of all bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        copy = tensor.detach().to("cpu", copy=True)  # a storage that numpy has seen cannot be released
        total.update(copy.contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
