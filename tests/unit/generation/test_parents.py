"""Whose samples a fan-out's are, however its function numbers them; and that a group's reward sees them all."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from slime_core.config.sampling import RolloutConfig
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.generation.context import Parents
from slime_core.rollout.group_generator import GroupGenerator, mark_missing_failed
from slime_core.rollout.routing import RoutedComponent
from slime_core.types import Sample, Status

TURNS = 3
NUMBERINGS = {
    "the parent's": lambda parent, turn: parent,
    "none": lambda parent, turn: None,
    "from 0": lambda parent, turn: turn,
    "numbers of their own": lambda parent, turn: 1000 + 10 * parent + turn,
}


class Only:
    def __init__(self, component: Any, *, takes_groups: bool) -> None:
        self._chosen = RoutedComponent("mine", component, takes_groups)

    def of(self, sample: Sample) -> RoutedComponent:
        return self._chosen


class Group:
    """A reward that says what it saw."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int | None, int | None]]] = []

    async def score(self, samples: list[Sample]) -> list[float]:
        self.seen.append([(sample.index, sample.rollout_id) for sample in samples])
        return [float(place) for place in range(len(samples))]


def turns(sample: Sample, numbered: Any, *, in_place: bool) -> list[Sample]:
    """Three siblings of one generation; the first is the sample itself where that is changed in place."""
    parent = sample.index
    others = [replace(sample, metadata=dict(sample.metadata)) for _ in range(TURNS - 1)]
    made = [sample if in_place else copy.deepcopy(sample), *others]
    for turn, one in enumerate(made):
        one.index, one.rollout_id, one.status = numbered(parent, turn), 100 + parent, Status.COMPLETED
    return made


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("takes_groups", [False, True])
@pytest.mark.parametrize("numbering", NUMBERINGS)
async def test_a_fan_out_is_whole_before_a_reward_of_groups_and_nothing_of_it_is_missing(
    numbering, takes_groups, in_place
):
    async def one(context: Any, sample: Sample, sampling: Any) -> list[Sample]:
        return turns(sample, NUMBERINGS[numbering], in_place=in_place)

    async def several(context: Any, samples: list[Sample], sampling: Any) -> list[Sample]:
        return [made for sample in samples for made in turns(sample, NUMBERINGS[numbering], in_place=in_place)]

    reward, nothing = Group(), None
    generator: Any = Only(several if takes_groups else one, takes_groups=takes_groups)
    rewards: Any = Only(reward, takes_groups=True)
    group = [Sample(group_index=3, index=index) for index in (4, 5)]
    given = list(group)
    context = GenerateContext(nothing, nothing)  # type: ignore[arg-type]
    made = await GroupGenerator(generator, rewards, rollout=RolloutConfig()).collect(context, group, SamplingParams())
    wanted = [(4, 104)] * TURNS + [(5, 105)] * TURNS
    assert reward.seen == [wanted]
    assert [(sample.index, sample.rollout_id) for sample in made] == wanted
    assert [sample.reward for sample in made] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert mark_missing_failed(given, made) == []


def test_a_sample_that_was_left_out_is_still_reported_missing():
    parents = [Sample(group_index=3, index=index) for index in (4, 5, 6)]
    samples = [Sample(index=6), Sample(index=4), Sample(index=4)]
    Parents.of(parents).adopt(samples)
    assert [sample.index for sample in samples] == [6, 4, 4]
    assert [sample.index for sample in mark_missing_failed(parents, samples)] == [5]
