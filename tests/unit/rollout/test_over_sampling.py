"""Over-sampling and requeued groups: none is lost, aborted ones resume or start over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core import RunView
from slime_core.config.sampling import RolloutConfig
from slime_core.contracts import PromptRequest
from slime_core.errors import RunError
from slime_core.rollout import group_scheduler as module
from slime_core.rollout.group_scheduler import GroupScheduler, RequeueBuffer
from slime_core.rollout.routing import RoutedComponent
from slime_core.track.ledger import Journal, PendingGroups, PromptLedger, Recount
from slime_core.track.samples import SampleWriter
from slime_core.types import LogProbs, PromptGroup, Status, TokenIds
from slime_datasets.options import DatasetsOptions
from slime_datasets.prompt_files import PromptFiles


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
        supply = RequeueBuffer(
            RoutedComponent("mine", PromptFiles(DatasetsOptions(), RunView(prompts=PromptRequest(path)))),
            ledger.journal,
            holds=holds,
        )
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


async def test_a_group_that_the_sampler_lost_ends_the_run(start, tmp_path):
    scheduler, _supply, ledger = start(Engines(0, 1, 2, 3))
    groups = await scheduler.take(0, 2)
    SampleWriter(tmp_path).write("train", 0, groups[0])
    with pytest.raises(RunError, match="groups 1 "):
        ledger.close(0, scheduler.pending_groups())


@pytest.fixture
def supply(tmp_path: Path):
    """Makes a supply of two prompts, two samples each, whose journal lies in ``tmp_path``."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", "label": "2"}\n')

    def make(*, holds: bool = True) -> RequeueBuffer:
        request = PromptRequest(path, n_samples_per_prompt=2, shuffle=False)
        return RequeueBuffer(
            RoutedComponent("mine", PromptFiles(DatasetsOptions(), RunView(prompts=request))),
            Journal(tmp_path),
            holds=holds,
        )

    return make


def end(group: PromptGroup, *, length: int = 2) -> PromptGroup:
    for sample in group:
        sample.status, sample.response_length = Status.ABORTED, length
        sample.tokens, sample.rollout_log_probs = TokenIds(range(length + 1)), LogProbs([-0.5] * length)
    return group


def test_an_ended_group_comes_first_with_its_tokens(supply, tmp_path):
    source = supply()
    first, _second = source.next_groups(2)
    source.put_back([end(first)])
    assert source.held == {0: [0, 1]}
    again, fresh = source.next_groups(2)
    assert again is first
    assert numbers([again, fresh]) == [0, 2]
    assert again[0].tokens == [0, 1, 2]
    found = Recount(tmp_path)
    found.read()
    assert (found.open.keys(), found.returned) == ({0, 1, 2}, set())


@pytest.mark.parametrize("case", ["does not hold", "no tokens", "finished"])
def test_any_other_group_goes_back_to_the_source(supply, tmp_path, case):
    source = supply(holds=case != "does not hold")
    (group,) = source.next_groups(1)
    end(group, length=0 if case == "no tokens" else 2)
    for sample in group:
        sample.status = Status.COMPLETED if case == "finished" else sample.status
    source.put_back([group])
    found = Recount(tmp_path)
    found.read()
    assert (source.held, found.open, found.returned) == ({}, {}, {0})
    assert [sample.status for sample in source.next_groups(1)[0]] == [Status.PENDING] * 2


def test_a_held_group_keeps_its_images_in_a_checkpoint(supply):
    source = supply()
    (group,) = source.next_groups(1)
    for sample in end(group):
        sample.multimodal_train_inputs = {"pixels": np.ones((2, 3), np.float16)}
    source.put_back([group])
    resumed = supply()
    resumed.restore(json.loads(json.dumps(source.state())))
    (again,) = resumed.next_groups(1)
    pixels = again[1].multimodal_train_inputs["pixels"]
    assert (pixels.dtype, pixels.tolist()) == (np.float16, [[1, 1, 1]] * 2)
    assert again[1].tokens == [0, 1, 2]


def test_a_held_group_that_json_cannot_carry_starts_over_after_a_restart(supply):
    source = supply()
    (group,) = source.next_groups(1)
    group[0].multimodal_inputs = object()
    source.put_back([end(group)])
    resumed = supply()
    resumed.restore(source.state())
    (again,) = resumed.next_groups(1)
    assert [(one.group_index, one.index, one.prompt, one.status) for one in again] == [
        (0, 0, "a", Status.PENDING),
        (0, 1, "a", Status.PENDING),
    ]
