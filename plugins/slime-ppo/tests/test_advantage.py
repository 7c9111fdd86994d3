from __future__ import annotations

import numpy as np
import pytest

from slime_core import GroupedRewards, RunView
from slime_ppo.advantage import ReinforcePlusPlusBaseline


def estimate(rewards, groups, tokens):
    batch = GroupedRewards(np.float32(rewards), np.int64(groups), np.int64(tokens), np.int64(tokens))
    return ReinforcePlusPlusBaseline(None, RunView()).estimate(batch)


def test_two_groups_of_equal_lengths_by_hand():
    # centred [0.5, -0.5, 1.5, -1.5]: mean 0, variance 1.25
    found = estimate([1, 0, 3, 0], [4, 4, 6, 6], [1, 1, 1, 1])
    assert found.tolist() == pytest.approx([value / 1.25**0.5 for value in (0.5, -0.5, 1.5, -1.5)], rel=1e-6)
    assert found.dtype == np.float32


def test_a_sample_weighs_by_its_trained_tokens():
    # centred [0.5, -0.5], weights 3 and 1: mean 0.25, variance (3 * 0.0625 + 0.5625) / 4 = 0.1875
    found = estimate([1, 0], [4, 4], [3, 1])
    assert found.tolist() == pytest.approx([0.25 / 0.1875**0.5, -0.75 / 0.1875**0.5], rel=1e-6)


def test_trained_tokens_have_mean_zero_and_variance_one():
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 50, 64)
    found = np.repeat(estimate(generator.normal(size=64), np.arange(64) % 8, tokens).astype(np.float64), tokens)
    assert found.mean() == pytest.approx(0.0, abs=1e-6)
    assert found.var() == pytest.approx(1.0, abs=1e-5)


def test_permuted_samples_give_permuted_advantages():
    generator = np.random.default_rng(1)
    rewards, groups, tokens = generator.normal(size=32), generator.integers(0, 5, 32), generator.integers(0, 9, 32)
    order = generator.permutation(32)
    whole = estimate(rewards, groups, tokens)
    np.testing.assert_allclose(
        estimate(rewards[order], groups[order], tokens[order]), whole[order], rtol=1e-5, atol=1e-6
    )


def test_a_sample_without_trained_tokens_still_counts_in_its_group():
    # group mean 2, so 3 - 2 = 1 and 1 - 2 = -1; only the first is trained: mean 1, variance 0
    assert estimate([3, 1], [0, 0], [5, 0])[0] == 0.0


def test_a_batch_without_trained_tokens_or_without_differences_is_all_zero():
    assert estimate([3, 1], [0, 0], [0, 0]).tolist() == [0.0, 0.0]
    assert estimate([0.1, 0.1, 7, 7], [0, 0, 1, 1], [2, 3, 4, 5]).tolist() == [0.0, 0.0, 0.0, 0.0]
    assert estimate([], [], []).shape == (0,)


def test_columns_of_different_length_are_refused():
    with pytest.raises(ValueError, match="one number per sample"):
        estimate([1, 0], [0, 0], [1])
