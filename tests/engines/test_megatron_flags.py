"""Megatron's own flags do in the real model what they promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_core.config.load import load
from slime_core.learner.spec import MBridgeSpec
from tests.engines.conftest import MODEL

# Megatron warns about its own calls, and that flash attention needs no recomputation; ours is torch's.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
    pytest.mark.filterwarnings("ignore:If you are using transformer_engine:UserWarning"),
]

LENGTHS = (9, 5, 12)


def overrides(line: str, home: str = "transformer") -> dict[str, Any]:
    return getattr(load(line.split(), check_rules=False).config.megatron, home)


def build(megatron: Any, line: str) -> Any:
    from transformers import AutoConfig

    spec = MBridgeSpec()
    (chunk,) = spec.build(
        AutoConfig.from_pretrained(MODEL), dtype=torch.float32, parallel=megatron, overrides=overrides(line)
    )
    spec.load_weights([chunk], MODEL)
    return chunk


def step(chunk: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Elements of activations that a forward pass keeps, and the gradients of the backward pass."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )
    tokens = torch.arange(sum(LENGTHS))[None] % 16
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = chunk(tokens, positions, None, packed_seq_params=packed)
    logits.log_softmax(-1)[..., 3].sum().backward()
    return sum(kept.values()), {name: parameter.grad for name, parameter in chunk.named_parameters()}


@pytest.mark.parametrize(
    "line",
    [
        "--recompute-activations",
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-granularity selective --recompute-modules layernorm",
        "--recompute-granularity selective --recompute-modules core_attn mlp",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ],
)
def test_recomputing_keeps_fewer_activations_and_gives_the_same_gradients(megatron, line):
    plain, expected = step(build(megatron, ""))
    kept, gradients = step(build(megatron, line))
    assert kept < plain
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
