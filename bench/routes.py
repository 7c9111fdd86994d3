"""Costs of reading one long response with a mixture's expert routes, compared with the same response without them.

    python -m bench.routes [--tokens 32000] [--layers 48] [--experts 8]

Prints the size of the answer, the time to read it, the most memory that this takes on top of it, and what stays.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_core.rollout.engines.responses import read_answer, read_generation

MB = 1e6


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the sampler's cost of routes")
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=8)
    given = parser.parse_args(argv)
    shape = (given.tokens, given.layers, given.experts)
    routes = np.random.default_rng(0).integers(0, 128, shape, dtype=np.int32)
    meta: dict[str, Any] = {
        "output_token_logprobs": [[-0.5, 7, None]] * given.tokens,
        "finish_reason": {"type": "stop"},
    }
    measure("without routes", meta, None)
    measure("with routes", {**meta, "routed_experts": base64.b64encode(routes.tobytes()).decode()}, shape[1:])


def measure(name: str, meta: dict[str, Any], routes: tuple[int, int] | None) -> None:
    """Print one line for an answer with this ``meta_info``."""
    ids = [7] * len(meta["output_token_logprobs"])
    body = json.dumps({"output_ids": ids, "meta_info": meta}, separators=(",", ":")).encode()
    started_s = time.perf_counter()
    read_generation(read_answer(body)[0], routes)
    read_s = time.perf_counter() - started_s
    tracemalloc.start()
    found = read_generation(read_answer(body)[0], routes)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del found
    print(
        f"{name}: {len(body) / MB:.1f} MB, read in {read_s:.2f} s, at most {peak / MB:.1f} MB, {kept / MB:.1f} MB stay"
    )


if __name__ == "__main__":
    main()
