from __future__ import annotations

import pytest

from slime_core import RunView, Sample
from slime_core.builtin.rollout import ExactMatch, Random
from slime_core.errors import DataError


def samples(count):
    return [Sample(group_index=number // 4, index=number) for number in range(count)]


async def test_exact_match_ignores_white_space_around_and_nothing_else():
    responses = ["4", " 4\n", "four", "4.", ""]
    found = await ExactMatch(None, RunView()).score([Sample(response=response, label=" 4 ") for response in responses])
    assert found == [1.0, 1.0, 0.0, 0.0, 0.0]


async def test_exact_match_without_a_label_names_the_sample_and_the_flag():
    with pytest.raises(DataError, match=r"sample 7 of group 2 .*\n.*--label-key"):
        await ExactMatch(None, RunView()).score([Sample(group_index=2, index=7, response="4")])


async def test_the_coin_of_a_sample_does_not_depend_on_who_is_scored_with_it():
    together = await Random(None, RunView(seed=0)).score(samples(16))
    alone = [(await Random(None, RunView(seed=0)).score([sample]))[0] for sample in reversed(samples(16))]
    assert together == alone[::-1]
    assert together == [0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1]  # printf 0/0/0 | sha256sum, and so on


async def test_the_coin_is_fair_and_another_seed_is_another_coin():
    first, second = (
        await Random(None, RunView(seed=0)).score(samples(4000)),
        await Random(None, RunView(seed=1)).score(samples(4000)),
    )
    assert set(first) == {0.0, 1.0}
    assert abs(sum(first) / 4000 - 0.5) < 0.03
    assert 0.45 < sum(a == b for a, b in zip(first, second, strict=True)) / 4000 < 0.55
