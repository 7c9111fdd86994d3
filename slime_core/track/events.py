"""Events for listeners, as frozen records.

Example: ``StepFinished(step=3, metrics={"train/loss": 0.1, "perf/step_time": 0.9})``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["EvalFinished", "Event", "Listener", "PhaseStarted", "RunFinished", "StepFinished", "Warned"]


@dataclass(frozen=True, slots=True)
class PhaseStarted:
    """``phase`` ("rollout", "train") starts; ``step`` is None outside the steps."""

    phase: str
    step: int | None


@dataclass(frozen=True, slots=True)
class StepFinished:
    """Step ``step`` has ended and its row is on disk."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvalFinished:
    """The weights of ``version`` were evaluated."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunFinished:
    """No step follows; ``seconds`` since the track was opened."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning for the user, in full sentences."""

    message: str


Event = PhaseStarted | StepFinished | EvalFinished | RunFinished | Warned
Listener = Callable[[Event], None]
