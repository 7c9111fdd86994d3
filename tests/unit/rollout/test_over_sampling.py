"""Over-sampling: finished groups in excess are kept for the next rollout, unfinished ones are aborted and requeued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.builtin.rollout import PromptFiles
from slime_core.config.sampling import RolloutConfig
from slime_core.errors import RunError
from slime_core.plugins.contracts import PromptRequest
from slime_core.rollout import group_scheduler as module
from slime_core.rollout.group_scheduler import GroupScheduler, RequeueBuffer
from slime_core.track.ledger import PendingGroups, PromptLedger
from slime_core.track.record import SampleWriter
from slime_core.types import LogProbs, PromptGroup, Status, TokenIds


class Engines:
    """Finishes the groups in ``finishing``; an abort ends the others with two tokens each."""

    def __init__(self, *finishing: int) -> None:
        self.finishing = set(finishing)
        self.started: list[int | None] = []
        self.deaf = False
        self._end = asyncio.Event()

    async def run(self, rollout: int, group: PromptGroup) -> PromptGroup:
        self.started.append(group[0].group_index)
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

    def prepare(self, rollout: int, groups: list[PromptGroup]) -> int:
        return 0

    @asynccontextmanager
    async def abort_requests(self) -> AsyncIterator[None]:
        if not self.deaf:
            self._end.set()
        yield
        self._end.clear()


@pytest.fixture
def start(tmp_path: Path):
    """Makes a scheduler of groups of one sample, two a rollout, four started at once, and its parts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n')

    def make(
        engines: Engines, *, holds: bool = True, **settings: Any
    ) -> tuple[GroupScheduler, RequeueBuffer, PromptLedger]:
        ledger = PromptLedger(tmp_path)
        supply = RequeueBuffer(PromptFiles(None, RunView(prompts=PromptRequest(path))), ledger.journal, holds=holds)
        config = RolloutConfig(rollout_batch_size=2, **{"over_sampling_batch_size": 4, **settings})
        return GroupScheduler(supply, engines, config), supply, ledger

    return make


def numbers(groups: list[PromptGroup]) -> list[int | None]:
    return [group[0].group_index for group in groups]


async def test_groups_that_finish_in_excess_wait_for_the_next_rollout(start):
    engines = Engines(0, 2, 3)
    scheduler, supply, _ = start(engines)
    assert numbers(await scheduler.take(0, 2)) == [0, 2]
    await scheduler.abort_in_flight()
    assert engines.started == [0, 1, 2, 3]
    assert (scheduler.pending_groups(), supply.held) == (PendingGroups(held={3: [3], 1: [1]}), {1: [1]})


async def test_the_next_rollout_takes_finished_groups_and_resumes_aborted_ones(start):
    engines = Engines(0, 2, 3)
    scheduler, supply, _ = start(engines)
    await scheduler.take(0, 2)
    await scheduler.abort_in_flight()
    engines.finishing |= {1, 4, 5}
    assert numbers(await scheduler.take(1, 2)) == [3, 1]
    await scheduler.abort_in_flight()
    # Three more were started in addition to the one that waited: four in all.
    assert engines.started == [0, 1, 2, 3, 1, 4, 5]
    assert (scheduler.pending_groups().held, supply.held) == ({4: [4], 5: [5]}, {})


async def test_no_group_is_started_where_enough_are_finished(start):
    engines = Engines(0, 1, 2, 3)
    scheduler, _, _ = start(engines)
    assert numbers(await scheduler.take(0, 2)) == [0, 1]
    assert numbers(await scheduler.take(1, 2)) == [2, 3]
    assert engines.started == [0, 1, 2, 3]


async def test_without_partial_rollouts_aborted_groups_go_back_to_the_source(start):
    scheduler, supply, _ledger = start(Engines(0, 2, 3), holds=False)
    await scheduler.take(0, 2)
    await scheduler.abort_in_flight()
    assert supply.held == {}
    assert supply.state()["returned"] == [1]
    assert scheduler.pending_groups() == PendingGroups(held={3: [3]})


