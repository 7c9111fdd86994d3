"""Groups ahead of training: pacing, age, failures, and a state from which nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.config.sampling import RolloutConfig
from slime_core.contracts import PromptRequest
from slime_core.errors import PluginError, RunError
from slime_core.rollout.group_scheduler import GroupScheduler, RequeueBuffer
from slime_core.rollout.routing import RoutedComponent
from slime_core.track.ledger import Journal
from slime_core.types import LogProbs, PromptGroup, Status, TokenIds
from slime_datasets.options import DatasetsOptions
from slime_datasets.prompt_files import PromptFiles

TURNS = 5
"""Turns of the event loop after which every task that can run has run."""


@dataclass
class Engines:
    """A fake group generator: a group is in flight until the test ends it, and is sampled by the served version."""

    version: int = 0
    started: list[tuple[int, list[int]]] = field(default_factory=list)
    flying: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    extra: Any = None

    def prepare(self, rollout: int, groups: list[PromptGroup]) -> int:
        self.started.append((rollout, [number(group) for group in groups]))
        return 0

    async def run(self, rollout: int, group: PromptGroup) -> PromptGroup:
        version, one = self.version, group[0]
        self.flying[number(group)] = future = asyncio.get_running_loop().create_future()
        try:
            status = await future
        except asyncio.CancelledError:
            self.cancelled.append(number(group))
            raise
        one.tokens, one.response_length, one.rollout_log_probs = TokenIds([5, 6]), 1, LogProbs([-0.25])
        one.weight_versions, one.weight_spans = [str(version)], [(str(version), 0, 1)]
        one.status, one.reward, one.metadata["seen"] = status, 1.0, self.extra
        return group

    def abort_requests(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def end(self, *numbers: int, status: Status = Status.COMPLETED) -> None:
        for one in numbers:
            self.flying.pop(one).set_result(status)
        await turns()


def number(group: PromptGroup) -> int:
    assert group[0].group_index is not None
    return group[0].group_index


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


Make = Callable[..., tuple[GroupScheduler, Engines]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A scheduler over five prompts in file order, two groups a rollout, and the engines that it keeps busy."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{one}", "label": "x", "metadata": {{}}}}\n' for one in range(5)))

    def built(batch: int = 2, **settings: Any) -> tuple[GroupScheduler, Engines]:
        engines, source = Engines(), PromptFiles(DatasetsOptions(), RunView(prompts=PromptRequest(path, shuffle=False)))
        prompts = RequeueBuffer(RoutedComponent("mine", source), Journal(None))
        return GroupScheduler(prompts, engines, RolloutConfig(rollout_batch_size=batch, **settings)), engines

    return built


async def begun(scheduler: GroupScheduler, rollout: int, *, count: int = 2) -> asyncio.Task[list[PromptGroup]]:
    taking = asyncio.create_task(scheduler.take(rollout, count))
    await turns()
    return taking


async def taken(scheduler: GroupScheduler, engines: Engines, rollout: int, *, count: int = 2) -> list[int]:
    """Everything in flight ends, and ``rollout`` takes its groups."""
    taking = await begun(scheduler, rollout, count=count)
    await engines.end(*engines.flying)
    return [number(group) for group in await taking]


async def test_groups_come_in_the_order_of_their_admission_whichever_ended_first(make: Make) -> None:
    scheduler, engines = make()
    taking = await begun(scheduler, 0)
    await engines.end(1)
    assert not taking.done()
    await engines.end(0)
    assert [number(group) for group in await taking] == [0, 1]


async def test_one_rollout_ahead_starts_with_the_requested_rollout_and_continues_after_it(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1)
    taking = await begun(scheduler, 0)
    assert engines.started == [(0, [0, 1]), (1, [2, 3])]
    await engines.end(0, 1)
    await taking
    assert sorted(engines.flying) == [2, 3]
    assert scheduler.metrics()["rollout/buffer/in_flight"] == 2.0
    await engines.end(3)
    found = scheduler.metrics()
    assert (found["rollout/buffer/in_flight"], found["rollout/buffer/finished"]) == (1.0, 1.0)


async def test_nothing_starts_for_rollouts_after_the_last_one(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=3, num_rollout=2)
    assert await taken(scheduler, engines, 0) == [0, 1]
    assert await taken(scheduler, engines, 1) == [2, 3]
    # Groups in the place of others are for the last rollout itself.
    assert await taken(scheduler, engines, 1, count=1) == [4]
    assert [rollout for rollout, _ in engines.started] == [0, 1, 1]


async def test_no_group_is_started_that_would_be_older_than_the_bound(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=3, max_staleness=1)
    scheduler.published(0)
    assert engines.started == [(0, [0, 1]), (1, [2, 3])]
    await taken(scheduler, engines, 0)
    assert len(engines.started) == 2
    scheduler.published(1)
    assert engines.started[2:] == [(2, [4, 5])]
    await scheduler.close()


async def test_a_rollout_waits_for_groups_that_are_due_and_not_for_others(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1, max_staleness=1)
    taking = await begun(scheduler, 0)
    await engines.end(1, 2)
    assert [number(group) for group in await taking] == [1, 2]
    scheduler.published(1)
    taking = await begun(scheduler, 1)
    await engines.end(3, *[one for one in engines.flying if one > 3])
    assert not taking.done()  # weights 0 sampled group 0, and rollout 1 is the last that may train it
    await engines.end(0)
    assert [number(group) for group in await taking] == [0, 3]
    await scheduler.close()


async def test_drain_aborts_groups_ahead_and_starts_none(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1)
    scheduler.published(0)
    resting = asyncio.create_task(scheduler.drain())
    await turns()
    await engines.end(0)
    assert not resting.done()
    await engines.end(1)
    await resting
    assert engines.started == [(0, [0, 1])]
    assert scheduler.metrics()["rollout/buffer/finished"] == 2.0
    assert await taken(scheduler, engines, 0) == [0, 1]
    await scheduler.close()


async def test_drain_raises_a_failure_at_once(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1)
    scheduler.published(0)
    resting = asyncio.create_task(scheduler.drain())
    await turns()
    engines.flying.pop(0).set_exception(PluginError("no more"))
    await turns()
    assert (resting.done(), sorted(engines.flying)) == (True, [1])
    with pytest.raises(PluginError, match="no more"):
        await resting
    await scheduler.close()


@pytest.mark.parametrize("call", ["take", "published", "check"])
async def test_the_next_call_raises_the_error_of_a_group_that_failed_ahead(make: Make, call: str) -> None:
    scheduler, engines = make(async_buffer_size=1)
    taking = await begun(scheduler, 0)
    await engines.end(0, 1)
    await taking
    engines.flying.pop(2).set_exception(PluginError("generate function 'mine' failed"))
    await turns()
    with pytest.raises(PluginError, match="generate function 'mine' failed"):
        await {
            "take": lambda: scheduler.take(1, 2),
            "published": lambda: asyncio.to_thread(scheduler.published, 1),
            "check": lambda: asyncio.to_thread(scheduler.raise_failure),
        }[call]()
    await scheduler.close()


async def test_exceptions_of_groups_that_fail_together_are_all_retrieved(make: Make) -> None:
    scheduler, engines = make()
    taking = await begun(scheduler, 0)
    groups: list[Any] = [task for task in asyncio.all_tasks() if task.get_name().startswith("group")]
    for failing in (0, 1):
        engines.flying.pop(failing).set_exception(PluginError("no more"))
    with pytest.raises(PluginError, match="no more"):
        await taking
    await turns()
    # asyncio logs a task's exception at garbage collection, at any time, unless it was retrieved.
    assert [task._log_traceback for task in groups] == [False, False]
    await scheduler.close()


async def test_a_group_that_is_cancelled_from_within_ends_the_run_instead_of_being_waited_for(make: Make) -> None:
    scheduler, engines = make()
    taking = await begun(scheduler, 0)
    engines.flying.pop(1).set_exception(asyncio.CancelledError())
    with pytest.raises(RunError, match=r"group 1 .*CancelledError"):
        await asyncio.wait_for(taking, timeout=120)
    await scheduler.close()


async def test_a_finished_group_that_json_cannot_carry_counts_as_in_flight(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1)
    engines.extra = object()
    await taken(scheduler, engines, 0)
    state = scheduler.state()
    assert (len(state["in_flight"]), state["finished"]) == (2, [])
    again, others = make(async_buffer_size=1)
    again.restore(state)
    assert await taken(again, others, 1) == [2, 3]
    await asyncio.gather(scheduler.close(), again.close())
