"""A plugin for ``bench.async_step``: reward and training wait without using a core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from slime_core import Component, PluginOptions, RewardTraits, RunView, hookimpl
from slime_core.types import Sample


class WaitOptions(PluginOptions):
    """Waiting times."""

    reward_s: float = 0.0
    """Seconds that a reward waits, as for a tool or a judge elsewhere; all samples wait at the same time."""
    train_s: float = 0.0
    """Seconds that an optimizer step waits, as for devices that compute."""


@hookimpl
def slime_options() -> type[WaitOptions]:
    """Return the class of the options."""
    return WaitOptions


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    """Register one component, for ``--rm-type late``."""
    traits = RewardTraits(isolated=False)  # in the sampler, whose event loop many rewards can wait in
    yield Component("late", target=f"{__name__}:Late", traits=traits, summary="1 where the response is the label, late")


@hookimpl
def slime_before_train_step(options: WaitOptions) -> None:
    """Wait before the optimizer step."""
    time.sleep(options.train_s)


class Late:
    """Reward 1.0 if the response is the label, after a wait."""

    def __init__(self, options: WaitOptions, run: RunView) -> None:
        del run
        self._seconds = options.reward_s

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        await asyncio.sleep(self._seconds)
        return [float(sample.response.strip() == sample.label) for sample in samples]
