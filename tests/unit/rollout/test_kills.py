"""A run is killed repeatedly while it generates: after every resume each prompt group is in one place, none is lost.

What dies is the sampler's side over an engine without a model; ``campaigns/ledger.py`` kills whole runs.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.builtin.rollout import PromptFiles, SingleTurn
from slime_core.config.sampling import RolloutConfig
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.plugins.contracts import PromptRequest
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.group_generator import reset_sample
from slime_core.rollout.group_scheduler import GroupScheduler, RequeueBuffer
from slime_core.track.ledger import PendingGroups, PromptLedger, Recount
from slime_core.track.record import SampleWriter
from slime_core.types import PromptGroup, Status
from slime_testing.fake_engine import FakeEngine

ROLLOUTS, BATCH = 6, 3


class Killed(Exception):
    """The process is gone."""


class Encoder:
    def encode(self, prompt: Any, *, tools: Any = None) -> list[int]:
        return [3, 4]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))


class Life:
    """One process of the run: from its last checkpoint to the end, or to the answer at which it dies."""

    def __init__(self, folder: Path, client: Any, *, ahead: int, dies_after: int | None) -> None:
        self.folder, self.client, self.left = folder, client, dies_after
        self.ledger = PromptLedger(folder)
        request = PromptRequest(folder / "prompts.jsonl", n_samples_per_prompt=2)
        self.supply = RequeueBuffer(PromptFiles(None, RunView(prompts=request)), self.ledger.journal, holds=True)
        settings = RolloutConfig(
            rollout_batch_size=BATCH,
            async_buffer_size=ahead,
            num_rollout=ROLLOUTS,
            over_sampling_batch_size=2 * BATCH,
        )
        self.scheduler = GroupScheduler(self.supply, self, settings)

    def prepare(self, rollout: int, groups: list[PromptGroup]) -> int:
        return 0

    def abort_requests(self) -> AbstractAsyncContextManager[None]:
        aborting: AbstractAsyncContextManager[None] = self.client.aborting()
        return aborting

    async def run(self, rollout: int, group: PromptGroup) -> PromptGroup:
        for sample in group:
            if sample.status is not Status.ABORTED:
                reset_sample(sample)
        nothing: Any = Encoder()
        context = GenerateContext(self.client, nothing)
        made = await SingleTurn(None, RunView())(context, group, SamplingParams(max_new_tokens=8))
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed
        return made

    async def live(self) -> None:
        saved = self.folder / "state.json"
        first = 0
        if saved.exists():
            state = json.loads(saved.read_text())
            first = state["step"]
            self.ledger.restore(state["ledger"])
            self.scheduler.restore(state)
        for rollout in range(first, ROLLOUTS):
            self.scheduler.published(rollout)
            groups = await self.scheduler.take(rollout, BATCH)
            await self.scheduler.abort_in_flight()
            SampleWriter(self.folder).write("train", rollout, [one for group in groups for one in group])
            self.ledger.close(rollout, self.present())
            if rollout % 2:
                state = {"step": rollout + 1, "ledger": self.ledger.state(self.present()), **self.scheduler.state()}
                saved.write_text(json.dumps(state))

    def present(self) -> PendingGroups:
        found = self.scheduler.pending_groups()
        return PendingGroups(found.in_flight, {**found.held, **self.supply.held})


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("seed", range(3))
async def test_every_group_is_in_one_place_whenever_a_run_dies(tmp_path: Path, seed: int, ahead: int) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}", "label": "1"}}\n' for n in range(50)))
    dice, deaths = random.Random(seed), 0
    with FakeEngine() as engine:
        engine.partial = 2
        async with GenerateClient(engine.url, timeout_s=60) as client:
            for dies_after in [*(dice.randrange(2, 14) for _ in range(4)), None]:
                life = Life(tmp_path, client, ahead=ahead, dies_after=dies_after)
                try:
                    await life.live()
                except Killed:
                    deaths += 1
                finally:
                    await life.scheduler.close()
                    await asyncio.sleep(0)
    assert deaths
    found = Recount(tmp_path)
    found.read()
    found.check(life.present().groups)
    assert found.groups == {("trained", ""): ROLLOUTS * BATCH}
    rows = [json.loads(line) for path in tmp_path.glob("train-*.jsonl") for line in path.read_text().splitlines()]
    assert set(Counter(row["index"] for row in rows).values()) == {1}
    assert len(rows) == ROLLOUTS * BATCH * 2
