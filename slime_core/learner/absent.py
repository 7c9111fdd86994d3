"""The learner of a run that goes with one half alone, as the loop calls it."""

from __future__ import annotations

from slime_core.checkpoint.folder import RunState
from slime_core.learner.actor import LearnerHandle
from slime_core.runtime.actors import Ref
from slime_core.types import TrainBatch

__all__ = ["AbsentLearner", "UnpublishedLearner"]


class AbsentLearner:
    """Stands where no learner is started: engines keep the weights that they started with, and nothing is saved."""

    def train(self, shards: list[Ref[TrainBatch]]) -> dict[str, float]:
        """Nobody takes the shards; no metric of training."""
        return {}

    def publish(self, version: int) -> None:
        """The engines hold the start weights already."""

    def save(self, state: RunState) -> None:
        """There are no weights that a checkpoint could hold."""

    def close(self) -> None:
        """Nothing was started."""


class UnpublishedLearner(LearnerHandle):
    """All ranks, where no engine is started: they train and save as always."""

    def publish(self, version: int) -> None:
        """There is no engine to take the weights. The ranks are not told, so parity is never due."""
