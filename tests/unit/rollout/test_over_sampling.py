"""More prompts are begun than a rollout takes: what finishes besides is kept, what does not is ended and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slime_core import RunView
from slime_core.errors import RunError
from slime_core.plugins.contracts import PromptRequest
from slime_core.prompts.prompts import PromptFiles
from slime_core.rollout import group_scheduler as module
from slime_core.rollout.async_policy import AsyncPolicy
from slime_core.rollout.group_scheduler import GroupScheduler
from slime_core.rollout.prompt_ledger import PendingGroups, PromptLedger
from slime_core.rollout.requeue_buffer import RequeueBuffer
from slime_core.track.samples import SampleWriter
from slime_core.types import LogProbs, PromptGroup, Status, TokenIds


class Engines:
    """Finishes the groups that it is told to; when requests end, the others are aborted with two tokens."""

    def __init__(self, *finishing: int) -> None:
        self.finishing = set(finishing)
        self.begun: list[int | None] = []
        self.deaf = False
        self._end = asyncio.Event()

    async def make(self, rollout: int, group: PromptGroup) -> PromptGroup:
        self.begun.append(group[0].group_index)
        if group[0].group_index not in self.finishing:
            await self._end.wait()
            return [self._ended(sample) for sample in group]
        for sample in group:
            sample.status, sample.response_length, sample.reward = Status.COMPLETED, 1, 1.0
        return group

    def _ended(self, sample):
        sample.status, sample.response_length = Status.ABORTED, 2
        sample.tokens, sample.rollout_log_probs = TokenIds([1, 2, 3]), LogProbs([-0.5, -0.5])
        return sample

    @asynccontextmanager
    async def ended(self) -> AsyncIterator[None]:
        if not self.deaf:
            self._end.set()
        yield
        self._end.clear()


@pytest.fixture
def start(tmp_path: Path):
    """Makes a production of groups of one sample, two a rollout, four begun at once, and what it works with."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n')

    def make(
        engines: Engines, *, holds: bool = True, **pace: int
    ) -> tuple[GroupScheduler, RequeueBuffer, PromptLedger]:
        ledger = PromptLedger(tmp_path)
        supply = RequeueBuffer(PromptFiles(None, RunView(prompts=PromptRequest(path))), ledger.journal, holds=holds)
        found = AsyncPolicy(2, **{"fetch": 4, **pace})
        return (
            GroupScheduler(supply, prepare=lambda *_: None, make=engines.make, pace=found, ends=engines.ended),
            supply,
            ledger,
        )

    return make


def numbers(groups: list[PromptGroup]) -> list[int | None]:
    return [group[0].group_index for group in groups]


async def test_what_finishes_besides_waits_for_the_next_rollout(start):
    engines = Engines(0, 2, 3)
    production, supply, _ = start(engines)
    assert numbers(await production.take(0, 2)) == [0, 2]
    await production.settle()
    assert engines.begun == [0, 1, 2, 3]
    assert (production.present(), supply.held) == (PendingGroups(held={3: [3]}), {1: [1]})


async def test_the_next_rollout_takes_what_waits_and_goes_on_with_what_was_ended(start):
    engines = Engines(0, 2, 3)
    production, supply, _ = start(engines)
    await production.take(0, 2)
    await production.settle()
    engines.finishing |= {1, 4, 5}
    assert numbers(await production.take(1, 2)) == [3, 1]
    await production.settle()
    # Three more were begun beside the one that waited: four in all.
    assert engines.begun == [0, 1, 2, 3, 1, 4, 5]
    assert (production.present().held, supply.held) == ({4: [4], 5: [5]}, {})


async def test_where_enough_waits_nothing_is_begun(start):
    engines = Engines(0, 1, 2, 3)
    production, _, _ = start(engines)
    assert numbers(await production.take(0, 2)) == [0, 1]
    assert numbers(await production.take(1, 2)) == [2, 3]
    assert engines.begun == [0, 1, 2, 3]


