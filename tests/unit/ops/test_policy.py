from __future__ import annotations

import math

import pytest
import torch

from slime_core.ops.losses import clipped_surrogate


def surrogate(ratios, advantages, **settings):
    return clipped_surrogate(torch.tensor(ratios).log(), advantages_T=torch.tensor(advantages), **settings)


def test_four_tokens_by_hand():
    found = surrogate([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0], eps_clip=0.2)
    assert found.loss_T.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    assert found.clipped_T.tolist() == [1, 0, 0, 1]
    assert found.dual_clipped_T.tolist() == [0, 0, 0, 0]


def test_clip_higher_moves_only_the_upper_bound():
    found = surrogate([1.5, 1.25, 0.5], [1.0, 1.0, -1.0], eps_clip=0.2, eps_clip_high=0.28)
    assert found.loss_T.tolist() == pytest.approx([-1.28, -1.25, 0.8])
    assert found.clipped_T.tolist() == [1, 0, 1]


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage_only():
    found = surrogate([10.0, 2.0, 10.0], [-1.0, -1.0, 1.0], eps_clip=0.2, eps_clip_c=3.0)
    assert found.loss_T.tolist() == pytest.approx([3.0, 2.0, -1.2])
    assert found.dual_clipped_T.tolist() == [1, 0, 0]
    assert found.clipped_T.tolist() == [0, 0, 1]


def test_inside_the_range_no_rounding_counts_as_a_clip():
    torch.manual_seed(0)
    log_ratio_T = torch.empty(4096).uniform_(-0.22, 0.18)  # exp(-0.22) = 0.803, exp(0.18) = 1.197
    for rounded_T in (log_ratio_T, log_ratio_T * (1 + 2**-23), 1e-7 * log_ratio_T):
        assert clipped_surrogate(rounded_T, advantages_T=torch.randn(4096), eps_clip=0.2).clipped_T.sum() == 0


def test_at_ratio_one_the_gradient_is_minus_the_advantage():
    log_ratio_T = torch.zeros(3, requires_grad=True)
    clipped_surrogate(log_ratio_T, advantages_T=torch.tensor([2.0, -1.0, 0.0])).loss_T.sum().backward()
    assert log_ratio_T.grad.tolist() == [-2.0, 1.0, 0.0]


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [21.0, 95.0, math.inf])
def test_a_ratio_that_would_overflow_is_held_at_twenty_nats(log_ratio, advantage):
    log_ratio_T = torch.tensor([log_ratio], requires_grad=True)
    found = clipped_surrogate(log_ratio_T, advantages_T=torch.tensor([advantage]))
    found.loss_T.sum().backward()
    assert found.ratio_T.tolist() == pytest.approx([math.exp(20.0)])
    assert found.loss_T.tolist() == pytest.approx([{0.0: 0.0, 1.0: -1.2, -1.0: math.exp(20.0)}[advantage]])
    assert log_ratio_T.grad.tolist() == [0.0]


def test_a_clipped_token_passes_no_gradient():
    log_ratio_T = torch.tensor([1.5, 0.5, 10.0]).log().requires_grad_()
    found = clipped_surrogate(log_ratio_T, advantages_T=torch.tensor([1.0, -1.0, -1.0]), eps_clip_c=3.0)
    found.loss_T.sum().backward()
    assert log_ratio_T.grad.tolist() == [0.0, 0.0, 0.0]
    assert not found.ratio_T.requires_grad


def test_permuted_tokens_give_permuted_losses():
    generator = torch.Generator().manual_seed(0)
    log_ratio_T, advantages_T = torch.randn(2, 50, generator=generator)
    order = torch.randperm(50, generator=generator)
    whole = clipped_surrogate(log_ratio_T, advantages_T=advantages_T, eps_clip_c=3.0)
    permuted = clipped_surrogate(log_ratio_T[order], advantages_T=advantages_T[order], eps_clip_c=3.0)
    assert torch.equal(permuted.loss_T, whole.loss_T[order])


@pytest.mark.parametrize(
    "setting",
    [("eps_clip", -0.1), ("eps_clip", 1.1), ("eps_clip", math.nan), ("eps_clip_high", -0.2), ("eps_clip_c", 1.0)],
)
def test_a_bound_out_of_range_is_refused(setting):
    name, value = setting
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        surrogate([1.0], [1.0], **{name: value})


def test_columns_of_different_shape_are_refused_rather_than_broadcast():
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        surrogate([1.0, 1.0], [1.0])
