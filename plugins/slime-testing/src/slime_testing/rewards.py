"""The suite of reward models: one reward for each finished sample, in order, independent of the other samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

from hypothesis import strategies as st

from slime_core.types import JsonValue, Sample, Status
from slime_testing.harness import Kind
from slime_testing.suite import ComponentSuite, NotTested, given, require
from slime_testing.waiting import require_cancellable, run

__all__ = ["RewardModelSuite"]

TEMPLATES = (
    "{label}",
    " {label}\n",
    "<answer>{label}</answer>",
    "\\boxed{{label}}",
    "<think>6 * 7</think> \\boxed{{label}}",
    "#### {label}",
    "Answer: {label}",
    '{"answer": "{label}"}',
    "not it",
    "",
)
"""Responses, some of which common reward models find right and some wrong."""

ODD_LABELS: tuple[JsonValue, ...] = (None, "", " ", "42", 4.5, True, ["42"], {"ground_truth": "42"}, [], {})
"""Labels that rows may have."""

LONGEST = 12
"""Limit on the examples that are permuted."""


class RewardModelSuite(ComponentSuite):
    """For reward models.

    Attributes:
        label: ground truth of the examples; override it if the reward needs labels of a certain format.
        responses: the scored responses; ``{label}`` is replaced by the label, everything else, including other braces,
            is literal. Some must be right and some wrong.
        metadata: metadata of every example.
    """

    kind: ClassVar[Kind] = Kind.REWARD_MODEL
    label: ClassVar[str] = "42"
    responses: ClassVar[Sequence[str]] = TEMPLATES
    metadata: ClassVar[dict[str, Any]] = {}

    def test_every_sample_gets_one_finite_reward(self) -> None:
        samples = self._samples()
        rewards = self._scored(samples)
        malformed = [reward for reward in rewards if not _is_reward(reward)]
        require(not malformed, f"score() returned {malformed[:3]}; a finite number or a dict of them is wanted")

    def test_every_reward_has_the_declared_numbers(self) -> None:
        declared = set(self.traits().numbers)
        malformed = [reward for reward in self._scored(self._samples()) if declared and _numbers(reward) != declared]
        require(
            not malformed,
            f"score() returned {malformed[:3]}; the reward model is added with numbers={sorted(declared)}",
        )

    def test_the_examples_get_different_rewards(self) -> None:
        rewards = self._scored(self._samples())
        if all(reward == rewards[0] for reward in rewards):
            raise NotTested(
                f"not tested: all {len(rewards)} examples get the same reward, {rewards[:1]}, so neither their order "
                f"nor what else is scored with them can show. Set label (it is {self.label!r}) and responses of the "
                "suite so that some are right and some are wrong."
            )

    @given(max_examples=15, order=st.permutations(range(LONGEST)))
    def test_rewards_come_in_the_order_of_the_samples(self, order: list[int]) -> None:
        samples = self._samples()
        samples = samples[:LONGEST]
        order = [position for position in order if position < len(samples)]
        straight = self._scored(samples)
        shuffled = self._scored([samples[position] for position in order])
        require(
            shuffled == [straight[position] for position in order],
            f"the rewards {straight} became {shuffled} when the samples came in the order {order}: they are not in the "
            "order of the samples.",
        )

    def test_a_batch_gets_the_rewards_of_its_samples_alone(self) -> None:
        if self.traits().scope != "sample":
            return
        samples = self._samples()
        together = self._scored(samples)
        alone = [self._scored([sample])[0] for sample in samples]
        require(together == alone, f"scored together the samples get {together}, one by one {alone}")

    def test_rows_are_checked(self) -> None:
        check_row = getattr(self.make(), "check_row", None)
        if check_row is None:
            return
        mistake = check_row(self.label, self.metadata)
        require(mistake is None, f"check_row() refuses label and metadata of the suite: {mistake}")
        malformed = [answer for label in ODD_LABELS if not isinstance(answer := check_row(label, {}), str | None)]
        require(not malformed, f"check_row() returned {malformed[:1]}; the text of a mistake or None is wanted")

    def test_a_perfect_response_gets_full_marks(self) -> None:
        perfect_response = getattr(self.make(), "perfect_response", None)
        if perfect_response is None:
            return
        response = perfect_response(self.label)
        (reward,) = self._scored([replace(self._samples()[0], response=response)])
        numbers = reward.values() if isinstance(reward, dict) else [reward]
        require(min(numbers) >= 1, f"the response {response!r} of perfect_response() gets {reward}; 1 is wanted")

    def test_no_samples_get_no_rewards(self) -> None:
        self._scored([])

    def test_the_samples_are_not_changed(self) -> None:
        samples = self._samples()
        before = copy.deepcopy(samples)
        self._scored(samples)
        names = [field.name for field in fields(Sample)]
        changed = [name for name in names if _column(before, name) != _column(samples, name)]
        require(not changed, f"score() changed {', '.join(changed)} of a sample; return rewards, change nothing")

    def test_it_can_be_cancelled(self) -> None:
        require_cancellable(lambda: self.make().score(self._samples()), "score()")

    def _samples(self) -> list[Sample]:
        """Return one prompt group: every response, with the same prompt and label."""
        example = Sample(
            group_index=3, prompt="6 * 7 =", label=self.label, status=Status.COMPLETED, weight_versions=["1"]
        )
        return [
            replace(
                example,
                index=index,
                response=template.replace("{label}", self.label),
                tokens=[5, 6, 7 + index],
                response_length=1,
                rollout_log_probs=[-0.5],
                metadata=copy.deepcopy(self.metadata),
            )
            for index, template in enumerate(self.responses)
        ]

    def _scored(self, samples: Sequence[Sample]) -> list[Any]:
        rewards = run(self.make().score(samples))
        require(
            isinstance(rewards, Sequence) and len(rewards) == len(samples),
            f"score() returned {rewards!r} for {len(samples)} samples; one reward per sample is wanted",
        )
        return list(rewards)


def _is_reward(reward: Any) -> bool:
    numbers = list(reward.values()) if isinstance(reward, dict) else [reward]
    return bool(numbers) and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)


def _numbers(reward: Any) -> set[str]:
    return set(reward) if isinstance(reward, dict) else set()


def _column(samples: Sequence[Sample], name: str) -> list[Any]:
    return [getattr(sample, name) for sample in samples]
