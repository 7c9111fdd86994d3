from __future__ import annotations

import numpy as np
import pytest

from slime_core.ops.prefixes import Prefixes


def tree(*samples: list[int], least: int = 1) -> Prefixes:
    return Prefixes.of([np.array(sample, np.int64) for sample in samples], least=least)


def groups(*samples: tuple[int, int, int]) -> Prefixes:
    """Samples as (group, prompt tokens, response tokens); nothing of two responses is the same."""
    return tree(*([group] * before + [1000 + place] * after for place, (group, before, after) in enumerate(samples)))


def test_samples_stand_in_the_order_of_their_tokens_with_what_they_have_in_common():
    found = tree([5, 14, 7, 1], [20], [5, 14, 8], [5, 14, 7, 1, 3], [5, 14, 8], [5])
    assert found.samples.tolist() == [5, 0, 3, 2, 4, 1]
    assert found.lengths.tolist() == [1, 4, 5, 3, 3, 1]
    assert found.common.tolist() == [0, 1, 4, 2, 3, 0]
    assert found.tokens == 1 + 3 + 1 + 1 + 0 + 1


def test_ids_of_any_type_are_compared_as_numbers():
    assert tree([256, 1], [255, 1], [255, 2]).samples.tolist() == [1, 2, 0]
    found = Prefixes.of([np.array([5, 14], np.int32), np.array([5, 14], np.int64)], least=1)
    assert found.common.tolist() == [0, 2]


def test_the_order_of_samples_changes_their_numbers_and_nothing_else():
    random = np.random.default_rng(0)
    samples = [random.integers(0, 3, random.integers(1, 9)).tolist() for _ in range(30)]
    found, turned = tree(*samples), tree(*samples[::-1])
    assert turned.common.tolist() == found.common.tolist()
    assert [samples[29 - i] for i in turned.samples] == [samples[i] for i in found.samples]


def test_a_part_of_the_samples_has_in_common_what_all_between_them_have():
    found = tree([1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2], [1, 2]).take([3, 0, 2])
    assert found.samples.tolist() == [0, 2, 3]
    assert found.common.tolist() == [0, 2, 1]
    assert found.take([3]).common.tolist() == [0]
    assert found.take([]).tokens == 0


# --- What is worth a node ---------------------------------------------------------------------------------------------


def test_a_node_is_shared_if_that_saves_enough():
    prompt, more = [5] * 6, [7] * 3
    samples = [[*prompt, 1], prompt + more + [2], prompt + more + [3], prompt + more + [4]]
    assert tree(*samples, least=6).common.tolist() == [0, 6, 9, 9]
    assert tree(*samples, least=7).common.tolist() == [0, 6, 6, 6]
    assert tree(*samples, least=18).common.tolist() == [0, 6, 6, 6]
    assert tree(*samples, least=19).common.tolist() == [0, 0, 0, 0]


def test_what_a_dropped_node_would_save_counts_for_the_one_before_it():
    samples = [[5] * 4 + [7, 1], [5] * 4 + [7, 2], [5] * 4 + [8]]
    assert tree(*samples, least=5).common.tolist() == [0, 4, 4]
    assert tree(*samples[1:], least=5).common.tolist() == [0, 0]


# --- Nodes ------------------------------------------------------------------------------------------------------------


def test_the_nodes_of_a_conversation_that_branches_twice():
    """1 2 3 | 4 5 | 6 and 7 8; the first turn ends a sample, and 9 leaves after 1 2 3."""
    found = tree([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7, 8], [1, 2, 3, 9], [1, 2, 3, 4, 5], [7, 7])
    assert found.samples.tolist() == [3, 0, 1, 2, 4]
    nodes = found.nodes()
    assert nodes.lengths.tolist() == [3, 2, 1, 2, 1, 2]
    assert nodes.parents.tolist() == [-1, 0, 1, 1, 0, -1]
    assert nodes.depths.tolist() == [3, 5, 6, 7, 4, 2]
    assert nodes.last.tolist() == [1, 2, 3, 4, 5]