async def test_a_group_that_ignores_the_abort_is_cancelled_and_requeued_unchanged(start, monkeypatch):
    monkeypatch.setattr(module, "ABORT_LIMIT_S", 0.01)
    engines = Engines(0, 2, 3)
    engines.deaf = True
    scheduler, supply, _ = start(engines)
    await scheduler.take(0, 2)
    await scheduler.abort_in_flight()
    assert (supply.held, supply.state()["returned"]) == ({}, [1])
    assert scheduler.pending_groups() == PendingGroups(held={3: [3]})
    await scheduler.close()


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.ABORTED])
async def test_a_group_that_finishes_although_it_was_cancelled_is_counted_once(start, monkeypatch, status):
    monkeypatch.setattr(module, "ABORT_LIMIT_S", 0.01)

    class Stubborn(Engines):
        async def run(self, rollout: int, group: PromptGroup) -> PromptGroup:
            try:
                return await super().run(rollout, group)
            except asyncio.CancelledError:
                group = [self._ended(sample) for sample in group]
                group[0].status = status
                return group

    engines = Stubborn(0, 2, 3)
    engines.deaf = True
    scheduler, supply, _ = start(engines)
    await scheduler.take(0, 2)
    await scheduler.abort_in_flight()
    assert scheduler.pending_groups() == PendingGroups(held={1: [1], 3: [3]})
    assert supply.held == ({1: [1]} if status is Status.ABORTED else {})
    assert supply.state().get("returned", []) == []
    engines.finishing |= {1, 4, 5}
    assert numbers(await scheduler.take(1, 2)) == ([3, 1] if status is Status.ABORTED else [1, 3])
    await scheduler.close()


async def test_groups_ahead_of_training_are_not_aborted(start):
    scheduler, supply, _ = start(Engines(0, 2, 3), async_buffer_size=1)
    await scheduler.take(0, 2)
    await scheduler.abort_in_flight()
    assert 1 in scheduler.pending_groups().in_flight
    assert (supply.held, supply.state()["returned"]) == ({}, [])
    await scheduler.close()


async def test_everything_is_accounted_for_through_a_checkpoint_and_back(start, tmp_path):
    engines = Engines(0, 2, 3)
    scheduler, supply, ledger = start(engines)

    def present() -> PendingGroups:
        found = scheduler.pending_groups()
        return PendingGroups(found.in_flight, {**found.held, **supply.held})

    groups = await scheduler.take(0, 2)
    await scheduler.abort_in_flight()
    SampleWriter(tmp_path).write("train", 0, [one for group in groups for one in group])
    metrics = ledger.close(0, present())
    assert metrics.pop("perf/ledger_time") > 0
    assert {name.removeprefix("ledger/"): value for name, value in metrics.items() if value} == {
        "taken": 4.0,
        "trained": 2.0,
        "held": 2.0,
    }
    kept = {"ledger": ledger.state(present()), **scheduler.state()}
    await scheduler.take(1, 1)
    # The process dies here: the group that was taken is in no file, and the next one comes from the checkpoint.
    engines.finishing |= {1, 4, 5, 6}
    scheduler, supply, ledger = start(engines)
    ledger.restore(kept["ledger"])
    scheduler.restore(kept)
    groups = await scheduler.take(1, 2)
    assert numbers(groups) == [3, 1]
    await scheduler.abort_in_flight()
    SampleWriter(tmp_path).write("train", 1, [one for group in groups for one in group])
    metrics = ledger.close(1, present())
    assert (metrics["ledger/taken"], metrics["ledger/trained"], metrics["ledger/held"]) == (6.0, 4.0, 2.0)


async def test_a_group_that_the_sampler_lost_ends_the_run(start, tmp_path):
    scheduler, _supply, ledger = start(Engines(0, 1, 2, 3))
    groups = await scheduler.take(0, 2)
    SampleWriter(tmp_path).write("train", 0, groups[0])
    with pytest.raises(RunError, match="groups 1 "):
        ledger.close(0, scheduler.pending_groups())
