"""The suite of sample transforms: they keep, drop, mask or reshape samples, add none, and count those left out."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st

from slime_core import Transformed
from slime_core.types import PromptGroup, Sample, Status
from slime_testing.harness import Kind
from slime_testing.suite import ComponentSuite, given, require

__all__ = ["SampleTransformSuite"]

KEPT = ("tokens", "response_length", "rollout_log_probs", "weight_versions", "group_index", "index")
"""Fields that a transform must not change: the engine's output and the numbers of samples."""


@st.composite
def groups(draw: Any) -> list[PromptGroup]:
    """Generate one to three finished, rewarded prompt groups; some samples are truncated, some partly masked."""
    examples: list[PromptGroup] = []
    for number in range(draw(st.integers(1, 3))):
        rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0]), min_size=1, max_size=4))
        examples.append([_sample(draw, number, position, reward) for position, reward in enumerate(rewards)])
    return examples


class SampleTransformSuite(ComponentSuite):
    """For sample transforms."""

    kind: ClassVar[Kind] = Kind.SAMPLE_TRANSFORM

    @given(groups=groups())
    def test_every_group_has_one_answer(self, groups: list[PromptGroup]) -> None:
        answers = self._transformed(copy.deepcopy(groups))
        kinds = [type(answer).__name__ for answer in answers]
        require(
            len(answers) == len(groups) and all(isinstance(answer, Transformed) for answer in answers),
            f"{len(groups)} groups were answered with {kinds}; one Transformed a group is wanted, in order",
        )

    @given(groups=groups())
    def test_no_sample_is_invented_or_handed_on_twice(self, groups: list[PromptGroup]) -> None:
        for group, answer in zip(groups, self._transformed(copy.deepcopy(groups)), strict=True):
            before, after = [_name(sample) for sample in group], [_name(sample) for sample in answer.samples]
            require(len(set(after)) == len(after), f"a sample is handed on twice: (group, index) are {after}")
            new = [name for name in after if name not in before]
            require(not new, f"samples {new} (group, index) were not in the group, which held {before}")

    @given(groups=groups())
    def test_a_sample_that_is_left_out_is_counted(self, groups: list[PromptGroup]) -> None:
        for group, answer in zip(groups, self._transformed(copy.deepcopy(groups)), strict=True):
            missing = len(group) - len(answer.samples)
            counted = sum(answer.changed.values())
            require(
                answer.dropped is not None or missing <= counted,
                f"{missing} of {len(group)} samples are gone, and changed={dict(answer.changed)} counts {counted}: "
                "samples are lost without a reason. Count them: changed={'REASON': NUMBER}.",
            )

    @given(groups=groups())
    def test_rewards_stay_finite_and_masks_stay_masks(self, groups: list[PromptGroup]) -> None:
        for sample in self._samples(groups):
            reward = sample.reward_value()
            require(math.isfinite(reward), f"sample {_name(sample)} left with the reward {reward}")
            mask = [1] * sample.response_length if sample.loss_mask is None else list(sample.loss_mask)
            require(
                len(mask) == sample.response_length and set(mask) <= {0, 1},
                f"sample {_name(sample)} has {sample.response_length} response tokens and the loss mask {mask}; one 0 "
                "or 1 per response token is wanted",
            )

    @given(groups=groups())
    def test_what_the_engine_sampled_is_not_changed(self, groups: list[PromptGroup]) -> None:
        before = {_name(sample): sample for group in groups for sample in group}
        for sample in self._samples(groups):
            old = before.get(_name(sample), sample)
            changed = [name for name in KEPT if getattr(old, name) != getattr(sample, name)]
            require(
                not changed,
                f"sample {_name(sample)} left with other {', '.join(changed)}; a transform may set reward, loss_mask "
                "and remove_sample",
            )

    @given(groups=groups())
    def test_reasons_are_words_and_counts_are_numbers(self, groups: list[PromptGroup]) -> None:
        for group, answer in zip(groups, self._transformed(copy.deepcopy(groups)), strict=True):
            dropped, changed = answer.dropped, answer.changed
            named = dropped is None or (isinstance(dropped, str) and bool(dropped.strip()))
            require(named, f"dropped is {dropped!r}; a reason in words is wanted, or None")
            counted = isinstance(changed, Mapping) and all(
                isinstance(reason, str) and reason and 0 <= number <= len(group) for reason, number in changed.items()
            )
            require(counted, f"changed is {changed!r}; a number of samples by reason is wanted")

    def _transformed(self, groups: list[PromptGroup]) -> Any:
        transform = self.make()
        if self.traits().scope == "rollout":
            return transform(groups)
        return [transform(group) for group in groups]

    def _samples(self, groups: list[PromptGroup]) -> list[Sample]:
        answers = self._transformed(copy.deepcopy(groups))
        return [sample for answer in answers if answer.dropped is None for sample in answer.samples]


def _sample(draw: Any, group: int, position: int, reward: float) -> Sample:
    length = draw(st.integers(1, 6))
    return Sample(
        group_index=group,
        index=group * 10 + position,
        prompt="6 * 7 =",
        tokens=[3, 4, *range(5, 5 + length)],
        response="42",
        response_length=length,
        label="42",
        reward=reward,
        loss_mask=draw(st.sampled_from([None, [0] + [1] * (length - 1)])),
        status=draw(st.sampled_from([Status.COMPLETED, Status.COMPLETED, Status.TRUNCATED])),
        weight_versions=["3"],
        rollout_log_probs=[-0.5] * length,
    )


def _name(sample: Sample) -> tuple[int | None, int | None]:
    return sample.group_index, sample.index
