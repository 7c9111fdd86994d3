from __future__ import annotations

import math

import pytest
import torch

from slime_core.ops.losses import approximate_kl

HALF, QUARTER = math.log(0.5), math.log(0.25)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [math.log(2), -math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
        ("low_var_kl", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
    ],
)
def test_two_tokens_by_hand(estimator, expected):
    found = approximate_kl(
        torch.tensor([HALF, QUARTER]), base_log_probs_T=torch.tensor([QUARTER, HALF]), estimator=estimator
    )
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_low_var_kl_is_k3_held_to_ten_and_passes_no_gradient_beyond():
    log_probs_T = torch.tensor([-20.0, -1.0], requires_grad=True)
    found = approximate_kl(log_probs_T, base_log_probs_T=torch.tensor([-1.0, -1.0]), estimator="low_var_kl")
    found.sum().backward()
    assert found.tolist() == [10.0, 0.0]
    assert log_probs_T.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_token_that_the_actor_all_but_lost_has_a_finite_estimate_and_gradient(estimator, weighed):
    log_probs_T = torch.tensor([-100.0, -1.0], requires_grad=True)
    found_T = approximate_kl(
        log_probs_T,
        base_log_probs_T=torch.tensor([-5.0, -1.0]),
        estimator=estimator,
        sampled_log_probs_T=torch.tensor([-100.0, -1.0]) if weighed else None,
    )
    (gradient_T,) = torch.autograd.grad(found_T.sum(), log_probs_T)
    assert found_T.isfinite().all()
    assert gradient_T.isfinite().all()


def test_k3_is_held_where_float32_would_not_hold_it_and_passes_no_gradient_there():
    log_probs_T = torch.tensor([-100.0, -24.0], requires_grad=True)
    found_T = approximate_kl(log_probs_T, base_log_probs_T=torch.tensor([-5.0, -5.0]))
    (gradient_T,) = torch.autograd.grad(found_T.sum(), log_probs_T)
    assert found_T.tolist() == pytest.approx([math.exp(20) - 21, math.exp(19) - 20], rel=1e-6)
    assert gradient_T.tolist() == pytest.approx([0.0, 1 - math.exp(19)], rel=1e-6)


def test_k3_of_nearly_equal_models_keeps_its_digits():
    found = approximate_kl(torch.tensor([1e-4], dtype=torch.float64), base_log_probs_T=torch.zeros(1).double())
    assert float(found) == pytest.approx(5e-9, rel=1e-4)


def test_permuted_tokens_give_permuted_estimates():
    left_T, right_T = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    order = torch.arange(39, -1, -1)
    whole_T = approximate_kl(left_T, base_log_probs_T=right_T)
    assert torch.equal(approximate_kl(left_T[order], base_log_probs_T=right_T[order]), whole_T[order])


@pytest.mark.parametrize(
    ("base", "more", "names"),
    [
        (1, {}, r"\(3,\) and \(1,\)"),
        (3, {"sampled_log_probs_T": torch.zeros(1)}, r"sampled_log_probs_T .*\(3,\) and \(1,\)"),
        (3, {"estimator": "k4"}, "'k4'; .*k1, k2, k3, low_var_kl"),
    ],
)
def test_columns_of_different_shape_and_an_unknown_estimator_are_refused(base, more, names):
    with pytest.raises(ValueError, match=names):
        approximate_kl(torch.zeros(3), base_log_probs_T=torch.zeros(base), **more)


# --- Weighed by the importance ratio ----------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_the_weight_multiplies_the_estimate(estimator):
    log_probs_T, base_T = torch.tensor([HALF, QUARTER]), torch.tensor([QUARTER, HALF])
    plain_T = approximate_kl(log_probs_T, base_log_probs_T=base_T, estimator=estimator)
    sampled_T = log_probs_T - torch.tensor([2.0, 0.5]).log()
    found_T = approximate_kl(log_probs_T, base_log_probs_T=base_T, estimator=estimator, sampled_log_probs_T=sampled_T)
    assert found_T.tolist() == pytest.approx((plain_T * torch.tensor([2.0, 0.5])).tolist())


