from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.ops.packing import balance, pack, pack_by_count, row_budget, split_steps

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(st.integers(1, 60), st.integers(1, 60))
def test_steps_hold_every_sample_in_order_and_differ_by_at_most_one(count, num_steps):
    if count < num_steps:
        with pytest.raises(ValueError, match=f"{count} rollouts cannot fill {num_steps} optimizer steps"):
            split_steps(range(count), num_steps)
        return
    steps = split_steps(range(count), num_steps)
    sizes = [len(step) for step in steps]
    assert [sample for step in steps for sample in step] == list(range(count))
    assert len(steps) == num_steps
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("samples", "lengths", "ranks"),
    [
        # 9 -> rank 0; 7 -> rank 1; 5 -> rank 1 (12); 4 -> rank 0 (13); 2 -> rank 1 (14).
        (range(5), [4, 9, 5, 2, 7], [[0, 1], [2, 3, 4]]),
        # 3 -> rank 0, 3 -> rank 1, 2 -> 0, 2 -> 1, 2 -> 0: 7 and 5; the first 3 for the second 2: 6 and 6.
        (range(5), [3, 3, 2, 2, 2], [[2, 3, 4], [0, 1]]),
        ([3, 1], [100, 8, 100, 2], [[1], [3]]),  # lengths by number, not by place
        (range(4), [0, 0, 0, 0], [[0, 2], [1, 3]]),
    ],
)
def test_balance_by_hand(samples, lengths, ranks):
    assert balance(samples, lengths, 2) == ranks


@given(LENGTHS, st.integers(2, 8))
def test_no_exchange_of_two_samples_would_even_the_heaviest_and_the_lightest_rank_out(lengths, num_ranks):
    ranks = balance(range(len(lengths)), lengths, num_ranks)
    loads = [sum(lengths[i] for i in rank) for rank in ranks]
    heavy, light = (ranks[loads.index(load)] for load in (max(loads), min(loads)))
    moves = {lengths[i] - other for i in heavy for other in [0, *(lengths[j] for j in light)]}
    assert not any(0 < moved < max(loads) - min(loads) for moved in moves)


@given(LENGTHS, st.integers(1, 8))
def test_balance_gives_every_sample_to_one_rank_and_leaves_none_idle(lengths, num_ranks):
    ranks = balance(range(len(lengths)), lengths, num_ranks)
    assert len(ranks) == num_ranks
    assert sorted(sample for rank in ranks for sample in rank) == list(range(len(lengths)))
    assert sum(bool(rank) for rank in ranks) == min(num_ranks, len(lengths))
    assert all(rank == sorted(rank) for rank in ranks)


def test_pack_by_hand_is_first_fit_over_decreasing_length():
    assert pack(range(6), [4, 8, 1, 4, 2, 1], max_tokens=10) == [[1, 4], [0, 2, 3, 5]]


@given(LENGTHS, st.integers(1, 60))
def test_pack_drops_nothing_and_only_a_lone_sample_exceeds_the_budget(lengths, max_tokens):
    bins = pack(range(len(lengths)), lengths, max_tokens)
    assert sorted(sample for members in bins for sample in members) == list(range(len(lengths)))
    assert all(bins)
    assert all(len(members) == 1 or sum(lengths[i] for i in members) <= max_tokens for members in bins)


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_a_budget_of_nothing_is_refused(max_tokens):
    with pytest.raises(ValueError, match=f"micro-batch of {max_tokens} tokens.*--max-tokens-per-gpu"):
        pack([0], [1], max_tokens)


def test_pack_by_count_by_hand_spreads_the_longest():
    # Two bins of at most 2: 9 and 8 open them; 5 goes to the lighter, which is full then; 1 is left to the other.
    assert pack_by_count(range(4), [8, 9, 1, 5], 2) == [[1, 2], [0, 3]]
    assert pack_by_count(range(4), [50, 1, 1, 1], 2) == [[0, 3], [1, 2]]


@given(LENGTHS, st.integers(1, 50))
def test_pack_by_count_makes_as_few_micro_batches_as_there_can_be(lengths, size):
    bins = pack_by_count(range(len(lengths)), lengths, size)
    assert sorted(sample for members in bins for sample in members) == list(range(len(lengths)))
    assert len(bins) == -(-len(lengths) // size)
    assert all(1 <= len(members) <= size for members in bins)


def test_a_row_is_never_padded_above_its_budget():
    assert row_budget(10, context=2, multiple=8) == 16
    assert row_budget(10, context=2, multiple=1) == 20
    assert row_budget(3, context=1, multiple=8) == 3