def test_a_sample_is_the_nodes_on_its_path_whatever_the_tree():
    random = np.random.default_rng(0)
    for least in (1, 3):
        for _ in range(30):
            samples = [random.integers(0, 2, random.integers(1, 9)).tolist() for _ in range(12)]
            found = tree(*samples, least=least)
            nodes = found.nodes()
            row = [
                i for sample, common in zip(found.samples, found.common, strict=True) for i in samples[sample][common:]
            ]
            ends = np.cumsum(nodes.lengths)
            assert ends[-1] == len(row) == found.tokens
            for sample, node in zip(found.samples, nodes.last, strict=True):
                path: list[int] = []
                while node >= 0:
                    assert nodes.parents[node] < node
                    path = row[ends[node] - nodes.lengths[node] : ends[node]] + path
                    node = nodes.parents[node]
                assert path == samples[sample]


# --- The plan ---------------------------------------------------------------------------------------------------------


def test_sharing_saves_every_prompt_but_one_of_a_group():
    assert groups((0, 10, 2), (0, 10, 3), (1, 10, 5)).saved == pytest.approx(10 / 40)
    assert groups((0, 10, 2), (1, 10, 3)).saved == 0


ONE_PROMPT = [(0, 10, 2)] * 5
FOUR_GROUPS = [(group, 10, 2) for group in range(4) for _ in range(3)]


@pytest.mark.parametrize(
    ("samples", "num_ranks", "max_tokens", "plan"),
    [
        (ONE_PROMPT, 1, 20, [[[0, 1, 2, 3, 4]]]),
        (ONE_PROMPT, 1, 16, [[[0, 1, 2], [3, 4]]]),
        ([(0, 10, 30), (0, 10, 2), (0, 10, 3), (1, 30, 1), (1, 30, 1)], 1, 20, [[[0], [3], [4], [1, 2]]]),
        (FOUR_GROUPS, 2, 100, [[[0, 1, 2, 6, 7, 8]], [[3, 4, 5, 9, 10, 11]]]),
        ([(0, 4, 20)] * 4, 2, 100, [[[0, 1]], [[2, 3]]]),
        ([(0, 4, 20)] * 4, 4, 100, [[[0]], [[1]], [[2]], [[3]]]),
        ([(0, 100, 1)] * 3 + [(1, 90, 1)], 2, 200, [[[0, 1, 2]], [[3]]]),
    ],
    ids=[
        *("a prompt counts once", "two rows", "a sample that cannot fit runs alone", "groups stay whole if even"),
        *("a group is split if a rank would wait", "or have nothing", "a group is whole if its prompt is most of it"),
    ],
)
def test_a_plan_by_hand(samples, num_ranks, max_tokens, plan):
    assert groups(*samples).plan(range(len(samples)), num_ranks=num_ranks, max_tokens=max_tokens) == plan


def test_samples_that_share_most_stay_together():
    """A prompt of 10; two second turns of 10, each with two third ones of 2."""
    samples = [[0] * 10 + [second] * 10 + [third] * 2 for third in (3, 4) for second in (1, 2)]
    shared = tree(*samples)
    assert shared.plan(range(4), num_ranks=1, max_tokens=38) == [[[0, 1, 2, 3]]]
    assert shared.plan(range(4), num_ranks=1, max_tokens=37) == [[[0, 2], [1, 3]]]
    assert shared.plan(range(4), num_ranks=2, max_tokens=38) == [[[0, 2]], [[1, 3]]]


def test_a_micro_batch_has_a_token():
    with pytest.raises(ValueError, match=" 0 tokens"):
        groups((0, 1, 1)).plan([0], num_ranks=1, max_tokens=0)


def test_every_sample_is_placed_once_whatever_the_tree():
    random = np.random.default_rng(0)
    for _ in range(50):
        samples = [random.integers(0, 2, random.integers(1, 30)).tolist() for _ in range(20)]
        shared, num_ranks = tree(*samples, least=int(random.integers(1, 4))), int(random.integers(1, 6))
        plan = shared.plan(range(20), num_ranks=num_ranks, max_tokens=40)
        assert sorted(sample for rank in plan for micro in rank for sample in micro) == list(range(20))
        assert [bool(rank) for rank in plan] == [True] * num_ranks
        assert all(shared.take(micro).tokens <= 40 for rank in plan for micro in rank if len(micro) > 1)
