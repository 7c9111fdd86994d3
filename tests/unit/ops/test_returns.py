from __future__ import annotations

import pytest
import torch

from slime_core.ops.returns import discounted_returns


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


def test_nothing_has_no_returns():
    empty = torch.zeros(0)
    assert discounted_returns(empty, samples_T=torch.zeros(0, dtype=torch.int64), gamma=1.0).shape == (0,)


def test_bad_input_is_refused():
    one, index = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"gamma is 1\.5; a discount lies between 0 and 1"):
        discounted_returns(one, samples_T=index, gamma=1.5)
    with pytest.raises(ValueError, match=r"must have one shape; found \(2,\) and \(1,\)"):
        discounted_returns(torch.ones(2), samples_T=index, gamma=1.0)
