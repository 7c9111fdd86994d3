"""Discounted returns and generalised advantages: by hand, and as a loop computes them."""

from __future__ import annotations

import pytest
import torch

from slime_ppo.returns import discounted_returns, generalized_advantages


def test_returns_of_two_samples_by_hand() -> None:
    # 1 + 0.5 * (2 + 0.5 * 4) = 3; 2 + 0.5 * 4 = 4; 4 | 8 + 0.5 * -2 = 7; -2
    rewards_T, samples_T = torch.tensor([1.0, 2, 4, 8, -2]), torch.tensor([0, 0, 0, 3, 3])
    assert discounted_returns(rewards_T, samples_T=samples_T, gamma=0.5).tolist() == [3, 4, 4, 7, -2]
    assert rewards_T.tolist() == [1, 2, 4, 8, -2]


def test_advantages_of_two_samples_by_hand() -> None:
    # gamma 0.5, lambd 0.5. First sample: deltas 0 + 0.5 * 4 - 2 = 0; 1 - 4 = -3; A = 0 + 0.25 * -3, -3.
    # Second sample: 3 - 1 = 2; the value of 4 belongs to its neighbour.
    rewards_T, values_T = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([2.0, 4.0, 1.0])
    samples_T = torch.tensor([0, 0, 5])
    estimates = generalized_advantages(rewards_T, values_T=values_T, samples_T=samples_T, gamma=0.5, lambd=0.5)
    assert estimates.advantages_T.tolist() == [-0.75, -3, 2]
    assert estimates.returns_T.tolist() == [1.25, 1, 3]
    assert values_T.tolist() == [2, 4, 1]


LENGTHS = [1, 37, 64, 5]


def in_a_loop(rewards: list[float], values: list[float], gamma: float, lambd: float) -> list[float]:
    """Schulman et al. 2015 (1506.02438), equation 16, from the last token backwards."""
    advantage, following, advantages = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lambd * advantage
        following = value
        advantages.append(advantage)
    return advantages[::-1]


@pytest.mark.parametrize(("gamma", "lambd"), [(0.9, 0.95), (1.0, 0.5), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_long_samples_are_those_of_a_loop(gamma: float, lambd: float) -> None:
    rewards_T, values_T = torch.randn(2, sum(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    samples_T = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))
    expected: list[float] = []
    for rewards, values in zip(rewards_T.split(LENGTHS), values_T.split(LENGTHS), strict=True):
        expected += in_a_loop(rewards.tolist(), values.tolist(), gamma, lambd)
    estimates = generalized_advantages(rewards_T, values_T=values_T, samples_T=samples_T, gamma=gamma, lambd=lambd)
    assert estimates.advantages_T.tolist() == pytest.approx(expected)
    assert torch.equal(estimates.returns_T, estimates.advantages_T + values_T)
    if lambd == 1.0:  # then the returns are the rewards to go, whatever the values
        torch.testing.assert_close(estimates.returns_T, discounted_returns(rewards_T, samples_T=samples_T, gamma=gamma))


def test_a_sample_does_not_depend_on_its_neighbours() -> None:
    rewards_T = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = discounted_returns(rewards_T, samples_T=torch.zeros(9, dtype=torch.int64), gamma=0.9)
    among = torch.cat([torch.full((5,), 1e9), rewards_T, torch.full((3,), -1e9)])
    samples_T = torch.tensor([0] * 5 + [1] * 9 + [2] * 3)
    assert torch.equal(discounted_returns(among, samples_T=samples_T, gamma=0.9)[5:14], alone)


def test_no_tokens_have_no_returns() -> None:
    samples_T = torch.zeros(0, dtype=torch.int64)
    assert discounted_returns(torch.zeros(0), samples_T=samples_T, gamma=1.0).shape == (0,)


def test_bad_input_is_refused() -> None:
    one, index = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    for gamma, lambd in ((1.5, 0.5), (1.0, -0.1)):
        with pytest.raises(ValueError, match="between 0 and 1"):
            generalized_advantages(one, values_T=one, samples_T=index, gamma=gamma, lambd=lambd)
    with pytest.raises(ValueError, match="between 0 and 1"):
        discounted_returns(one, samples_T=index, gamma=1.5)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        generalized_advantages(one, values_T=torch.ones(2), samples_T=index, gamma=1.0, lambd=1.0)
    with pytest.raises(ValueError, match=r"\(2,\)"):
        discounted_returns(torch.ones(2), samples_T=index, gamma=1.0)
