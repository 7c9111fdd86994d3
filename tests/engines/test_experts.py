"""Experts computed together are those that Megatron computes one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from slime_core import RunView
from slime_core.modeling.mlp import stacked
from slime_core.modeling.spec import MBridgeSpec
from tests.engines.families import HEADS, MIXTURE, SIZES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

COUNTS = [[3, 0, 5, 2], [0, 0, 0, 7], [1, 1, 1, 1]]


def products(tokens: torch.Tensor, counts: list[int], weights: list[torch.Tensor]) -> torch.Tensor:
    parts = tokens.split(counts)
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
def test_a_grouped_product_is_one_product_after_the_other(megatron, dtype, counts) -> None:
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


def test_a_product_by_hand(megatron) -> None:
    from slime_core.modeling.mlp import grouped_linear

    tokens = torch.tensor([[1.0, 0, 0, 2], [0, 1, 0, 0]])
    weights = [torch.full((4, 4), 3.0), torch.eye(4) * 5]
    product = grouped_linear(tokens, torch.tensor([1, 2], dtype=torch.int32), weights)
    assert product.tolist() == [[9, 9, 9, 9], [0, 5, 0, 0]]


def test_only_what_trains_gets_a_gradient(megatron) -> None:
    from slime_core.modeling.mlp import grouped_linear

    tokens, weights = torch.randn(4, 8, requires_grad=True), [torch.randn(8, 8), torch.randn(8, 8)]
    ends = torch.tensor([1, 4], dtype=torch.int32)
    grouped_linear(tokens, ends, weights).sum().backward()
    assert torch.allclose(tokens.grad, products(torch.ones(4, 8), [1, 3], [weight.t() for weight in weights]))
    weights[1].requires_grad_()
    grouped_linear(tokens.detach(), ends, weights).sum().backward()
    assert torch.allclose(weights[1].grad, tokens[1:].sum(0).expand(8, 8))


def tiny_mixture(megatron, dtype: torch.dtype, **overrides: Any) -> torch.nn.Module:
    """The whole model of a tiny Qwen3 mixture, as the layer spec makes it."""
    config = {"model_type": "qwen3_moe", **SIZES, **HEADS, **MIXTURE, "norm_topk_prob": True}
    torch.manual_seed(0)
    (chunk,) = MBridgeSpec(RunView()).build(config, dtype=dtype, parallel=megatron, overrides=overrides)
    return chunk


@pytest.fixture(scope="module")
def experts(megatron) -> Any:
    from slime_core.modeling.experts import GroupedExperts

    chunk = tiny_mixture(megatron, torch.float32)
    return next(module for module in chunk.modules() if isinstance(module, GroupedExperts))


@pytest.mark.parametrize("counts", [[3, 0, 5, 2, 1, 0, 0, 4], [0, 0, 0, 0, 0, 0, 0, 0]])
def test_a_layer_gives_what_megatron_gives(experts, counts) -> None:
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


@pytest.fixture
def make_layer(megatron) -> Callable[[torch.dtype], Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def make(dtype: torch.dtype) -> Any:
        return next(module for module in tiny_mixture(megatron, dtype).modules() if isinstance(module, MoELayer))

    return make


def loop_over_experts(layer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What a mixture is by definition: one product for each token and expert, summed in float32."""
    probs, is_chosen = layer.router(tokens)
    outputs = []
    for token, of_token, chosen in zip(tokens.view(-1, 64), probs, is_chosen, strict=True):
        sums = torch.zeros(64)
        for number in chosen.nonzero().flatten().tolist():
            expert = layer.experts.local_experts[number]
            gate, up = (token @ expert.linear_fc1.weight.t()).chunk(2)
            inner = (torch.nn.functional.silu(gate) * up * of_token[number]).to(token.dtype)
            sums = sums + (inner @ expert.linear_fc2.weight.t()).float()
        outputs.append(sums.to(token.dtype))
    return torch.stack(outputs).view_as(tokens)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
@pytest.mark.parametrize("one_takes_all", [False, True])
def test_a_mixture_is_a_loop_over_experts(make_layer, num_tokens, one_takes_all, dtype, tolerance) -> None:
    layer = make_layer(dtype)
    if one_takes_all:
        layer.router.weight.data[2] += 1  # with tokens above 0
    torch.manual_seed(1)
    tokens = torch.rand(num_tokens, 1, 64, dtype=dtype, requires_grad=True)
    gradient, found = torch.randn(num_tokens, 1, 64, dtype=dtype), []
    for forward in (lambda: layer(tokens)[0], lambda: layer(tokens)[0], lambda: loop_over_experts(layer, tokens)):
        output = forward()
        inputs = [tokens, *layer.parameters()]
        got = torch.autograd.grad(output, inputs, gradient, allow_unused=True, materialize_grads=True)
        found.append([output, *got])
    for mine, again, theirs in zip(*found, strict=True):
        assert torch.equal(mine, again)
        assert torch.allclose(mine.float(), theirs.float(), rtol=tolerance, atol=tolerance)


def fake_pass(layer: Any) -> list[torch.Size]:
    """Forward and backward of tensors without values: code that reads one, or whose shapes follow from them, raises."""
    mode = FakeTensorMode()
    parameters = {name: mode.from_tensor(tensor) for name, tensor in layer.named_parameters()}
    with mode:
        tokens = torch.randn(6, 1, 64, dtype=torch.bfloat16, requires_grad=True)
        output, _ = torch.func.functional_call(layer, parameters, (tokens,))
        gradients = torch.autograd.grad(output.sum(), [tokens, *parameters.values()])
    return [gradient.shape for gradient in gradients]


def test_no_step_of_a_mixture_waits_for_the_device_as_megatrons_dispatcher_does(make_layer, monkeypatch) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    layer = make_layer(torch.bfloat16)
    assert fake_pass(layer) == [torch.Size([6, 1, 64]), *(weight.shape for weight in layer.parameters())]
    monkeypatch.setattr(layer.token_dispatcher, "__class__", MoEAlltoAllTokenDispatcher)
    with pytest.raises(DynamicOutputShapeException):
        fake_pass(layer)


def test_a_model_that_trains_reads_the_matrices_of_its_experts_in_place(megatron) -> None:
    from slime_core.learner.optimizer import wrap
    from slime_core.modeling.experts import GroupedExperts

    chunk = tiny_mixture(megatron, torch.float32)
    names = [name for name in chunk.state_dict() if "_extra_state" not in name]
    before = {name: tensor.clone() for name, tensor in chunk.named_parameters()}
    wrap([chunk], bf16=False)
    layers = [module for module in chunk.modules() if isinstance(module, GroupedExperts)]
    for layer in layers:
        for matrix in ("linear_fc1", "linear_fc2"):
            weights = [getattr(expert, matrix).weight for expert in layer.local_experts]
            whole = stacked(weights)
            assert whole is not None
            assert torch.equal(whole, torch.stack(weights))
    assert len(layers) == 3
    assert [name for name in chunk.state_dict() if "_extra_state" not in name] == names
    assert all(torch.equal(tensor, before.pop(name)) for name, tensor in chunk.named_parameters())
    assert not before
