from __future__ import annotations

import numpy as np
import pytest

from slime_core.ops.packing import Prompts, same_prompts


def prompts(*samples: tuple[int, int, int]) -> Prompts:
    """Samples as (group, prompt tokens, response tokens)."""
    groups, before, after = zip(*samples, strict=True)
    return Prompts([a + b for a, b in zip(before, after, strict=True)], before, groups)


def test_prompts_are_the_same_token_by_token():
    found = same_prompts([np.array([5, 14]), np.array([20]), np.array([5, 14]), np.array([5])])
    assert found == [[0, 2], [1], [3]]


def test_the_type_of_the_ids_does_not_matter():
    assert same_prompts([np.array([5, 14], np.int32), np.array([5, 14], np.int64)]) == [[0, 1]]


def test_only_the_prompt_is_compared():
    found = Prompts.of([np.array([5, 14, 1]), np.array([5, 14, 2, 3]), np.array([5, 14, 2])], [2, 2, 3])
    assert (found.lengths, found.groups) == ([3, 4, 3], [0, 0, 1])


def test_sharing_saves_every_prompt_but_one_of_a_group():
    assert prompts((0, 10, 2), (0, 10, 3), (1, 10, 5)).saved == pytest.approx(10 / 40)
    assert prompts((0, 10, 2), (1, 10, 3)).saved == 0


def test_a_prompt_counts_once_in_the_budget():
    shared = prompts(*[(0, 10, 2)] * 5)
    assert shared.plan(range(5), num_ranks=1, max_tokens=20) == [[[0, 1, 2, 3, 4]]]
    assert shared.plan(range(5), num_ranks=1, max_tokens=16) == [[[0, 1, 2], [3, 4]]]


def test_a_sample_that_cannot_fit_runs_alone():
    shared = prompts((0, 10, 30), (0, 10, 2), (0, 10, 3), (1, 30, 1), (1, 30, 1))
    assert shared.plan(range(5), num_ranks=1, max_tokens=20) == [[[0], [3], [4], [1, 2]]]


def test_groups_stay_whole_where_they_spread_evenly():
    shared = prompts(*[(group, 10, 2) for group in range(4) for _ in range(3)])
    assert shared.plan(range(12), num_ranks=2, max_tokens=100) == [[[0, 1, 2, 6, 7, 8]], [[3, 4, 5, 9, 10, 11]]]


def test_a_group_is_split_where_a_rank_would_wait_or_have_nothing():
    shared = prompts(*[(0, 4, 20)] * 4)
    assert shared.plan(range(4), num_ranks=2, max_tokens=100) == [[[0, 1]], [[2, 3]]]
    assert shared.plan(range(4), num_ranks=4, max_tokens=100) == [[[0]], [[1]], [[2]], [[3]]]


def test_a_group_stays_whole_where_its_prompt_is_most_of_it():
    shared = prompts(*[(0, 100, 1)] * 3, (1, 90, 1))
    assert shared.plan(range(4), num_ranks=2, max_tokens=200) == [[[0, 1, 2]], [[3]]]


def test_every_sample_is_placed_once_whatever_the_lengths():
    random = np.random.default_rng(0)
    for _ in range(50):
        lengths = random.integers(1, 30, 6)
        chosen = [(group, int(lengths[group]), int(random.integers(0, 30))) for group in random.integers(0, 6, 20)]
        shared, num_ranks = prompts(*chosen), int(random.integers(1, 6))
        plan = shared.plan(range(20), num_ranks=num_ranks, max_tokens=40)
        assert sorted(sample for rank in plan for micro in rank for sample in micro) == list(range(20))
        assert [bool(rank) for rank in plan] == [True] * num_ranks
        for micro in (micro for rank in plan for micro in rank if len(micro) > 1):
            groups = {shared.groups[i] for i in micro}
            assert sum(shared.tokens([i for i in micro if shared.groups[i] == group]) for group in groups) <= 40
