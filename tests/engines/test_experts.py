"""Experts computed together are those that Megatron computes one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_core import RunView
from slime_core.modeling.spec import MBridgeSpec
from tests.engines.families import HEADS, MIXTURE, SIZES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

COUNTS = [[3, 0, 5, 2], [0, 0, 0, 7], [1, 1, 1, 1]]


def products(tokens: torch.Tensor, counts: list[int], weights: list[torch.Tensor]) -> torch.Tensor:
    parts = tokens.split(counts)
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
def test_a_grouped_product_is_one_product_after_the_other(megatron, dtype, counts):
    from slime_core.modeling.mlp import grouped_linear

    torch.manual_seed(0)
    tokens = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    weights = [torch.randn(24, 16, dtype=dtype, requires_grad=True) for _ in counts]
    ends = torch.tensor(counts).cumsum(0).int()
    found, expected = grouped_linear(tokens, ends, weights), products(tokens, counts, weights)
    assert torch.allclose(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2)
    mine = torch.autograd.grad(found.sum(), [tokens, *weights])  # of a sum: strides of 0
    theirs = torch.autograd.grad(expected.sum(), [tokens, *weights])
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(mine, theirs, strict=True))


def test_a_product_by_hand(megatron):
    from slime_core.modeling.mlp import grouped_linear

    tokens = torch.tensor([[1.0, 0, 0, 2], [0, 1, 0, 0]])
    weights = [torch.full((4, 4), 3.0), torch.eye(4) * 5]
    found = grouped_linear(tokens, torch.tensor([1, 2], dtype=torch.int32), weights)
    assert found.tolist() == [[9, 9, 9, 9], [0, 5, 0, 0]]


def test_only_what_trains_gets_a_gradient(megatron):
    from slime_core.modeling.mlp import grouped_linear

    tokens, weights = torch.randn(4, 8, requires_grad=True), [torch.randn(8, 8), torch.randn(8, 8)]
    ends = torch.tensor([1, 4], dtype=torch.int32)
    grouped_linear(tokens, ends, weights).sum().backward()
    assert torch.allclose(tokens.grad, products(torch.ones(4, 8), [1, 3], [weight.t() for weight in weights]))
    weights[1].requires_grad_()
    grouped_linear(tokens.detach(), ends, weights).sum().backward()
    assert torch.allclose(weights[1].grad, tokens[1:].sum(0).expand(8, 8))


@pytest.fixture(scope="module")
def experts(megatron) -> Any:
    """The experts of a layer of a tiny Qwen3 mixture, as the layer spec makes them."""
    from slime_core.modeling.layers import GroupedExperts

    config = {"model_type": "qwen3_moe", **SIZES, **HEADS, **MIXTURE, "norm_topk_prob": True}
    torch.manual_seed(0)
    (chunk,) = MBridgeSpec(None, RunView()).build(config, dtype=torch.float32, parallel=megatron)
    return next(module for module in chunk.modules() if isinstance(module, GroupedExperts))


@pytest.mark.parametrize("counts", [[3, 0, 5, 2, 1, 0, 0, 4], [0, 0, 0, 0, 0, 0, 0, 0]])
def test_a_layer_gives_what_megatron_gives(experts, counts):
    from megatron.core.transformer.moe.experts import SequentialMLP

    tokens = torch.randn(sum(counts), 64, requires_grad=True)
    probs = torch.rand(sum(counts), requires_grad=True)
    weights, found = torch.randn(sum(counts), 64), []
    for forward in (type(experts).forward, SequentialMLP.forward):
        output, bias = forward(experts, tokens, torch.tensor(counts), probs)
        assert bias is None
        inputs = [tokens, probs, *experts.parameters()]
        found.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_one_grouped_product_takes_the_place_of_one_for_each_expert(experts, monkeypatch):
    from slime_core.modeling import mlp as room

    calls: list[int] = []
    product = room.grouped_mm
    monkeypatch.setattr(room, "grouped_mm", lambda *args, **options: calls.append(1) or product(*args, **options))
    experts(torch.randn(8, 64), torch.ones(8, dtype=torch.int64), torch.rand(8))
    assert len(calls) == 2
