"""Tokens of a mixture are sorted by expert and summed again, without a wait for the device and in one order."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from slime_core.modeling import mlp
from slime_core.modeling.mlp import Order, chosen_groups, grouped_linear, stacked, swiglu

EVERY_KIND = [
    [[0, 2], [0, 1], [2, 0]],  # one group of one token, and one of none
    [[3, 1], [3, 1], [3, 1]],  # two groups take all
    [[0, 1]],
]


def is_chosen(groups: list[list[int]], num_groups: int = 4) -> torch.Tensor:
    return torch.zeros(len(groups), num_groups, dtype=torch.bool).scatter(1, torch.tensor(groups), True)


def order_of(groups: list[list[int]], num_groups: int = 4) -> Order:
    chosen = chosen_groups(is_chosen(groups, num_groups), num=len(groups[0]))
    return Order.by_group(chosen, num_groups=num_groups)


def test_an_order_by_hand():
    order = order_of([[0, 2], [1, 0]], num_groups=3)
    assert order.tokens_N.tolist() == [0, 1, 1, 0]
    assert order.pairs_N.tolist() == [0, 2, 3, 1]
    assert order.rows_TK.tolist() == [[0, 3], [1, 2]]
    assert order.ends_G.tolist() == [2, 3, 4]
    assert order.ends_G.dtype == torch.int32
    assert order.spread_pairs(torch.tensor([[0.1, 0.2], [0.3, 0.4]])).tolist() == pytest.approx([0.1, 0.3, 0.4, 0.2])


def test_a_token_with_too_few_groups_gets_more():
    assert chosen_groups(torch.tensor([[False, True, False], [False, False, True]]), num=2).tolist()[0].count(1) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", EVERY_KIND)
def test_spread_and_combine_are_a_loop_over_groups(groups, dtype):
    torch.manual_seed(0)
    order, num_tokens = order_of(groups), len(groups)
    tokens = torch.randn(num_tokens, 8, dtype=dtype, requires_grad=True)
    factors = torch.randn(4, 8, dtype=dtype)
    rows = order.spread(tokens)
    sizes = order.ends_G.diff(prepend=torch.zeros(1, dtype=torch.int32))
    found = order.combine(rows * factors.repeat_interleave(sizes, dim=0))
    products = [[tokens[token] * factors[group] for group in sorted(of)] for token, of in enumerate(groups)]
    expected = torch.stack([torch.stack(of).float().sum(0).to(dtype) for of in products])
    assert torch.equal(found, expected)
    gradient = torch.randn_like(found)
    (mine,) = torch.autograd.grad(found, tokens, gradient)
    theirs = [[gradient[token] * factors[group] for group in sorted(of)] for token, of in enumerate(groups)]
    assert torch.equal(mine, torch.stack([torch.stack(of).float().sum(0).to(dtype) for of in theirs]))


def test_a_sum_in_bfloat16_is_rounded_once():
    order = order_of([[0, 1, 2]], num_groups=3)
    rows = torch.tensor([[256.0], [0.75], [0.75]], dtype=torch.bfloat16)
    assert order.combine(rows).item() == 258  # 256 + 0.75 is 256 in bfloat16, twice


@pytest.mark.parametrize("layout", ["apart", "adjacent", "spaced", "backwards", "one"])
def test_matrices_at_equal_distances_are_read_in_place(layout):
    buffer = torch.randn(200)
    starts = {"apart": [0, 40, 90], "adjacent": [8, 32, 56], "spaced": [0, 64, 128], "backwards": [128, 64, 0]}
    weights = [buffer[start : start + 24].view(4, 6) for start in starts.get(layout, [16])]
    found = stacked(weights)
    assert (found is None) is (layout in ("apart", "backwards"))
    if found is not None:
        assert torch.equal(found, torch.stack(weights))
        assert found.data_ptr() == weights[0].data_ptr()
    assert stacked([torch.zeros(4, 6), torch.zeros(4, 6)]) is None
    assert stacked([torch.zeros(6, 4).t()]) is None


def test_views_and_copies_give_the_same_bits():
    torch.manual_seed(0)
    buffer, ends = torch.randn(3 * 96), torch.tensor([2, 2, 5], dtype=torch.int32)
    views = [buffer[start : start + 64].view(8, 8).requires_grad_() for start in (0, 96, 192)]
    copies = [view.detach().clone().requires_grad_() for view in views]
    tokens = torch.randn(5, 8, requires_grad=True)
    gradient = torch.randn(5, 8)
    found = [
        [product, *torch.autograd.grad(product, [tokens, *weights], gradient)]
        for weights in (views, copies)
        for product in [grouped_linear(tokens, ends, weights)]
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [[0, 64, 128], [0, 64, 192]], ids=["views", "copies"])
def test_groups_that_are_all_empty_have_gradients_of_zeros(start, dtype):
    buffer = torch.randn(256, dtype=dtype)
    weights = [buffer[first : first + 64].view(4, 16).requires_grad_() for first in start]
    tokens = torch.zeros(0, 16, dtype=dtype, requires_grad=True)
    product = grouped_linear(tokens, torch.zeros(3, dtype=torch.int32), weights)
    assert product.shape == (0, 4)
    product.sum().backward()
    assert tokens.grad.shape == (0, 16)
    assert all(weight.grad.shape == (4, 16) and not weight.grad.any() for weight in weights)
    assert all(weight.grad.dtype is dtype for weight in [tokens, *weights])


def test_gradients_of_empty_groups_are_zeroed_whatever_the_kernel_left(monkeypatch):
    product = mlp.grouped_mm

    def leaves_empty_groups(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        found = product(a, b, offs=offs)
        if found.dim() == 3:
            found[offs.diff(prepend=torch.zeros(1, dtype=torch.int32)) == 0] = float("nan")
        return found

    monkeypatch.setattr(mlp, "grouped_mm", leaves_empty_groups)
    monkeypatch.setattr(mlp, "_leaves_empty_groups", lambda device: True)
    tokens, weights = torch.ones(3, 4), [torch.ones(4, 4, requires_grad=True) for _ in range(4)]
    grouped_linear(tokens, torch.tensor([0, 1, 1, 3], dtype=torch.int32), weights).sum().backward()
    assert [weight.grad.unique().tolist() for weight in weights] == [[0], [1], [0], [2]]


# --- SwiGLU -----------------------------------------------------------------------------------------------------------


def plain(both: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    product = silu(gate) * up
    return product if scale is None else (product * scale).to(both.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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


def test_nothing_is_kept_but_the_input():
    both = torch.randn(64, 96).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one):
        swiglu(both)
    assert [one.data_ptr() for one in kept] == [both.data_ptr()]
