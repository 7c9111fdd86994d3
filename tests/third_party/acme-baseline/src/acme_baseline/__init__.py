"""An advantage estimator with an option: the reward minus a fixed baseline."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from slime_core import AdvantageTraits, Component, GroupedRewards, RunView, hookimpl


class BaselineOptions(BaseModel):
    """``--baseline.level``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: float = Field(default=0.5, description="What is taken off every reward.")


@hookimpl
def slime_register_advantage_estimators() -> Iterator[Component]:
    yield Component(
        "fixed_baseline",
        target=f"{__name__}:FixedBaseline",
        traits=AdvantageTraits(scope="sample", reads={"rewards"}, across_groups=False),
        summary="Reward minus a fixed number",
    )


@hookimpl
def slime_options() -> type[BaselineOptions]:
    return BaselineOptions


class FixedBaseline:
    """Reward minus ``level``."""

    def __init__(self, options: BaselineOptions, run: RunView) -> None:
        del run
        self._level = options.level

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Advantages, float32 [B]."""
        return (batch.rewards_B - np.float32(self._level)).astype(np.float32)
