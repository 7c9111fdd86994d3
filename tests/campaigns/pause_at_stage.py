"""A plugin that pauses a run at a stage, so that a fault can be injected there.

While ``hold-STAGE`` is in the folder that ``ENDS_FOLDER`` names, a process that reaches the stage touches ``at-STAGE``
and waits, at most ``LONGEST_S`` seconds: a reward of the training prompts (``generating``), a reward of an evaluation
(``evaluating``), a learner rank before an optimizer step (``training``).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_core import Component, RunView, hookimpl
from slime_core.types import Sample

LONGEST_S = 25.0
LOOK_S = 0.02


def looks(stage: str) -> Iterator[None]:
    """Yields once per check while ``hold-STAGE`` exists."""
    folder, ends_s = Path(os.environ["ENDS_FOLDER"]), time.monotonic() + LONGEST_S
    while (folder / f"hold-{stage}").exists() and time.monotonic() < ends_s:
        (folder / f"at-{stage}").touch()
        yield


class Held:
    """1.0 where the response equals the label, else 0.0; waits until ``hold-STAGE`` is removed."""

    stage = "generating"

    def __init__(self, options: None, run: RunView) -> None:
        del options

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """One reward a sample, in order."""
        for _ in looks(self.stage):
            await asyncio.sleep(LOOK_S)
        return [float(sample.response.strip() == sample.label) for sample in samples]


class HeldEvaluating(Held):
    """The same for an evaluation."""

    stage = "evaluating"


@hookimpl
def slime_before_train_step() -> None:
    for _ in looks("training"):
        time.sleep(LOOK_S)


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    yield Component("held", target=f"{__name__}:Held")
    yield Component("held_evaluating", target=f"{__name__}:HeldEvaluating")
