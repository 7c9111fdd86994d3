"""Attention of a CPU server: batches of sequences, as slime's servers compute it, against SGLang's loop over sequences.

    python -m bench.attention [--threads 1] [--rounds 7]

One decoding step of one layer with random keys and values, both sides in turn in one process. Prints medians, the
ratio, and the largest difference of the results. Models: the built-in one (4 heads of 16, 2 of keys), and
SmolLM2-135M's (9 of 64, 3 of keys). The batches are those of ``_slime_attention.py`` of slime-cpu, ``stand_ins``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from slime_cpu.serve import STAND_INS, server_environment

CASES = {
    "built-in model, 256 sequences of 4 to 12 tokens": (256, (4, 12), 4, 2, 16),
    "SmolLM2-135M, 64 sequences of 45 to 69 tokens": (64, (45, 69), 9, 3, 64),
    "SmolLM2-135M, 64 sequences of 45 to 1,069 tokens": (64, (45, 1069), 9, 3, 64),
    "SmolLM2-135M, 1 sequence of 1,000 tokens": (1, (1000, 1000), 9, 3, 64),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if str(STAND_INS) not in sys.path:  # SGLang imports on a CPU only with the stand-ins
        environment = {**os.environ, **server_environment(threads=arguments.threads)}
        sys.exit(
            subprocess.call([sys.executable, "-W", "ignore", "-m", "bench.attention", *sys.argv[1:]], env=environment)
        )
    import torch

    torch.set_num_threads(arguments.threads)
    print(f"load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores; {arguments.threads} threads")
    print("| a layer's decoding step | loop, ms | batches, ms | ratio | largest difference |\n|---|---|---|---|---|")
    for name, case in CASES.items():
        print(row(name, *case, rounds=arguments.rounds), flush=True)


def row(name: str, count: int, lengths: tuple[int, int], heads: int, kv_heads: int, size: int, *, rounds: int) -> str:
    """Return one row of the table."""
    import torch
    from _slime_attention import BatchedAttention  # type: ignore[import-not-found]
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    generator = torch.Generator().manual_seed(0)
    lengths_B = torch.randint(lengths[0], lengths[1] + 1, (count,), generator=generator)
    slots = torch.randint(1, 32_768, (count, lengths[1]), generator=generator).int()
    keys, values = (torch.randn(32_768, kv_heads, size, generator=generator) for _ in range(2))
    query = torch.randn(count, heads, size, generator=generator)
    options: dict[str, Any] = {"is_cross_attn": False, "sliding_window_size": None, "causal": False}
    options |= {"scaling": size**-0.5, "enable_gqa": True}
    times: dict[Any, list[float]] = {TorchNativeAttnBackend: [], BatchedAttention: []}
    outputs = {}
    for _ in range(rounds + 1):
        for kind, found in times.items():
            backend = kind.__new__(kind)
            backend._plan = None  # made again, though a step makes it once for all layers
            outputs[kind] = torch.empty_like(query)
            started_s = time.perf_counter()
            backend._run_sdpa_forward_decode(
                query, outputs[kind], keys, values, slots, torch.arange(count), lengths_B, None, **options
            )
            found.append(time.perf_counter() - started_s)
    loop, batched = (1e3 * statistics.median(found[1:]) for found in times.values())
    first, second = outputs.values()
    return f"| {name} | {loop:.1f} | {batched:.2f} | {loop / batched:.0f} | {float((first - second).abs().max()):.1e} |"


if __name__ == "__main__":
    main()
