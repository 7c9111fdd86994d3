"""Compares a mixture of experts with Megatron's dispatcher and copied matrices, forward and backward, in alternation.

    python -m bench.mixture [--tokens 512] [--hidden 256] [--inner 128] [--experts 64] [--bf16]

Prints the median time of a pass of one layer for both, and the ratio. Runs on a GPU if there is one. The sizes of
Qwen3-30B-A3B are ``--tokens 8192 --hidden 2048 --inner 768 --experts 128 --bf16``.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

PASSES, CHOSEN = 15, 8


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="a mixture of experts against Megatron's dispatcher")
    for name, default in (("tokens", 512), ("hidden", 256), ("inner", 128), ("experts", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    layer = build(arguments)
    device, dtype = next(layer.parameters()).device, next(layer.parameters()).dtype
    tokens = torch.randn(arguments.tokens, 1, arguments.hidden, device=device, dtype=dtype, requires_grad=True)
    times: dict[str, list[float]] = {"Megatron's": [], "slime's": []}
    for _ in range(PASSES):
        with as_megatron(layer):
            times["Megatron's"].append(seconds(lambda: layer(tokens)[0].sum().backward()))
        times["slime's"].append(seconds(lambda: layer(tokens)[0].sum().backward()))
    theirs, ours = (1e3 * statistics.median(found[2:]) for found in times.values())
    print(f"{device} {dtype}: Megatron's {theirs:.1f} ms, slime's {ours:.1f} ms, ratio {ours / theirs:.2f}")


def build(sizes: argparse.Namespace) -> Any:
    """One layer of a model in Megatron's buffers, as it trains."""
    from slime_core import RunView
    from slime_core.modeling.spec import MBridgeSpec
    from slime_testing.harness.megatron import start_single_rank

    parallel = start_single_rank()
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from slime_core.learner.optimizer import wrap

    config = {
        **{"model_type": "qwen3_moe", "vocab_size": 64, "num_hidden_layers": 1, "norm_topk_prob": True},
        **{"hidden_size": sizes.hidden, "intermediate_size": sizes.inner, "moe_intermediate_size": sizes.inner},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "rope_theta": 1e4},
        **{"num_experts": sizes.experts, "num_experts_per_tok": CHOSEN, "max_position_embeddings": 64},
    }
    dtype = torch.bfloat16 if sizes.bf16 else torch.float32
    chunks = MBridgeSpec(RunView()).build(config, dtype=dtype, parallel=parallel)
    wrap(chunks, bf16=sizes.bf16)
    return next(module for module in chunks[0].modules() if isinstance(module, MoELayer))


@contextmanager
def as_megatron(layer: Any) -> Iterator[None]:
    """Inside the block, move tokens as Megatron does, and copy the matrices of the experts for each product."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from slime_core.modeling import mlp

    mine, stacked = type(layer.token_dispatcher), mlp.stacked
    layer.token_dispatcher.__class__ = MoEAlltoAllTokenDispatcher
    mlp.stacked = lambda weights: None
    try:
        yield
    finally:
        layer.token_dispatcher.__class__, mlp.stacked = mine, stacked


def seconds(run: Callable[[], None]) -> float:
    """How long a pass takes, to the end of its work on the device."""
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
