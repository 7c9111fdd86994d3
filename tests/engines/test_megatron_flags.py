"""Megatron's own flags take effect in the real model."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from slime_core import RunView
from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC
from slime_core.modeling.spec import MBridgeSpec

MODEL = ARITHMETIC / "model"

# Megatron warns about its own calls, and that flash attention needs no recomputation; ours is torch's.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
    pytest.mark.filterwarnings("ignore:If you are using transformer_engine:UserWarning"),
]

LENGTHS = (9, 5, 12)


def build(megatron: Any, line: str, *, dtype: torch.dtype = torch.float32) -> Any:
    spec = MBridgeSpec(None, RunView())
    overrides = load(line.split(), check_rules=False).config.megatron.transformer
    model_config = json.loads((MODEL / "config.json").read_text())
    (chunk,) = spec.build(model_config, dtype=dtype, parallel=megatron, overrides=overrides)
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", [(1e-3, 1.0, 14), (1e-3, 0.0, 13)]),
        ("--apply-wd-to-qk-layernorm", [(1e-3, 1.0, 20), (1e-3, 0.0, 7)]),
        ("--decoupled-lr 1e-5", [(1e-3, 1.0, 12), (1e-5, 1.0, 2), (1e-3, 0.0, 13)]),
    ],
)
def test_the_optimizer_has_the_requested_groups(megatron, line, expected):
    """Largest learning rate, factor of the weight decay and number of the parameters in each group."""
    from slime_core.learner.optimizer import build_optimizer, wrap

    config = load(["--lr", "1e-3", *line.split()], check_rules=False).config
    model = wrap([build(megatron, "")], bf16=False)
    optimizer = build_optimizer(model, config.optimizer, bf16=False, overrides=config.megatron.optimizer)
    groups = optimizer.param_groups
    assert [(group["max_lr"], group["wd_mult"], len(group["params"])) for group in groups] == expected


def test_gradients_of_bfloat16_are_accumulated_in_float32_on_request(megatron):
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = True
    try:
        build(megatron, "--disable-bf16-reduced-precision-matmul", dtype=torch.bfloat16)
        assert not products.allow_bf16_reduced_precision_reduction
    finally:
        products.allow_bf16_reduced_precision_reduction = True
