"""A response that is there gets its reward, or its sample has failed with a cause; an evaluation counts it as wrong."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from numbers import Real
from typing import Any

from slime_core.config.schema import RolloutConfig
from slime_core.generation.outcome import UNANSWERED, is_finished
from slime_core.rollout.component_router import RoutedComponent
from slime_core.types import RewardFailure, Sample, Status

__all__ = ["RewardDispatcher"]

ACCEPTED = "accepted is a finite number or a dict of them with --reward-key"

LARGEST = sys.float_info.max
"""Of a whole number beyond it, math.isfinite raises."""


class RewardDispatcher:
    """Asks reward models, and counts what has no reward.

    Arguments:
        rollout: says which of several rewards trains, where a row does not.
    """

    def __init__(self, rollout: RolloutConfig) -> None:
        self._key = rollout.reward_key
        self._failures: Counter[str] = Counter()

    async def score(
        self, reward_model: RoutedComponent, samples: list[Sample], *, evaluation: bool = False
    ) -> list[Sample]:
        """The samples; those without a reward are scored, and one that the generate function has given stays.

        Raises:
            RunError: a reward model that runs here returned too few or too many rewards.
            PluginError: the processes of reward models cannot load the plugins.
        """
        scorable = [sample for sample in samples if is_finished(sample)]
        missing = [sample for sample in scorable if sample.reward is None]
        given = [(sample, sample.reward) for sample in scorable if sample.reward is not None]
        answers = await reward_model.component.score(missing) if missing else []
        for sample, answer in zip(missing, answers, strict=True):
            self._settle(sample, answer, f"reward model {reward_model.name!r} returned", evaluation=evaluation)
        for sample, own in given:
            self._settle(sample, own, "the generate function gave the reward", evaluation=evaluation)
        return samples

    def unanswered(self, samples: Sequence[Sample]) -> None:
        """Count samples of an evaluation that no engine has answered as wrong, under the cause ``engine``."""
        for sample in samples:
            self._failures[UNANSWERED] += 1
            self._count_as_wrong(sample)

    def take_failures(self) -> dict[str, float]:
        """Cause -> samples that have no reward of their own, since this was last asked."""
        taken, self._failures = self._failures, Counter()
        return {cause: float(count) for cause, count in taken.items()}

    def _settle(self, sample: Sample, answer: Any, whence: str, *, evaluation: bool) -> None:
        reward = float(answer) if isinstance(answer, Real) and not isinstance(answer, int | float) else answer
        if not _is_usable(reward, sample.reward_key(self._key)):
            own = f" (its row names {sample.reward_key()})" if sample.reward_key() else ""
            reward = RewardFailure("invalid", f"{whence} {answer!r:.200}; {ACCEPTED}{own}")
        if isinstance(reward, RewardFailure):
            self._fail(sample, reward, evaluation=evaluation)
        else:
            sample.reward = reward

    def _fail(self, sample: Sample, failure: RewardFailure, *, evaluation: bool) -> None:
        """A response that nobody could score is not trained on; an evaluation counts it as wrong."""
        self._failures[failure.cause] += 1
        sample.error, sample.failure_cause = failure.error, f"reward_{failure.cause}"
        if evaluation:
            self._count_as_wrong(sample)
        else:
            sample.status, sample.reward = Status.FAILED, None

    def _count_as_wrong(self, sample: Sample) -> None:
        key = sample.reward_key(self._key)
        sample.reward = 0.0 if key is None else {key: 0.0}


def _is_usable(answer: Any, key: str | None) -> bool:
    if isinstance(answer, dict):
        answer = answer.get(key or "")
    return isinstance(answer, RewardFailure) or (isinstance(answer, int | float) and abs(answer) <= LARGEST)
