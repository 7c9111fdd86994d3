from __future__ import annotations

import math

import pytest
import torch

from slime_core.ops.kl import approximate_kl

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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
def test_equal_models_are_exactly_zero_apart(estimator):
    log_probs_T = torch.tensor([-0.1, -7.3, -30.0])
    assert approximate_kl(log_probs_T, base_log_probs_T=log_probs_T.clone(), estimator=estimator).tolist() == [0, 0, 0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_the_actors_own_tokens_is_the_exact_kl(estimator):
    actor_V, base_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    tokens_V = approximate_kl(actor_V.log(), base_log_probs_T=base_V.log(), estimator=estimator)
    exact = (actor_V * (actor_V / base_V).log()).sum()
    assert float((actor_V * tokens_V).sum()) == pytest.approx(float(exact), abs=1e-6)


def test_low_var_kl_is_k3_held_to_ten_and_passes_no_gradient_beyond():
    log_probs_T = torch.tensor([-20.0, -1.0], requires_grad=True)
    found = approximate_kl(log_probs_T, base_log_probs_T=torch.tensor([-1.0, -1.0]), estimator="low_var_kl")
    found.sum().backward()
    assert found.tolist() == [10.0, 0.0]
    assert log_probs_T.grad.tolist() == [0.0, 0.0]


def test_k3_of_nearly_equal_models_keeps_its_digits():
    found = approximate_kl(torch.tensor([1e-4], dtype=torch.float64), base_log_probs_T=torch.zeros(1).double())
    assert float(found) == pytest.approx(5e-9, rel=1e-4)


def test_permuted_tokens_give_permuted_estimates():
    left_T, right_T = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    order = torch.arange(39, -1, -1)
    whole_T = approximate_kl(left_T, base_log_probs_T=right_T)
    assert torch.equal(approximate_kl(left_T[order], base_log_probs_T=right_T[order]), whole_T[order])


def test_an_unknown_estimator_names_those_that_there_are():
    with pytest.raises(ValueError, match="no KL estimator is called 'k4'; there are k1, k2, k3, low_var_kl"):
        approximate_kl(torch.zeros(1), base_log_probs_T=torch.zeros(1), estimator="k4")


def test_columns_of_different_shape_are_refused_rather_than_broadcast():
    with pytest.raises(ValueError, match=r"must have one shape; found \(3,\) and \(1,\)"):
        approximate_kl(torch.zeros(3), base_log_probs_T=torch.zeros(1))
