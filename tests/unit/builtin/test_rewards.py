from __future__ import annotations

import pytest

from slime_core import RunView, Sample
from slime_core.builtin.rollout import ExactMatch, NoReward, Random
from slime_core.errors import DataError


async def coins(count: int, *, seed: int = 0) -> list[float]:
    samples = [Sample(group_index=number // 4, index=number) for number in range(count)]
    return await Random(RunView(seed=seed)).score(samples)


async def test_exact_match_ignores_white_space_around_and_nothing_else() -> None:
    samples = [Sample(response=response, label=" 4 ") for response in ("4", " 4\n", "four", "4.", "")]
    assert await ExactMatch().score(samples) == [1.0, 1.0, 0.0, 0.0, 0.0]


async def test_exact_match_without_a_label_names_the_sample_and_the_flag() -> None:
    with pytest.raises(DataError, match=r"sample 7 of group 2 .*\n.*--label-key"):
        await ExactMatch().score([Sample(group_index=2, index=7, response="4")])


async def test_the_coin_of_a_sample_does_not_depend_on_who_is_scored_with_it() -> None:
    together = await coins(16)
    alone = [await Random(RunView(seed=0)).score([Sample(group_index=n // 4, index=n)]) for n in reversed(range(16))]
    assert [[coin] for coin in together] == alone[::-1]
    assert together == [0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1]  # printf 0/0/0 | sha256sum, and so on


async def test_the_coin_is_fair_and_another_seed_is_another_coin() -> None:
    first, second = await coins(4000), await coins(4000, seed=1)
    assert set(first) == {0.0, 1.0}
    assert abs(sum(first) / 4000 - 0.5) < 0.03
    assert 0.45 < sum(a == b for a, b in zip(first, second, strict=True)) / 4000 < 0.55


async def test_the_reward_zero_is_zero_for_every_sample() -> None:
    assert await NoReward().score([Sample(response="4", label="4"), Sample()]) == [0.0, 0.0]
