"""A plugin that pauses a run at a stage, so that a fault can be injected there, and that damages answers on request.

While ``hold-STAGE`` is in the folder that ``ENDS_FOLDER`` names, a process that reaches the stage touches ``at-STAGE``
and waits, at most ``LONGEST_S`` seconds: a reward of the training prompts (``generating``), a reward of an evaluation
(``evaluating``), a learner rank before an optimizer step (``training``). Each reward also sends its prompt to the
retriever at ``CHAOS_RETRIEVER``, if there is one.

Each file ``garbage-WHAT-N`` there damages one answer: the sampler reads noise instead of an engine's response
(``engine``) or a reward process instead of the retriever's (``retriever``), or a reward is NaN (``reward``). Each file
``cut-WHAT-N`` aborts the connection of one request to an engine or the retriever before its answer is read.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.base_protocol import BaseProtocol

from slime_core import Registration, Sample, hookimpl
from slime_core.services import Service

LONGEST_S = 25.0
LOOK_S = 0.02
PATHS = {"/generate": "engine", "/retrieve": "retriever"}
NOISE = b"\xff\x00{not JSON"
RETRIEVER = "CHAOS_RETRIEVER"


def takes(what: str) -> bool:
    """Whether there is a file of that name, which this call removes."""
    for path in Path(os.environ["ENDS_FOLDER"]).glob(f"{what}-*"):
        try:
            path.unlink()
        except FileNotFoundError:  # another process was faster
            continue
        return True
    return False


def noise() -> aiohttp.StreamReader:
    """The body of an answer that is none."""
    loop = asyncio.get_running_loop()
    body = aiohttp.StreamReader(BaseProtocol(loop), limit=2**16, loop=loop)
    body.feed_data(NOISE)
    body.feed_eof()
    return body


class Damaged(aiohttp.ClientResponse):
    """An answer whose body may be noise, or whose connection may end before it comes."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Wait for the answer's head."""
        what = PATHS.get(self.url.path)
        if what is not None and takes(f"cut-{what}"):
            connection.transport.abort()
        found = await super().start(connection)
        if what is not None and takes(f"garbage-{what}"):
            self.content = noise()
        return found


if "ENDS_FOLDER" in os.environ:
    _init = aiohttp.ClientSession.__init__

    def _damaged(session: aiohttp.ClientSession, *args: Any, **kwargs: Any) -> None:
        _init(session, *args, **{"response_class": Damaged, **kwargs})

    aiohttp.ClientSession.__init__ = _damaged  # type: ignore[assignment, method-assign]


def looks(stage: str) -> Iterator[None]:
    """Yields once per check while ``hold-STAGE`` exists."""
    folder, ends_s = Path(os.environ["ENDS_FOLDER"]), time.monotonic() + LONGEST_S
    while (folder / f"hold-{stage}").exists() and time.monotonic() < ends_s:
        (folder / f"at-{stage}").touch()
        yield


class Held:
    """1.0 if the response equals the label, else 0.0; waits until ``hold-STAGE`` is removed."""

    stage = "generating"

    def __init__(self) -> None:
        url = os.environ.get(RETRIEVER)
        self._retriever = None if url is None else Service(url, timeout_s=25.0, max_in_flight=8)

    async def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward a sample, in order."""
        for _ in looks(self.stage):
            await asyncio.sleep(LOOK_S)
        if self._retriever is not None:
            await self._retriever.ask({"queries": [sample.prompt for sample in samples], "topk": 1})
        noise = takes("garbage-reward")
        return [float("nan") if noise else float(sample.response.strip() == sample.label) for sample in samples]


class HeldEvaluating(Held):
    """The same for an evaluation."""

    stage = "evaluating"


@hookimpl
def slime_register(add: Registration) -> None:
    add.reward_model("held", Held)
    add.reward_model("held_evaluating", HeldEvaluating)


@hookimpl
def slime_before_train_step() -> None:
    for _ in looks("training"):
        time.sleep(LOOK_S)
