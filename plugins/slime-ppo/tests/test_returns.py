from __future__ import annotations

import pytest
import torch

from slime_ppo.returns import discounted_returns, generalized_advantages


def test_two_samples_by_hand():
    # 1 + 0.5 * (2 + 0.5 * 4) = 3; 2 + 0.5 * 4 = 4; 4 | 8 + 0.5 * -2 = 7; -2
    rewards_T, samples_T = torch.tensor([1.0, 2, 4, 8, -2]), torch.tensor([0, 0, 0, 3, 3])
    found = discounted_returns(rewards_T, samples_T=samples_T, gamma=0.5)
    assert found.tolist() == [3, 4, 4, 7, -2]
    assert rewards_T.tolist() == [1, 2, 4, 8, -2]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_long_samples_are_those_of_a_loop(gamma):
    torch.manual_seed(0)
    lengths = [1, 37, 64, 5]
    rewards_T = torch.randn(sum(lengths), dtype=torch.float64)
    samples_T = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    expected = []
    for part in rewards_T.split(lengths):
        running, backwards = 0.0, []
        for reward in reversed(part.tolist()):
            running = reward + gamma * running
            backwards.append(running)
        expected += reversed(backwards)
    assert discounted_returns(rewards_T, samples_T=samples_T, gamma=gamma).tolist() == pytest.approx(expected)


def test_a_sample_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    rewards_T = torch.randn(9, dtype=torch.float64)
    alone = discounted_returns(rewards_T, samples_T=torch.zeros(9, dtype=torch.int64), gamma=0.9)
    among = torch.cat([torch.full((5,), 1e9), rewards_T, torch.full((3,), -1e9)])
    samples_T = torch.tensor([0] * 5 + [1] * 9 + [2] * 3)
    assert torch.equal(discounted_returns(among, samples_T=samples_T, gamma=0.9)[5:14], alone)


def test_no_tokens_give_no_returns():
    empty = torch.zeros(0)
    assert discounted_returns(empty, samples_T=torch.zeros(0, dtype=torch.int64), gamma=1.0).shape == (0,)


def test_bad_input_is_refused():
    one, index = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="between 0 and 1"):
        discounted_returns(one, samples_T=index, gamma=1.5)
    with pytest.raises(ValueError, match=r"found \(2,\) and \(1,\)"):
        discounted_returns(torch.ones(2), samples_T=index, gamma=1.0)


# --- Generalised advantage estimation ---------------------------------------------------------------------------------


def in_a_loop(rewards: list[float], values: list[float], gamma: float, lambd: float) -> list[float]:
    """Schulman et al. 2015 (1506.02438), equation 16, from the last token backwards."""
    advantage, following, found = 0.0, 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lambd * advantage
        following = value
        found.append(advantage)
    return found[::-1]


def test_advantages_of_two_samples_by_hand():
    # gamma 0.5, lambd 0.5. First sample: deltas 0 + 0.5 * 4 - 2 = 0; 1 - 4 = -3; A = 0 + 0.25 * -3, -3.
    # Second sample: 3 - 1 = 2; the value of 4 belongs to its neighbour.
    rewards_T, values_T = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([2.0, 4.0, 1.0])
    samples_T = torch.tensor([0, 0, 5])
    found = generalized_advantages(rewards_T, values_T=values_T, samples_T=samples_T, gamma=0.5, lambd=0.5)
    assert found.advantages_T.tolist() == [-0.75, -3, 2]
    assert found.returns_T.tolist() == [1.25, 1, 3]
    assert values_T.tolist() == [2, 4, 1]


@pytest.mark.parametrize(("gamma", "lambd"), [(0.9, 0.95), (1.0, 0.5), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_advantages_of_long_samples_are_those_of_a_loop(gamma, lambd):
    torch.manual_seed(1)
    lengths = [1, 37, 64, 5]
    rewards_T, values_T = torch.randn(2, sum(lengths), dtype=torch.float64)
    samples_T = torch.arange(4).repeat_interleave(torch.tensor(lengths))
    expected = []
    for part, values in zip(rewards_T.split(lengths), values_T.split(lengths), strict=True):
        expected += in_a_loop(part.tolist(), values.tolist(), gamma, lambd)
    found = generalized_advantages(rewards_T, values_T=values_T, samples_T=samples_T, gamma=gamma, lambd=lambd)
    assert found.advantages_T.tolist() == pytest.approx(expected)
    assert torch.equal(found.returns_T, found.advantages_T + values_T)


def test_with_lambda_1_the_returns_are_the_rewards_to_go_whatever_the_values():
    torch.manual_seed(2)
    rewards_T, values_T = torch.randn(2, 20, dtype=torch.float64)
    samples_T = torch.tensor([0] * 8 + [1] * 12)
    found = generalized_advantages(rewards_T, values_T=values_T, samples_T=samples_T, gamma=0.9, lambd=1.0)
    expected = discounted_returns(rewards_T, samples_T=samples_T, gamma=0.9)
    torch.testing.assert_close(found.returns_T, expected)


def test_permuted_samples_have_permuted_advantages():
    torch.manual_seed(3)
    rewards_T, values_T = torch.randn(2, 12)
    samples_T = torch.tensor([0] * 5 + [1] * 3 + [2] * 4)
    order = torch.tensor([*range(8, 12), *range(5), *range(5, 8)])
    straight = generalized_advantages(rewards_T, values_T=values_T, samples_T=samples_T, gamma=0.9, lambd=0.8)
    moved = generalized_advantages(
        rewards_T[order], values_T=values_T[order], samples_T=samples_T[order], gamma=0.9, lambd=0.8
    )
    assert torch.equal(moved.advantages_T, straight.advantages_T[order])


def test_bad_input_of_advantages_is_refused():
    one, index = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(1,\), \(2,\) and \(1,\)"):
        generalized_advantages(one, values_T=torch.ones(2), samples_T=index, gamma=1.0, lambd=1.0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        generalized_advantages(one, values_T=one, samples_T=index, gamma=1.0, lambd=-0.1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        generalized_advantages(one, values_T=one, samples_T=index, gamma=1.5, lambd=0.5)
