"""The activation of gated MLPs has the numbers of plain torch, and keeps its input alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from slime_core.modeling.mlp import swiglu

TYPES = [torch.float32, torch.bfloat16]


def plain(both: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    product = silu(gate) * up
    return product if scale is None else (product * scale).to(both.dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_output_and_gradients_are_those_of_plain_torch_bit_for_bit(dtype, scaled):
    generator = torch.Generator().manual_seed(0)
    both = 2 * torch.randn(64, 2 * 48, generator=generator).to(dtype)
    scale = torch.rand(64, 1, generator=generator) if scaled else None  # of a router: float32
    gradient = torch.randn(64, 48, generator=generator).to(dtype)
    found = []
    for function in (plain, swiglu):
        given = [None if one is None else one.clone().requires_grad_() for one in (both, scale)]
        output = function(*given)
        output.backward(gradient)
        found.append([output.detach(), *(one.grad for one in given if one is not None)])
    for expected, value in zip(*found, strict=True):
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


def test_the_gradient_is_the_derivative():
    both = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scale = torch.rand(3, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (both, scale))


def test_nothing_is_kept_but_the_input():
    both = torch.randn(64, 96).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        swiglu(both)
    assert [one.data_ptr() for one in kept] == [both.data_ptr()]
