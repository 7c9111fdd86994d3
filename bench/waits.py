"""A plugin for ``bench.async_step``: reward and training wait without using a core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from slime_core import PluginOptions, Registration, Sample, hookimpl


class WaitOptions(PluginOptions):
    """Waiting times."""

    reward_s: float = 0.0
    """Seconds that a reward waits, as for a tool or a judge elsewhere; all samples wait at the same time."""
    train_s: float = 0.0
    """Seconds that an optimizer step waits, as for devices that compute."""


@hookimpl
def slime_register(add: Registration) -> None:
    """Add the options and the reward of ``--rm-type late``."""
    add.options(WaitOptions)
    add.reward_model("late", late, isolated=False)  # in the sampler, whose event loop many rewards can wait in


@hookimpl
def slime_before_train_step(options: WaitOptions) -> None:
    """Wait before the optimizer step."""
    time.sleep(options.train_s)


async def late(samples: Sequence[Sample], options: WaitOptions) -> list[float]:
    """Return 1.0 for each response that is its label, else 0.0, after a wait."""
    await asyncio.sleep(options.reward_s)
    return [float(sample.response.strip() == sample.label) for sample in samples]
