from __future__ import annotations

import pytest
import torch

from slime_core import LossSettings, LossTerms, RunView
from slime_core.builtin.losses import Clipped, NegativeLogLikelihood


def terms(log_probs, old, advantages, mask, **settings):
    columns = [torch.tensor(column, dtype=torch.float32) for column in (log_probs, old, advantages, mask)]
    columns[0].requires_grad_()
    return LossTerms(*columns, settings=LossSettings(**settings))


def test_clipped_by_hand():
    log_two = torch.tensor(2.0).log().item()
    given = terms([log_two, 0.0, -log_two], [0, 0, 0], [1, 1, -1], [1, 1, 1], eps_clip=0.2, eps_clip_high=0.3)
    found = Clipped(None, RunView())(given)
    assert found.loss_T.tolist() == pytest.approx([-1.3, -1.0, 0.8])
    assert found.metrics_T["clip_fraction"].tolist() == [1, 0, 1]
    assert found.metrics_T["ratio"].tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert found.metrics_T["ppo_kl"].tolist() == pytest.approx([-log_two, 0.0, log_two])


@pytest.mark.parametrize("loss", [Clipped(None, RunView()), NegativeLogLikelihood(None, RunView())])
def test_a_masked_token_gives_exactly_zero_and_no_gradient_even_where_it_is_infinite(loss):
    given = terms([-1.0, -float("inf"), 300.0], [-1.0, 0.0, 0.0], [1.0, 1.0, float("nan")], [1, 0, 0])
    found = loss(given)
    assert found.loss_T[1:].tolist() == [0.0, 0.0]
    found.loss_T.sum().backward()
    assert given.log_probs_T.grad.tolist() == [-1.0, 0.0, 0.0]


def test_metrics_carry_no_gradient():
    found = Clipped(None, RunView())(terms([-1.0, -2.0], [-1.5, -2.0], [1, -1], [1, 1]))
    assert found.loss_T.requires_grad
    assert not any(column_T.requires_grad for column_T in found.metrics_T.values())


def test_sft_is_minus_the_log_probability_whatever_the_advantage():
    assert NegativeLogLikelihood(None, RunView())(terms([-1.5, -2.0], [0, 0], [9, -9], [1, 1])).loss_T.tolist() == [
        1.5,
        2.0,
    ]


def test_a_dual_clip_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"eps_clip_c is 0\.5"):
        Clipped(None, RunView())(terms([0.0], [0.0], [1.0], [1], eps_clip_c=0.5))