def gradients(estimator, *, sampled_V, weighed):
    """The mean of the estimate's gradient over tokens of ``sampled_V``, and the gradient of the divergence."""
    logits_V = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    base_V = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    actor_V = logits_V.log_softmax(0)
    sampler_V = actor_V.detach() if sampled_V is None else sampled_V.log()
    estimates_V = approximate_kl(
        actor_V, base_log_probs_T=base_V, estimator=estimator, sampled_log_probs_T=sampler_V if weighed else None
    )
    (found_V,) = torch.autograd.grad((sampler_V.exp() * estimates_V).sum(), logits_V, retain_graph=True)
    (wanted_V,) = torch.autograd.grad((actor_V.exp() * (actor_V - base_V)).sum(), logits_V)
    return found_V, wanted_V


OTHER = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("estimator", ["k1", "k3", "low_var_kl"])
@pytest.mark.parametrize("sampled_V", [None, OTHER], ids=["on-policy", "off-policy"])
def test_the_mean_gradient_of_a_weighed_estimate_is_that_of_the_divergence(estimator, sampled_V):
    # Every token of the distribution, so the mean is exact: DeepSeek-V3.2 (2512.02556), equation 7.
    found_V, wanted_V = gradients(estimator, sampled_V=sampled_V, weighed=True)
    assert found_V.tolist() == pytest.approx(wanted_V.tolist(), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k3", "low_var_kl"])
def test_the_gradient_of_weighed_k3_is_the_weight_times_the_difference(estimator):
    # d/dx of exp(x - s) (exp(b - x) - 1 + x - b) is exp(x - s) (x - b): by hand from DeepSeek-V3.2 (2512.02556), eq. 7.
    log_probs_T = torch.tensor([-20.1, -19.0, -18.0, -0.5], requires_grad=True)
    sampled_T = torch.tensor([0.0, 0.0, 0.0, -0.5])
    weights = [math.exp(-20.1), math.exp(-19.0), math.exp(-18.0), 1.0]
    found_T = approximate_kl(
        log_probs_T, base_log_probs_T=torch.zeros(4), sampled_log_probs_T=sampled_T, estimator=estimator
    )
    (gradient_T,) = torch.autograd.grad(found_T.sum(), log_probs_T)
    expected = [weight * d for weight, d in zip(weights, [-20.1, -19.0, -18.0, -0.5], strict=True)]
    assert gradient_T.tolist() == pytest.approx(expected, rel=1e-5)


def test_low_var_kl_is_held_after_it_was_weighed():
    log_probs_T = torch.tensor([-1.0, -9.0], requires_grad=True)
    # k3 of 0.718 weighed by e^4: beyond 10. k3 of 2972 weighed by e^-7: 2.71, though it alone is beyond 10.
    found_T = approximate_kl(
        log_probs_T,
        base_log_probs_T=torch.tensor([0.0, -1.0]),
        estimator="low_var_kl",
        sampled_log_probs_T=torch.tensor([-5.0, -2.0]),
    )
    found_T.sum().backward()
    assert found_T.tolist() == pytest.approx([10, (math.exp(8) - 9) * math.exp(-7)], rel=1e-5)
    assert log_probs_T.grad[0] == 0 != log_probs_T.grad[1]


def test_a_token_that_was_all_but_impossible_has_a_finite_weight():
    found = approximate_kl(
        torch.zeros(1),
        base_log_probs_T=torch.tensor([-1.0]),
        estimator="k1",
        sampled_log_probs_T=torch.tensor([-1000.0]),
    )
    assert found.tolist() == pytest.approx([math.exp(20)])


def test_the_gradient_of_weighed_k3_keeps_its_sign_where_the_sampler_was_the_actor():
    log_probs_T = torch.tensor([-20.1, -25.0], requires_grad=True)
    found_T = approximate_kl(
        log_probs_T, base_log_probs_T=torch.zeros(2), sampled_log_probs_T=log_probs_T.detach(), estimator="k3"
    )
    (gradient_T,) = torch.autograd.grad(found_T.sum(), log_probs_T)
    assert gradient_T.tolist() == pytest.approx([-20.1, -25.0], rel=1e-6)
