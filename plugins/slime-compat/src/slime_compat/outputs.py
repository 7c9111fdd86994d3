"""slime's records of function results, under slime's names."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.types import Sample

__all__ = ["DynamicFilterOutput", "RolloutFnEvalOutput", "RolloutFnTrainOutput", "check_reward_nonzero_std"]


@dataclass
class RolloutFnTrainOutput:
    """Result of a rollout function: groups of samples, and metrics by name."""

    samples: list[list[Sample]]
    metrics: Mapping[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Result of an evaluation function: columns by the name of the set, and metrics by name."""

    data: dict[str, dict[str, Any]]
    metrics: Mapping[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """Result of a dynamic sampling filter: whether a group is trained, and the reason if not."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ; the reason of a dropped group is ``zero_std`` with its reward."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    if statistics.pstdev(rewards) > 1e-6:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(rewards[0], 1)}")
