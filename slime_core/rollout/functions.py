"""Where functions that a run names by path take part in a rollout, besides the components that they stand in for.

The adapters are those of slime-compat; what they are called with and what they return is said here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.generation import GenerateContext
from slime_core.plugins.contracts import DataSource, GroupedRewards
from slime_core.types import PromptGroup, Sample, Status

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["AsRewarded", "EvalData", "Made", "NoFunctions", "RolloutFunctions", "eval_columns", "rollout_functions"]

TARGET = "slime_compat.rollout:PathFunctions"

EvalData = Mapping[str, Mapping[str, Any]]
"""Name of an evaluation set -> its columns: ``rewards``, ``truncated``, ``samples``, each a list."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a function made of a rollout; ``metrics`` are its own."""

    groups: list[PromptGroup]
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutFunctions(Protocol):
    """The functions of a run; where one was not given, its method leaves things as they are."""

    @property
    def shapes_rewards(self) -> bool:
        """Whether :meth:`trained` returns samples whose rewards are advantages as they are."""
        ...

    async def rollout(self, number: int, source: DataSource) -> Made | None:
        """All groups of a rollout, in place of the sampler's; None: the sampler makes them."""
        ...

    async def evaluation(self, number: int, source: DataSource | None) -> dict[str, float] | None:
        """Metrics of an evaluation, in place of the sampler's; None: the sampler evaluates."""
        ...

    async def generated(self, samples: list[Sample], context: GenerateContext) -> list[Sample]:
        """Samples as they were generated, before they are rewarded."""
        ...

    def finished(self, groups: list[PromptGroup], source: DataSource) -> None:
        """Every group of a rollout, those that are not trained on too."""
        ...

    def trained(self, samples: list[Sample]) -> list[Sample] | None:
        """What is trained instead of ``samples``; None: those."""
        ...

    def log(self, number: int, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool:
        """Whether the core shall not log ``metrics``, to which the function may add."""
        ...

    def log_evaluation(self, number: int, data: EvalData, metrics: dict[str, float]) -> bool:
        """The same for an evaluation."""
        ...


class NoFunctions:
    """A run that names no function."""

    shapes_rewards = False

    async def rollout(self, number: int, source: DataSource) -> Made | None:
        """The sampler makes them."""
        return None

    async def evaluation(self, number: int, source: DataSource | None) -> dict[str, float] | None:
        """The sampler evaluates."""
        return None

    async def generated(self, samples: list[Sample], context: GenerateContext) -> list[Sample]:
        """The samples, as they are."""
        return samples

    def finished(self, groups: list[PromptGroup], source: DataSource) -> None:
        """Nobody looks."""

    def trained(self, samples: list[Sample]) -> list[Sample] | None:
        """The samples themselves."""
        return None

    def log(self, number: int, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool:
        """The core logs."""
        return False

    def log_evaluation(self, number: int, data: EvalData, metrics: dict[str, float]) -> bool:
        """The core logs."""
        return False


class AsRewarded:
    """The advantage estimator of rewards that a function of the run has shaped: as in slime, they are advantages."""

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """The rewards, float32 [B]."""
        return batch.rewards_B


def rollout_functions(
    options: Any, *, router_url: str, model_urls: Mapping[str, str] | None = None
) -> RolloutFunctions:
    """The functions that ``options`` of plugin ``compat`` carry; None: there are none.

    Raises:
        PluginError: one cannot be imported or called.
    """
    if options is None:
        return NoFunctions()
    module, _, name = TARGET.partition(":")
    made: RolloutFunctions = getattr(importlib.import_module(module), name)(
        options, router_url=router_url, model_urls=model_urls or {}
    )
    return made


def eval_columns(samples: Sequence[Sample], *, key: str | None) -> dict[str, list[Any]]:
    """The columns of an evaluation set whose samples are rewarded."""
    return {
        "rewards": [sample.reward_value(key) for sample in samples],
        "truncated": [sample.status is Status.TRUNCATED for sample in samples],
        "samples": list(samples),
    }
