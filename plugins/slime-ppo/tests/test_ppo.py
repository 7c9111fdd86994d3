"""``ppo`` against generalised advantage estimation (1506.02438, equation 16) over trained tokens."""

from __future__ import annotations

import math

import pytest
import torch

from slime_core import AdvantageSettings, ResponseTokens, RunView, TokenAdvantages
from slime_ppo.ppo import GeneralizedAdvantage


class Unused:
    """Nothing of ppo is taken over ranks."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("ppo called a reduction")


def estimate(rewards, responses, values, *, masks=None, kl=None, gamma=1.0, lambd=1.0, kl_coef=0.0) -> TokenAdvantages:
    """Responses of these lengths; ``kl`` is the divergence at each token."""
    lengths_B = torch.tensor(responses, dtype=torch.int64)
    count = int(lengths_B.sum())
    columns = {} if kl is None else {"log_probs_U": torch.tensor(kl) - 1, "ref_log_probs_U": torch.full((count,), -1.0)}
    batch = ResponseTokens(
        lengths_B=lengths_B,
        samples_U=torch.arange(len(lengths_B)).repeat_interleave(lengths_B),
        mask_U=torch.ones(count) if masks is None else torch.tensor(masks, dtype=torch.float32),
        rewards_B=torch.tensor(rewards, dtype=torch.float32),
        values_U=None if values is None else torch.tensor(values),
        settings=AdvantageSettings(gamma=gamma, lambd=lambd, kl_coef=kl_coef),
        **columns,
    )
    return GeneralizedAdvantage(None, RunView()).estimate(batch, Unused())


def test_the_reward_stands_at_the_last_token():
    # deltas: 0.5 * 1 - 2 = -1.5; 4 - 1 = 3; A = -1.5 + 0.5 * 0.5 * 3. Second response: 2 - 0.5.
    found = estimate([4.0, 2.0], [2, 1], [2.0, 1.0, 0.5], gamma=0.5, lambd=0.5)
    assert found.advantages_U.tolist() == pytest.approx([-0.75, 3, 1.5])
    assert found.returns_U.tolist() == pytest.approx([1.25, 4, 2])
    assert found.metrics_U == {}


def test_the_divergence_is_taken_off_each_reward():
    # rewards -0.1 * 1, -0.1 * 2 + 1; values 0.5: deltas -0.1 + 0.5 - 0.5, 0.8 - 0.5
    found = estimate([1.0], [2], [0.5, 0.5], kl=[1.0, 2.0], kl_coef=0.1)
    assert found.advantages_U.tolist() == pytest.approx([-0.1 + 0.3, 0.3])
    assert found.returns_U.tolist() == pytest.approx([0.7, 0.8])
    assert found.metrics_U["kl"].tolist() == pytest.approx([1, 2])


def test_masked_tokens_are_no_steps():
    # slime's estimation reads the values of masked tokens too. Here the answers of a tool leave no trace.
    with_tool = estimate([1.0], [5], [0.2, math.nan, 9.0, 0.6, math.inf], masks=[1, 0, 0, 1, 0], gamma=0.9, lambd=0.8)
    without = estimate([1.0], [2], [0.2, 0.6], gamma=0.9, lambd=0.8)
    assert with_tool.advantages_U[[0, 3]].tolist() == without.advantages_U.tolist()
    assert with_tool.returns_U[[0, 3]].tolist() == without.returns_U.tolist()
    assert with_tool.advantages_U[[1, 2, 4]].tolist() == [0, 0, 0]


def test_a_response_without_a_trained_token_takes_no_part():
    whole = estimate([3.0, 100.0, 0.0, 7.0], [2, 2, 1, 0], [0.1, 0.2, 5.0, 6.0, 0.3], masks=[1, 1, 0, 0, 1], lambd=0.5)
    alone = estimate([3.0, 0.0], [2, 1], [0.1, 0.2, 0.3], lambd=0.5)
    assert whole.advantages_U[[0, 1, 4]].tolist() == alone.advantages_U.tolist()
    assert estimate([], [], []).advantages_U.shape == (0,)


def test_a_perfect_critic_leaves_no_advantage():
    found = estimate([1.0, 0.0], [3, 2], [1.0, 1.0, 1.0, 0.0, 0.0], lambd=0.9)
    assert found.advantages_U.tolist() == [0] * 5


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="needs values_U"):
        estimate([1.0], [2], None)
    with pytest.raises(ValueError, match="log_probs_U and ref_log_probs_U"):
        estimate([1.0], [2], [0.0, 0.0], kl_coef=0.1)
