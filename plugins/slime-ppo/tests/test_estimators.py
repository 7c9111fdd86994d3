"""Each estimator by hand; slime_testing's suites show that order, ranks, padding and masked values change nothing."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from slime_core import AdvantageSettings, GroupedRewards, ResponseTokens, TokenAdvantages
from slime_ppo.advantage import reinforce_plus_plus_baseline
from slime_ppo.ppo import ppo
from slime_ppo.reinforce_plus_plus import reinforce_plus_plus


class OneRank:
    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


def estimate(
    estimator, rewards, responses, *, values=None, masks=None, kl=None, gamma=1.0, lambd=1.0, kl_coef=0.0
) -> TokenAdvantages:
    """Estimate for responses of these lengths; ``kl`` is the divergence at each token."""
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
    return estimator(batch, OneRank())


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match="values_U"):
        estimate(ppo, [1.0], [2])
    for estimator in (ppo, reinforce_plus_plus):
        with pytest.raises(ValueError, match="ref_log_probs_U"):
            estimate(estimator, [1.0], [2], values=[0.0, 0.0], kl_coef=0.1)


# --- ppo: generalised advantage estimation (1506.02438, equation 16) over trained tokens ------------------------------

gae = partial(estimate, ppo)


def test_the_reward_of_ppo_is_at_the_last_token() -> None:
    # deltas: 0.5 * 1 - 2 = -1.5; 4 - 1 = 3; A = -1.5 + 0.5 * 0.5 * 3. Second response: 2 - 0.5.
    output = gae([4.0, 2.0], [2, 1], values=[2.0, 1.0, 0.5], gamma=0.5, lambd=0.5)
    assert output.advantages_U.tolist() == pytest.approx([-0.75, 3, 1.5])
    assert output.returns_U.tolist() == pytest.approx([1.25, 4, 2])
    assert output.metrics_U == {}


def test_ppo_subtracts_the_divergence_from_each_reward() -> None:
    # rewards -0.1 * 1, -0.1 * 2 + 1; values 0.5: deltas -0.1 + 0.5 - 0.5, 0.8 - 0.5
    output = gae([1.0], [2], values=[0.5, 0.5], kl=[1.0, 2.0], kl_coef=0.1)
    assert output.advantages_U.tolist() == pytest.approx([-0.1 + 0.3, 0.3])
    assert output.returns_U.tolist() == pytest.approx([0.7, 0.8])
    assert output.metrics_U["kl"].tolist() == pytest.approx([1, 2])


def test_masked_tokens_are_no_steps_of_ppo() -> None:
    # slime's estimation reads the values of masked tokens too. Here the output of a tool leaves no trace.
    values = [0.2, math.nan, 9.0, 0.6, math.inf]
    with_tool = gae([1.0], [5], values=values, masks=[1, 0, 0, 1, 0], gamma=0.9, lambd=0.8)
    without = gae([1.0], [2], values=[0.2, 0.6], gamma=0.9, lambd=0.8)
    assert with_tool.advantages_U[[0, 3]].tolist() == without.advantages_U.tolist()
    assert with_tool.returns_U[[0, 3]].tolist() == without.returns_U.tolist()
    assert with_tool.advantages_U[[1, 2, 4]].tolist() == [0, 0, 0]


def test_a_perfect_critic_leaves_no_advantage() -> None:
    output = gae([1.0, 0.0], [3, 2], values=[1.0, 1.0, 1.0, 0.0, 0.0], lambd=0.9)
    assert output.advantages_U.tolist() == [0] * 5


@pytest.mark.parametrize("estimator", [ppo, reinforce_plus_plus])
def test_a_response_without_a_trained_token_takes_no_part(estimator) -> None:
    # slime asserts that there is none; removed samples are such responses.
    values, lambd = [0.1, 0.2, 5.0, 6.0, 0.3], 0.5
    all_four = estimate(
        estimator, [3.0, 100.0, 0.0, 7.0], [2, 2, 1, 0], values=values, masks=[1, 1, 0, 0, 1], lambd=lambd
    )
    alone = estimate(estimator, [3.0, 0.0], [2, 1], values=[0.1, 0.2, 0.3], lambd=lambd)
    assert all_four.advantages_U[[0, 1, 4]].tolist() == alone.advantages_U.tolist()
    assert estimate(estimator, [], [], values=[]).advantages_U.shape == (0,)


# --- reinforce_plus_plus (2501.03262) ---------------------------------------------------------------------------------

returns = partial(estimate, reinforce_plus_plus)


def test_returns_of_reinforce_plus_plus_by_hand() -> None:
    # A_t = r - beta * sum of KL from t on, with beta 0.1; the second response: one token.
    output = returns([1.0, -1.0], [3, 1], kl=[1.0, 2.0, -1.0, 4.0], kl_coef=0.1)
    assert output.metrics_U["returns"].tolist() == pytest.approx([1 - 0.2, 1 - 0.1, 1 + 0.1, -1 - 0.4])
    assert output.metrics_U["kl"].tolist() == pytest.approx([1, 2, -1, 4])


def test_advantages_of_reinforce_plus_plus_are_its_whitened_returns() -> None:
    # returns 3, 3, 0: mean 2, variance 2
    output = returns([3.0, 0.0], [2, 1])
    assert output.advantages_U.tolist() == pytest.approx([1 / math.sqrt(2), 1 / math.sqrt(2), -math.sqrt(2)])
    assert output.advantages_U.dtype == torch.float32
    assert "kl" not in output.metrics_U


def test_a_later_reward_is_discounted_by_trained_tokens() -> None:
    # The trained tokens are 0 and 2: the reward is at 2, and one discount lies between them.
    output = returns([1.0], [4], masks=[1, 0, 1, 0], kl=[0.5, math.nan, 0.25, 99.0], gamma=0.5, kl_coef=1.0)
    assert output.metrics_U["returns"].tolist() == pytest.approx([-0.5 + 0.5 * 0.75, 0, 0.75, 0])
    assert output.advantages_U[[1, 3]].tolist() == [0, 0]


def test_a_batch_without_trained_tokens_or_without_differences_is_all_zero() -> None:
    assert returns([3.0, 1.0], [1, 1], masks=[0, 0]).advantages_U.tolist() == [0, 0]
    assert returns([0.5, 0.5], [2, 3]).advantages_U.tolist() == [0] * 5


# --- reinforce_plus_plus_baseline -------------------------------------------------------------------------------------


def baseline(rewards, groups, tokens) -> np.ndarray:
    batch = GroupedRewards(np.float32(rewards), np.int64(groups), np.int64(tokens), np.int64(tokens))
    return reinforce_plus_plus_baseline(batch)


@pytest.mark.parametrize(
    ("rewards", "groups", "tokens", "expected"),
    [
        # centred [0.5, -0.5, 1.5, -1.5]: mean 0, variance 1.25
        ([1, 0, 3, 0], [4, 4, 6, 6], [1, 1, 1, 1], [value / 1.25**0.5 for value in (0.5, -0.5, 1.5, -1.5)]),
        # centred [0.5, -0.5], weights 3 and 1: mean 0.25, variance (3 * 0.0625 + 0.5625) / 4 = 0.1875
        ([1, 0], [4, 4], [3, 1], [0.25 / 0.1875**0.5, -0.75 / 0.1875**0.5]),
        # group mean 2, so 3 - 2 = 1 and 1 - 2 = -1; only the first is trained: mean 1, variance 0
        ([3, 1], [0, 0], [5, 0], [0, -2 / 1e-4]),
        ([3, 1], [0, 0], [0, 0], [0, 0]),
        ([0.1, 0.1, 7, 7], [0, 0, 1, 1], [2, 3, 4, 5], [0, 0, 0, 0]),
        ([], [], [], []),
    ],
)
def test_the_baseline_by_hand(rewards, groups, tokens, expected) -> None:
    advantages_B = baseline(rewards, groups, tokens)
    assert advantages_B.tolist() == pytest.approx(expected, rel=1e-6)
    assert advantages_B.dtype == np.float32


def test_trained_tokens_have_mean_zero_and_variance_one() -> None:
    generator = np.random.default_rng(0)
    rewards, groups, tokens = generator.normal(size=64), np.arange(64) % 8, generator.integers(0, 50, 64)
    of_tokens = [
        np.repeat(baseline(rewards, groups, tokens).astype(np.float64), tokens),
        returns(rewards.tolist(), tokens.tolist()).advantages_U.double().numpy(),
    ]
    for advantages_T in of_tokens:
        assert advantages_T.mean() == pytest.approx(0.0, abs=1e-6)
        assert advantages_T.var() == pytest.approx(1.0, abs=1e-5)


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1,\)"):
        baseline([1, 0], [0, 0], [1])
