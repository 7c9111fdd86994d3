"""Groups ahead of training: pacing, age, failures, and a state from which nothing is lost or trained twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime_core import RunView
from slime_core.builtin.rollout import PromptFiles
from slime_core.config.sampling import RolloutConfig
from slime_core.errors import PluginError, RunError
from slime_core.plugins.contracts import PromptRequest
from slime_core.rollout.group_scheduler import GroupScheduler, RequeueBuffer
from slime_core.track.ledger import Journal
from slime_core.types import LogProbs, PromptGroup, Sample, Status, TokenIds

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
        engines, source = Engines(), PromptFiles(None, RunView(prompts=PromptRequest(path, shuffle=False)))
        prompts = RequeueBuffer(source, Journal(None))
        return GroupScheduler(prompts, engines, RolloutConfig(rollout_batch_size=batch, **settings)), engines

    return built


async def taken(scheduler: GroupScheduler, engines: Engines, rollout: int, *, count: int = 2) -> list[int]:
    """Everything in flight ends, and ``rollout`` takes its groups."""
    taking = asyncio.create_task(scheduler.take(rollout, count))
    await turns()
    await engines.end(*engines.flying)
    return [number(group) for group in await taking]


# --- How much is started ----------------------------------------------------------------------------------------------


async def test_without_a_buffer_nothing_starts_before_a_rollout_is_requested(make: Make) -> None:
    scheduler, engines = make()
    scheduler.published(0)
    assert engines.started == []
    assert await taken(scheduler, engines, 0) == [0, 1]
    scheduler.published(1)
    assert engines.started == [(0, [0, 1])]
    assert scheduler.metrics() == {}


async def test_groups_come_in_the_order_of_their_admission_whichever_ended_first(make: Make) -> None:
    scheduler, engines = make()
    taking = asyncio.create_task(scheduler.take(0, 2))
    await turns()
    await engines.end(1)
    assert not taking.done()
    await engines.end(0)
    assert [number(group) for group in await taking] == [0, 1]


async def test_one_rollout_ahead_starts_with_the_requested_rollout_and_continues_after_it(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1)
    taking = asyncio.create_task(scheduler.take(0, 2))
    await turns()
    assert engines.started == [(0, [0, 1]), (1, [2, 3])]
    await engines.end(0, 1)
    await taking
    assert sorted(engines.flying) == [2, 3]
    assert scheduler.metrics()["rollout/buffer/in_flight"] == 2.0
    await engines.end(3)
    found = scheduler.metrics()
    assert (found["rollout/buffer/in_flight"], found["rollout/buffer/finished"]) == (1.0, 1.0)


async def test_a_first_publication_starts_what_may_be_ahead(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1)
    scheduler.published(4)
    assert engines.started == [(4, [0, 1])]
    await scheduler.close()


async def test_groups_that_are_needed_in_the_place_of_others_are_taken_from_those_ahead(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1)
    assert await taken(scheduler, engines, 0) == [0, 1]
    assert await taken(scheduler, engines, 0, count=1) == [2]
    assert engines.started == [(0, [0, 1]), (1, [2, 3]), (1, [4])]
    await scheduler.close()


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


# --- How old they get -------------------------------------------------------------------------------------------------


async def test_a_rollout_waits_for_groups_that_are_due_and_not_for_others(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1, max_staleness=1)
    taking = asyncio.create_task(scheduler.take(0, 2))
    await turns()
    await engines.end(1, 2)
    assert [number(group) for group in await taking] == [1, 2]
    scheduler.published(1)
    taking = asyncio.create_task(scheduler.take(1, 2))
    await turns()
    await engines.end(3, *[one for one in engines.flying if one > 3])
    assert not taking.done()  # weights 0 sampled group 0, and rollout 1 is the last that may train it
    await engines.end(0)
    assert [number(group) for group in await taking] == [0, 3]
    await scheduler.close()


async def test_no_rollout_waits_for_a_group_that_is_already_too_old(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1, max_staleness=1, over_sampling_batch_size=3)
    for rollout, ending in enumerate([(0, 1), (2, 3), (5, 6)]):
        if rollout:
            scheduler.published(rollout)
        taking = asyncio.create_task(scheduler.take(rollout, 2))
        await turns()
        await engines.end(*ending)
        assert [number(group) for group in await asyncio.wait_for(taking, timeout=120)] == list(ending)
    assert 4 in engines.flying  # weights 0 sampled it, and rollout 1 was the last that might train it
    await scheduler.close()


async def test_with_correction_of_old_samples_no_rollout_waits_for_a_slow_group(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1, max_staleness=1, stale_samples="correct")
    await taken(scheduler, engines, 0)
    scheduler.published(1)
    slow = min(engines.flying, default=None)
    assert slow is None
    taking = asyncio.create_task(scheduler.take(1, 2))
    await turns()
    assert [number(group) for group in await taking] == [2, 3]
    scheduler.published(2)
    taking = asyncio.create_task(scheduler.take(2, 2))
    await turns()
    await engines.end(5, 6)
    assert [number(group) for group in await taking] == [5, 6]
    assert 4 in engines.flying
    await scheduler.close()


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("seed", range(5))
async def test_no_group_is_trained_above_the_bound_in_whatever_order_they_end(
    make: Make, interval: int, ahead: int, seed: int
) -> None:
    dice, oldest = random.Random(seed), interval - 1 + ahead
    scheduler, engines = make(async_buffer_size=ahead, max_staleness=oldest)
    for rollout in range(20):
        if rollout % interval == 0:
            engines.version = rollout
            scheduler.published(rollout)
        taking = asyncio.create_task(scheduler.take(rollout, 2))
        await turns()
        while not taking.done():
            await engines.end(dice.choice(sorted(engines.flying)))
        ages = [rollout - int(group[0].weight_versions[0]) for group in await taking]
        assert max(ages) <= oldest
        assert scheduler.metrics()["rollout/buffer/in_flight"] <= 2 * ahead
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


async def test_drain_waits_for_the_replacement_of_an_aborted_group(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1, pause_generation_mode="abort")
    scheduler.published(0)
    resting = asyncio.create_task(scheduler.drain())
    await turns()
    await engines.end(0, 1, status=Status.ABORTED)
    assert (resting.done(), sorted(engines.flying)) == (False, [0, 1])
    await engines.end(0, 1)
    await resting


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


# --- What goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["take", "published", "check"])
async def test_the_next_call_raises_the_error_of_a_group_that_failed_ahead(make: Make, call: str) -> None:
    scheduler, engines = make(async_buffer_size=1)
    taking = asyncio.create_task(scheduler.take(0, 2))
    await turns()
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


async def test_a_rollout_that_waits_ends_with_the_failure(make: Make) -> None:
    scheduler, engines = make()
    taking = asyncio.create_task(scheduler.take(0, 2))
    await turns()
    engines.flying.pop(1).set_exception(PluginError("no more"))
    with pytest.raises(PluginError, match="no more"):
        await taking
    await scheduler.close()
    assert engines.cancelled == [0]


async def test_exceptions_of_groups_that_fail_together_are_all_retrieved(make: Make) -> None:
    scheduler, engines = make()
    taking = asyncio.create_task(scheduler.take(0, 2))
    await turns()
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
    taking = asyncio.create_task(scheduler.take(0, 2))
    await turns()
    engines.flying.pop(1).set_exception(asyncio.CancelledError())
    with pytest.raises(RunError, match=r"group 1 .*CancelledError"):
        await asyncio.wait_for(taking, timeout=120)
    await scheduler.close()


async def test_close_cancels_groups_in_flight(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=2)
    scheduler.published(0)
    await turns()
    await scheduler.close()
    assert sorted(engines.cancelled) == [0, 1, 2, 3]


async def test_groups_that_an_update_aborted_come_again_at_once(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1, pause_generation_mode="abort")
    taking = asyncio.create_task(scheduler.take(0, 2))
    await turns()
    await engines.end(0, 2, status=Status.ABORTED)
    assert engines.started[2:] == [(1, [0]), (1, [2])]
    assert scheduler.metrics()["rollout/buffer/aborted"] == 2.0
    await engines.end(0, 1)
    assert [number(group) for group in await taking] == [1, 0]
    await scheduler.close()


# --- State ------------------------------------------------------------------------------------------------------------


async def test_a_finished_group_comes_back_whole_and_one_in_flight_as_its_source_gave_it(make: Make) -> None:
    scheduler, engines = make(async_buffer_size=1)
    await taken(scheduler, engines, 0)
    scheduler.published(1)
    state = scheduler.state()
    assert (len(state["finished"]), state["in_flight"], state["source"]["next"]) == (2, [], 4)
    taking = asyncio.create_task(scheduler.take(1, 2))
    await turns()
    expected = await taking
    engines.flying[4].get_loop()
    flying = scheduler.state()
    assert [json.loads(text)["samples"][0]["metadata"] for text in flying["in_flight"]] == [{}, {}]

    again, others = make(async_buffer_size=1)
    again.restore(json.loads(json.dumps(state)))
    again.published(1)
    assert others.started == []
    found = await again.take(1, 2)
    assert found == expected
    assert [type(value) for value in (found[0][0].tokens, found[0][0].rollout_log_probs)] == [TokenIds, LogProbs]
    await asyncio.gather(scheduler.close(), again.close())


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


async def test_a_state_of_a_source_alone_is_taken(make: Make) -> None:
    scheduler, engines = make()
    scheduler.restore({**scheduler.state()["source"], "next": 3})
    assert await taken(scheduler, engines, 0) == [3, 4]


@pytest.mark.parametrize("seed", range(20))
async def test_killed_anywhere_and_resumed_every_prompt_is_trained_exactly_once(make: Make, seed: int) -> None:
    dice = random.Random(seed)
    settings = {
        "async_buffer_size": dice.randint(0, 3),
        "max_staleness": None,
        "pause_generation_mode": dice.choice(["abort", "retract"]),
    }
    trained: list[int] = []
    state, step = None, 0
    while step < 12:
        scheduler, engines = make(**settings)
        if state is not None:
            scheduler.restore(json.loads(state))
        scheduler.published(step)
        dies_at, saved, done = step + dice.randint(1, 4), step, list(trained)
        while step < min(dies_at, 12):
            done += await _one_step(scheduler, engines, step, dice)
            step += 1
            if dice.random() < 0.6 or step == 12:
                state, saved, trained = json.dumps(scheduler.state()), step, list(done)
            scheduler.published(step)
        await scheduler.close()  # killed: what was not saved is gone
        step = saved
    held = scheduler.state()
    open_groups = [json.loads(text)["samples"][0]["group_index"] for text in held["in_flight"] + held["finished"]]
    everything = sorted(trained + open_groups + held["source"]["returned"])
    assert everything == list(range(held["source"]["next"]))
    assert len(set(trained)) == len(trained) == 24


async def _one_step(scheduler: GroupScheduler, engines: Engines, step: int, dice: random.Random) -> list[int]:
    """One rollout, of groups that end in any order, and some that end ahead; the engines abort one now and then."""
    taking = asyncio.create_task(scheduler.take(step, 2))
    await turns()
    while not taking.done():
        aborted = scheduler._settings.pause_generation_mode == "abort" and dice.random() < 0.2
        one = dice.choice(sorted(engines.flying))
        await engines.end(one, status=Status.ABORTED if aborted else Status.COMPLETED)
    await engines.end(*(one for one in sorted(engines.flying) if dice.random() < 0.3))
    return [number(group) for group in await taking]


def test_a_state_is_plain_json(make: Make) -> None:
    scheduler, _ = make()
    assert json.loads(json.dumps(scheduler.state())) == scheduler.state()
    assert Sample.from_dict(json.loads(json.dumps(Sample(weight_spans=[("3", 0, 2)]).to_dict()))).weight_spans == [
        ("3", 0, 2)
    ]
