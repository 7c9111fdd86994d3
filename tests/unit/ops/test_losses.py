from __future__ import annotations

import math

import pytest
import torch

from slime_core.ops.losses import clipped_surrogate, clipped_value_loss


def surrogate(ratios, advantages, **settings):
    return clipped_surrogate(torch.tensor(ratios).log(), advantages_T=torch.tensor(advantages), **settings)


@pytest.mark.parametrize(
    ("ratios", "advantages", "settings", "loss", "clipped", "dual_clipped"),
    [
        ([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0], {}, [-1.2, 1.5, -0.5, 0.8], [1, 0, 0, 1], [0, 0, 0, 0]),
        ([1.5, 1.25, 0.5], [1.0, 1.0, -1.0], {"eps_clip_high": 0.28}, [-1.28, -1.25, 0.8], [1, 0, 1], [0, 0, 0]),
        ([10.0, 2.0, 10.0], [-1.0, -1.0, 1.0], {"eps_clip_c": 3.0}, [3.0, 2.0, -1.2], [0, 0, 1], [1, 0, 0]),
    ],
    ids=["clip", "higher upper bound", "dual clip"],
)
def test_tokens_by_hand(ratios, advantages, settings, loss, clipped, dual_clipped):
    found = surrogate(ratios, advantages, eps_clip=0.2, **settings)
    assert found.loss_T.tolist() == pytest.approx(loss)
    assert (found.clipped_T.tolist(), found.dual_clipped_T.tolist()) == (clipped, dual_clipped)


def test_inside_the_range_no_rounding_counts_as_a_clip():
    torch.manual_seed(0)
    log_ratio_T = torch.empty(4096).uniform_(-0.22, 0.18)  # exp(-0.22) = 0.803, exp(0.18) = 1.197
    for rounded_T in (log_ratio_T, log_ratio_T * (1 + 2**-23), 1e-7 * log_ratio_T):
        assert clipped_surrogate(rounded_T, advantages_T=torch.randn(4096), eps_clip=0.2).clipped_T.sum() == 0


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


# --- The value loss ---------------------------------------------------------------------------------------------------


def value_loss(values, old, returns, clip=0.2):
    values_T = torch.tensor(values, requires_grad=True)
    found = clipped_value_loss(
        values_T, old_values_T=torch.tensor(old), returns_T=torch.tensor(returns), value_clip=clip
    )
    found.loss_T.sum().backward()
    return found.loss_T.tolist(), found.clipped_T.tolist(), values_T.grad.tolist()


def test_squared_errors_of_values_by_hand():
    # Unmoved: (1 - 3)^2 = 4. Moved 0.5 to the return 2: held at 1.2, 0.64 against 0.25. Moved 0.5 away from the return
    # 0: held at 1.2, 1.44, and free 2.25. Moved 0.1, inside the clip: 0.81 both ways.
    found, clipped, gradient = value_loss([1.0, 1.5, 1.5, 1.1], [1.0, 1.0, 1.0, 1.0], [3.0, 2.0, 0.0, 2.0])
    assert found == pytest.approx([4.0, 0.64, 2.25, 0.81])
    assert clipped == [0, 1, 0, 0]
    assert gradient == pytest.approx([-4.0, 0.0, 3.0, -1.8])


def test_inside_the_range_no_rounding_counts_as_a_clip_of_a_value():
    """Two layouts compute the same values but for their last bits; neither has clipped anything."""
    torch.manual_seed(0)
    old, values, returns = torch.empty(3, 4096).uniform_(-0.09, 0.09)
    for near in (values, values * (1 + 2**-23), old * (1 - 2**-24), old):
        found = clipped_value_loss(near, old_values_T=old, returns_T=returns, value_clip=0.2)
        assert found.clipped_T.sum() == 0
        assert torch.equal(found.loss_T, (near - returns).square())


def test_two_layouts_count_the_same_clips():
    torch.manual_seed(1)
    old, returns, moved = torch.randn(3, 4096)
    counts = [
        clipped_value_loss(values, old_values_T=old, returns_T=returns, value_clip=0.2).clipped_T.sum().item()
        for values in (old + 0.3 * moved, (old + 0.3 * moved) * (1 + 2**-23))
    ]
    exact = old.double() + 0.3 * moved.double()
    clamped = exact.clamp(old.double() - 0.2, old.double() + 0.2)
    decided = (clamped - returns.double()).abs() > (exact - returns.double()).abs()
    assert counts == [decided.sum().item()] * 2


def test_without_a_clip_it_is_the_squared_error():
    found, clipped, gradient = value_loss([1.5, -3.0], [1.0, 1.0], [2.0, 2.0], clip=None)
    assert (found, clipped, gradient) == ([0.25, 25.0], [0, 0], [-1.0, -10.0])


def test_a_wide_clip_changes_nothing_and_permuted_tokens_have_permuted_losses():
    torch.manual_seed(0)
    values, old, returns = torch.randn(3, 50)
    wide, none = (
        clipped_value_loss(values, old_values_T=old, returns_T=returns, value_clip=clip) for clip in (1e6, None)
    )
    assert torch.allclose(wide.loss_T, none.loss_T)
    straight = clipped_value_loss(values, old_values_T=old, returns_T=returns, value_clip=0.3)
    order = torch.randperm(50)
    moved = clipped_value_loss(values[order], old_values_T=old[order], returns_T=returns[order], value_clip=0.3)
    assert torch.equal(moved.loss_T, straight.loss_T[order])
    assert bool((straight.loss_T >= none.loss_T).all())


def test_bad_input_of_the_value_loss_is_refused():
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"\(1,\), \(2,\) and \(1,\)"):
        clipped_value_loss(one, old_values_T=torch.ones(2), returns_T=one, value_clip=0.2)
    with pytest.raises(ValueError, match=r"value_clip is 0\.0"):
        clipped_value_loss(one, old_values_T=one, returns_T=one, value_clip=0.0)
