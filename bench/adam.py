"""Compares a step of torch's fused AdamW, which the learner uses, with a step of the plain one, in alternation.

    python -m bench.adam [--device cuda]

Prints the median time of a step for the weights of the built-in model and for 60 matrices of 1,024 x 1,024, the ratio,
and the largest difference of either from a step in float64. On a GPU also the most memory that a step takes on top.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

SHAPES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "small": [*[(48, 48)] * 24, *[(16, 48)] * 6, *[(48,)] * 48],
    "large": [(1024, 1024)] * 60,
}
STEPS = 20


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="fused AdamW against plain AdamW")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    for name, shapes in SHAPES.items():
        compare(name, shapes, torch.device(arguments.device))


def compare(name: str, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
    """Print one line for weights of these shapes."""
    generator = torch.Generator().manual_seed(0)
    start = [0.02 * torch.randn(shape, generator=generator) for shape in shapes]
    runs = {
        "plain": adam(start, device, fused=False),
        "fused": adam(start, device, fused=True),
        "float64": adam([weight.double() for weight in start], device, fused=False),
    }
    times: dict[str, list[float]] = {"plain": [], "fused": []}
    peaks = dict.fromkeys(times, 0)
    for _ in range(STEPS):
        gradients = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
        for kind, (weights, optimizer) in runs.items():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.to(weight.dtype)
            took, peak = step(optimizer, device)
            if kind in times:
                times[kind].append(took)
                peaks[kind] = max(peaks[kind], peak)
    plain, fused = (1e3 * statistics.median(times[kind]) for kind in times)
    exact = runs["float64"][0]
    errors = [max(float((a - b).abs().max()) for a, b in zip(runs[kind][0], exact, strict=True)) for kind in times]
    memory = f"; memory on top: {peaks['plain']:,} and {peaks['fused']:,} bytes" if device.type == "cuda" else ""
    print(
        f"{name}: plain {plain:.2f} ms, fused {fused:.2f} ms, ratio {plain / fused:.1f}; after {STEPS} steps off "
        f"float64 by {errors[0]:.1e} and {errors[1]:.1e}{memory}"
    )


def adam(
    start: Sequence[torch.Tensor], device: torch.device, *, fused: bool
) -> tuple[list[torch.Tensor], torch.optim.AdamW]:
    """Return copies of ``start`` on ``device`` and their optimizer; not fused: torch's default on this device."""
    weights = [weight.to(device, copy=True) for weight in start]
    return weights, torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1, fused=fused or None)


def step(optimizer: torch.optim.AdamW, device: torch.device) -> tuple[float, int]:
    """Return the seconds of one step, and the bytes that it allocated in addition."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    started_s = time.perf_counter()
    optimizer.step()
    if on_gpu:
        torch.cuda.synchronize()
    took = time.perf_counter() - started_s
    return took, (torch.cuda.max_memory_allocated() - held) if on_gpu else 0


if __name__ == "__main__":
    main()
