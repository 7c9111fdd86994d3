from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_core import GroupedRewards, LossSettings, LossTerms
from slime_core.builtin.losses import Clipped, NegativeLogLikelihood, NoAdvantage


def terms(log_probs, old, advantages, mask, **settings) -> LossTerms:
    columns = [torch.tensor(column, dtype=torch.float32) for column in (log_probs, old, advantages, mask)]
    columns[0].requires_grad_()
    return LossTerms(*columns, settings=LossSettings(**settings))


def test_clipped_by_hand() -> None:
    log_two = torch.tensor(2.0).log().item()
    output = Clipped()(
        terms([log_two, 0.0, -log_two], [0, 0, 0], [1, 1, -1], [1, 1, 1], eps_clip=0.2, eps_clip_high=0.3)
    )
    assert output.loss_T.tolist() == pytest.approx([-1.3, -1.0, 0.8])
    assert output.metrics_T["clip_fraction"].tolist() == [1, 0, 1]
    assert output.metrics_T["ratio"].tolist() == pytest.approx([2.0, 1.0, 0.5])
    assert output.metrics_T["ppo_kl"].tolist() == pytest.approx([-log_two, 0.0, log_two])
    assert not any(column_T.requires_grad for column_T in output.metrics_T.values())


@pytest.mark.parametrize("loss", [Clipped(), NegativeLogLikelihood()])
def test_a_masked_token_gives_exactly_zero_and_no_gradient_even_if_it_is_infinite(loss) -> None:
    batch = terms([-1.0, -float("inf"), 300.0], [-1.0, 0.0, 0.0], [1.0, 1.0, float("nan")], [1, 0, 0])
    loss_T = loss(batch).loss_T
    assert loss_T[1:].tolist() == [0.0, 0.0]
    loss_T.sum().backward()
    assert batch.log_probs_T.grad.tolist() == [-1.0, 0.0, 0.0]


def test_sft_is_minus_the_log_probability_whatever_the_advantage() -> None:
    assert NegativeLogLikelihood()(terms([-1.5, -2.0], [0, 0], [9, -9], [1, 1])).loss_T.tolist() == [1.5, 2.0]


def test_a_dual_clip_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eps_clip_c is 0\.5"):
        Clipped()(terms([0.0], [0.0], [1.0], [1], eps_clip_c=0.5))


def test_the_advantage_of_sft_is_zero_for_every_reward() -> None:
    counts_B = np.array([1, 2, 3], np.int64)
    advantages_B = NoAdvantage().estimate(GroupedRewards(np.float32([1, 0, 5]), counts_B, counts_B, counts_B))
    assert (advantages_B.tolist(), advantages_B.dtype) == ([0, 0, 0], np.float32)
