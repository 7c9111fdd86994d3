"""A plugin that makes generating and training take time without work: for `bench/overlap.py`.

Groups share one engine that is busy with each for `seconds_a_group`, one after the other; then the real engine answers,
at once. An optimizer step takes `seconds_a_step` more. Nothing of that needs a core, so that what two halves of a step
cost beside each other can be measured on a machine of two.
"""

from __future__ import annotations

import asyncio
import time

from pydantic import BaseModel, ConfigDict, Field

from slime_core import Component, GenerateTraits, hookimpl
from slime_core.rollout.generate import SingleTurn


class Options(BaseModel):
    """How long each half takes."""

    model_config = ConfigDict(frozen=True)

    seconds_a_group: float = Field(0.25, description="What the engine is busy with one prompt group, in seconds.")
    seconds_a_step: float = Field(2.0, description="What an optimizer step takes longer, in seconds.")


class Slow(SingleTurn):
    """Waits for the engine that all groups share, then asks the real one."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._seconds, self._engine = options.seconds_a_group, asyncio.Lock()

    async def __call__(self, context, samples, sampling):  # type: ignore[no-untyped-def]
        """The same samples, finished."""
        async with self._engine:
            await asyncio.sleep(self._seconds)
        return await super().__call__(context, samples, sampling)


@hookimpl
def slime_options():  # type: ignore[no-untyped-def]
    """The options of this file."""
    return Options()


@hookimpl
def slime_register_generate_functions():  # type: ignore[no-untyped-def]
    """The generate function ``slow``."""
    yield Component("slow", target=f"{__name__}:Slow", traits=GenerateTraits(scope="group"), summary="Waits, then asks")


@hookimpl
def slime_before_train_step(step, options):  # type: ignore[no-untyped-def]
    """Take longer."""
    del step
    time.sleep(options.seconds_a_step)
