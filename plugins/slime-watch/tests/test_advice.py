"""Warnings about metrics that say a run will not learn."""

from __future__ import annotations

import re

import pytest

from slime_watch.advice import Advice, SlowRank

SAME = {"rollout/raw_reward": 0.5, "rollout/zero_std_groups": 1.0, "train/grad_norm": 0.0}


def warnings(*rows: dict[str, float]) -> list[list[str]]:
    """Return the warnings of each row."""
    advice, messages = Advice(), []
    for step, row in enumerate(rows):
        num_before = len(advice.messages)
        advice.log(step, row)
        messages.append(advice.messages[num_before:])
    return messages


def test_a_gradient_of_zero_is_explained_at_once_and_once() -> None:
    first, second, third = warnings({"train/grad_norm": 1.0}, SAME, {**SAME, "rollout/zero_std_groups": 0.0})
    assert (first, third) == ([], [])
    (message,) = second
    assert "samples/train-000001.jsonl" in message


@pytest.mark.parametrize(
    ("metric", "good", "bad", "names"),
    [
        ("rollout/truncated_ratio", 0.5, 0.75, "75% .* cut "),
        ("rollout/zero_std_groups", 0.9, 1.0, "100% .*groups"),
        ("rollout/raw_reward", 0.1, 0.0, "reward"),
        ("train/kl_loss", 1.0, 2.5, " 2.5 nats .*reference"),
        ("train/ppo_kl", -0.2, -0.5, " -0.5 nats "),
        ("rollout/staleness/requeued", 0.0, 7.0, "--max-staleness .*again, 7 in rollout 2"),
        ("rollout/staleness/evicted", 0.0, 7.0, "--max-staleness .*dropped, 7 in rollout 2"),
        ("train/token_imbalance", 1.5, 3.0, "rank .* 3.0 "),
    ],
)
def test_a_sign_counts_when_it_held_for_three_rows(metric: str, good: float, bad: float, names: str) -> None:
    none, good_row, bad_row = {"train/loss": 1.0}, {metric: good}, {metric: bad}
    assert not any(warnings(bad_row, bad_row, none))
    assert not any(warnings(*[good_row] * 6))
    assert not any(warnings(bad_row, bad_row, good_row, bad_row, bad_row))
    (found,) = [row for row in warnings(*[bad_row] * 7) if row]
    assert re.search(names, found[0])


def test_entropy_is_compared_with_that_of_the_first_row() -> None:
    found = warnings(*({"train/entropy_loss": value} for value in (2.0, 0.05, 0.03, 0.02, 0.01)))
    assert [bool(row) for row in found] == [False] * 4 + [True]
    assert " 2 to 0.01 nats" in found[-1][0]


def slow_row(rank: int = 2, ratio: float = 2.0, lost_s: float = 10.0) -> dict[str, float]:
    return {
        "perf/slowest_rank": rank,
        "perf/slowest_rank_ratio": ratio,
        "perf/slowest_rank_lost_time": lost_s,
    }


SLOW, FINE = slow_row(), slow_row(ratio=1.0, lost_s=0.0)


@pytest.mark.parametrize(
    ("rows", "warned"),
    [
        ([SLOW] * 7, [2]),
        ([slow_row(1), slow_row(2)] * 4, []),  # it has to be the same rank
        ([SLOW, SLOW, FINE, SLOW, SLOW, SLOW], [5]),
        ([slow_row(ratio=1.5)] * 4, []),
        ([slow_row(lost_s=1.0)] * 4, []),
        ([{"train/loss": 1.0}] * 4, []),
    ],
)
def test_a_rank_that_is_slow_three_times_in_a_row_is_named_once(
    rows: list[dict[str, float]], warned: list[int]
) -> None:
    slow_rank = SlowRank()
    messages = [slow_rank.warning(row) for row in rows]
    assert [number for number, message in enumerate(messages) if message is not None] == warned
    assert all("rank 2 " in message for message in messages if message is not None)