async def test_without_partial_rollouts_what_was_ended_goes_back_to_the_source(start):
    production, supply, _ledger = start(Engines(0, 2, 3), holds=False)
    await production.take(0, 2)
    await production.settle()
    assert supply.held == {}
    assert supply.state()["returned"] == [1]
    assert production.present() == PendingGroups(held={3: [3]})


async def test_what_does_not_end_is_cancelled_and_goes_back_as_it_was_given(start, monkeypatch):
    monkeypatch.setattr(module, "END_LIMIT_S", 0.01)
    engines = Engines(0, 2, 3)
    engines.deaf = True
    production, supply, _ = start(engines)
    await production.take(0, 2)
    await production.settle()
    assert (supply.held, supply.state()["returned"]) == ({}, [1])
    assert production.present() == PendingGroups(held={3: [3]})
    await production.close()


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.ABORTED])
async def test_what_finishes_although_it_was_cancelled_is_in_one_place(start, monkeypatch, status):
    monkeypatch.setattr(module, "END_LIMIT_S", 0.01)

    class Stubborn(Engines):
        async def make(self, rollout: int, group: PromptGroup) -> PromptGroup:
            try:
                return await super().make(rollout, group)
            except asyncio.CancelledError:
                group = [self._ended(sample) for sample in group]
                group[0].status = status
                return group

    engines = Stubborn(0, 2, 3)
    engines.deaf = True
    production, supply, _ = start(engines)
    await production.take(0, 2)
    await production.settle()
    held = {3: [3]} if status is Status.ABORTED else {1: [1], 3: [3]}
    assert production.present() == PendingGroups(held=held)
    assert supply.held == ({1: [1]} if status is Status.ABORTED else {})
    assert supply.state().get("returned", []) == []
    engines.finishing |= {1, 4, 5}
    assert numbers(await production.take(1, 2)) == ([3, 1] if status is Status.ABORTED else [1, 3])
    await production.close()


async def test_what_runs_ahead_is_not_ended(start):
    production, supply, _ = start(Engines(0, 2, 3), ahead=1)
    await production.take(0, 2)
    await production.settle()
    assert 1 in production.present().in_flight
    assert (supply.held, supply.state()["returned"]) == ({}, [])
    await production.close()


async def test_everything_is_accounted_for_through_a_checkpoint_and_back(start, tmp_path):
    engines = Engines(0, 2, 3)
    production, supply, ledger = start(engines)

    def present() -> PendingGroups:
        found = production.present()
        return PendingGroups(found.in_flight, {**found.held, **supply.held})

    groups = await production.take(0, 2)
    await production.settle()
    SampleWriter(tmp_path).write("train", 0, [one for group in groups for one in group])
    metrics = ledger.close(0, present())
    assert metrics.pop("perf/ledger_time") > 0
    assert {name.removeprefix("ledger/"): value for name, value in metrics.items() if value} == {
        "taken": 4.0,
        "trained": 2.0,
        "held": 2.0,
    }
    kept = {"ledger": ledger.state(present()), **production.state()}
    await production.take(1, 1)
    # The process dies here: the group that was taken is in no file, and the next one comes from the checkpoint.
    engines.finishing |= {1, 4, 5, 6}
    production, supply, ledger = start(engines)
    ledger.restore(kept["ledger"])
    production.restore(kept)
    groups = await production.take(1, 2)
    assert numbers(groups) == [3, 1]
    await production.settle()
    SampleWriter(tmp_path).write("train", 1, [one for group in groups for one in group])
    metrics = ledger.close(1, present())
    assert (metrics["ledger/taken"], metrics["ledger/trained"], metrics["ledger/held"]) == (6.0, 4.0, 2.0)


async def test_a_group_that_the_sampler_lost_ends_the_run(start, tmp_path):
    production, _supply, ledger = start(Engines(0, 1, 2, 3))
    groups = await production.take(0, 2)
    SampleWriter(tmp_path).write("train", 0, groups[0])
    with pytest.raises(RunError, match=r"does not balance: groups 1 handed out and nowhere"):
        ledger.close(0, production.present())
