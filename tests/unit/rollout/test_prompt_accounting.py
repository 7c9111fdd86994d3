"""In every order of events each prompt is in exactly one place, is trained once and not too late, and no call hangs.

The sampler runs on a fake engine that ends requests on command; publications, failures, evaluations, checkpoints and
kills come in random order. The tests count with other code than the ledger's.
"""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.builtin.rollout import Random
from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import DataConfig, EvalConfig, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import RequestFailed
from slime_core.generation import Generation, SamplingParams
from slime_core.generation.sampling import NOTHING
from slime_core.plugins.activation import activate
from slime_core.plugins.registry import Registry
from slime_core.rollout import components, group_scheduler
from slime_core.rollout.collected_rollout import CollectedRollout
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.reward_pool import RewardFailure
from slime_core.rollout.sampler import TrainSampler
from slime_core.types import Sample
from tests.unit.rollout.samplers import FOLDER, encoder
from tests.unit.rollout.token_versions import token_versions

ROLLOUTS, BATCH, SAMPLES, PROMPT, NINE = 6, 3, 2, 3, 14
PATIENCE = 1000
"""Turns of the event loop in which something must become of a sampler that no request is in flight for."""

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """The settings of a run, and the dice of its fate."""

    seed: int
    ahead: int
    interval: int
    fetch: int | None
    partial: bool
    bound: int | None
    stale: str
    pause: str
    failed: str
    transforms: tuple[str, ...]
    refills: int = 100

    @property
    def rollout(self) -> RolloutConfig:
        values: dict[str, Any] = {
            **{"num_rollout": ROLLOUTS, "rollout_batch_size": BATCH, "n_samples_per_prompt": SAMPLES},
            **{"rm_type": "random", "async_buffer_size": self.ahead, "over_sampling_batch_size": self.fetch},
            **{"partial_rollout": self.partial, "max_staleness": self.bound, "stale_samples": self.stale},
            **{"pause_generation_mode": self.pause, "failed_samples": self.failed},
            **{"sample_transforms": self.transforms, "rollout_max_response_len": 8},
            **{"rollout_stop": ("99",), "rollout_max_refills": self.refills},
        }
        return RolloutConfig(**values)


@st.composite
def cases(draw: Any) -> Case:
    """Any that the rules of the configuration let through."""
    ahead, interval = draw(st.integers(0, 2)), draw(st.integers(1, 2))
    fetch = draw(st.sampled_from([None, BATCH, 2 * BATCH]))
    pause = draw(st.sampled_from(["retract", "in_place", "abort"])) if ahead else "retract"
    partial = draw(st.booleans()) and (pause == "abort" or (fetch is not None and not ahead))
    least = max(ahead, interval - 1, int(partial))
    bound = draw(st.sampled_from([None, least, least + 1]))
    stale = "requeue" if bound is None else draw(st.sampled_from(["requeue", "evict", "correct"]))
    failed = draw(st.sampled_from(["drop_sample", "drop_group", "retry"]))
    transforms = draw(st.sampled_from([(), ("drop_zero_std",)]))
    seed = draw(st.integers(0, 2**31))
    # Without rounds of other prompts a rollout of which a transform drops all is empty.
    refills = 100 if transforms else draw(st.sampled_from([0, 100]))
    return Case(seed, ahead, interval, fetch, partial, bound, stale, pause, failed, transforms, refills)


@cache
def registry() -> Registry:
    return activate(["datasets", "grpo"]).registry


def log_prob(token: int, version: int) -> float:
    """A log-probability that identifies the token and the version that sampled it."""
    return -(1 + version) - token / 16


def follows(ids: Sequence[int], *, salt: int = 0) -> int:
    """The only token that can follow ``ids``, a prompt with the response so far; ``salt``: of siblings.

    A response is some digits up to 8, and the two nines that end it.
    """
    length = 2 + sum(ids[:PROMPT]) % 4
    return NINE if len(ids) - PROMPT >= length else (sum(ids) + salt) % 9 + NINE - 9


def has_stopped(sampled: Sequence[int]) -> bool:
    """Whether the tokens of one request end with the stop sequence."""
    return list(sampled[-2:]) == [NINE, NINE]


@dataclass(eq=False)
class Request:
    """One request for several responses, each with the versions that sampled its tokens."""

    ids: list[int]
    most: int
    answer: asyncio.Future[list[Generation]]
    sampled: list[list[int]]
    versions: list[list[int]]

    def advance(self, count: int, version: int) -> None:
        """Sample up to ``count`` tokens of each response."""
        for place, (tokens, versions) in enumerate(zip(self.sampled, self.versions, strict=True)):
            for _ in range(count):
                if len(tokens) == self.most or has_stopped(tokens):
                    break
                is_first = not tokens and len(self.ids) == PROMPT
                tokens.append(follows([*self.ids, *tokens], salt=place if is_first else 0))
                versions.append(version)

    def end(self, *, aborts: bool = False) -> None:
        """Answer with the tokens so far; an aborted response says "abort" even if its last token ended it."""
        if not self.answer.done():
            rows = zip(self.sampled, self.versions, strict=True)
            self.answer.set_result([_answer(*one, "abort" if aborts else "stop") for one in rows])


def _answer(tokens: list[int], versions: list[int], reason: Any) -> Generation:
    found = sorted(set(versions))
    spans = [(str(one), versions.index(one), versions.index(one) + versions.count(one)) for one in found]
    log_probs = array("f", [log_prob(*one) for one in zip(tokens, versions, strict=True)])
    names = tuple(map(str, found))
    return Generation(array("i", tokens), log_probs, reason, names, weight_spans=tuple(spans))


@dataclass
class Engine:
    """A fake engine that ends requests on command; the sampler only sees a client of it."""

    dice: random.Random
    version: int = 0
    flying: list[Request] = field(default_factory=list)
    is_ending: bool = False
    may_fail: bool = False

    async def generate(self, ids: list[int], *, sampling: SamplingParams, n: int = 1, **_: Any) -> list[Generation]:
        if self.is_ending:
            return [NOTHING] * n
        answer: asyncio.Future[list[Generation]] = asyncio.get_running_loop().create_future()
        one = Request(ids, sampling.max_new_tokens, answer, [[] for _ in range(n)], [[] for _ in range(n)])
        self.flying.append(one)
        try:
            return await answer
        finally:
            self.flying.remove(one)

    @asynccontextmanager
    async def aborting(self) -> AsyncIterator[None]:
        self.is_ending, is_deaf = True, self.dice.random() < 0.2
        group_scheduler.ABORT_LIMIT_S = 0.0 if is_deaf else 30.0
        if not is_deaf:
            self.abort()
        yield
        self.is_ending = False

    async def close(self) -> None:
        pass

    def abort(self) -> None:
        for one in self.flying:
            one.advance(self.dice.randrange(4), self.version)
            one.end(aborts=True)

    def happen(self) -> None:
        """Something becomes of one request."""
        waiting = [one for one in self.flying if not one.answer.done()]
        if not waiting:
            return
        one, lot = self.dice.choice(waiting), self.dice.random()
        if lot < 0.2:
            one.advance(1, self.version)
        elif lot < 0.25 and self.may_fail:
            self.may_fail = False
            one.answer.set_exception(RequestFailed("no answer", "engine_timeout"))
        else:
            one.advance(one.most, self.version)
            one.end()


@dataclass
class Run:
    """What outlives a process: the folder, the last checkpoint, and what was trained until then."""

    case: Case
    folder: Path
    dice: random.Random
    step: int = 0
    saved: tuple[int, str] | None = None
    trained: dict[int, list[Sample]] = field(default_factory=dict)

    async def live(self) -> None:
        """One process: from the last checkpoint until it is killed, or to the end."""
        engine = Engine(self.dice)
        sampler = self.sampler(engine)
        try:
            if self.saved is not None:
                self.step = self.saved[0]
                sampler.restore(json.loads(self.saved[1]))
            else:
                self.step = 0
            self.publish(sampler, engine)
            while self.step < ROLLOUTS:
                await self.one_step(sampler, engine)
                if self.step < ROLLOUTS and self.dice.random() < 0.2:
                    return
            # Only groups in excess, which over-sampling started, run on where no abort ends them.
            assert sampler._rollouts.pending_groups().in_flight == {} or (self.case.ahead and self.case.fetch)
        finally:
            await sampler.close()

    async def one_step(self, sampler: TrainSampler, engine: Engine) -> None:
        engine.may_fail = True
        await self.driven(engine, sampler.sample(self.step))
        self.look_at(self.trained[self.step])
        self.step += 1
        self.count(sampler)
        for _ in range(self.dice.randrange(4)):  # while the learner trains
            engine.happen()
            await asyncio.sleep(0)
        if self.dice.random() < 0.5 or self.step == ROLLOUTS:
            self.saved = self.step, json.dumps(sampler.state().cursor)
        if self.step % self.case.interval == 0:
            self.publish(sampler, engine)
            self.count(sampler)
        if self.dice.random() < 0.2:
            engine.may_fail = False
            assert "eval/sums" in await self.driven(engine, sampler.evaluate(self.step))
            self.count(sampler)

    def publish(self, sampler: TrainSampler, engine: Engine) -> None:
        if self.case.pause == "abort":
            engine.abort()
        for one in engine.flying:
            one.advance(self.dice.randrange(2), engine.version)
        engine.version = self.step
        sampler.published(self.step)

    async def driven(self, engine: Engine, work: Coroutine[Any, Any, T]) -> T:
        """What becomes of ``work`` while the engine works too; fails where it waits for nothing."""
        task, idle = asyncio.create_task(work), 0
        while not task.done():
            idle = 0 if any(not one.answer.done() for one in engine.flying) else idle + 1
            assert idle < PATIENCE, "it waits, and no request is in flight"
            if self.dice.random() < 0.3:
                engine.happen()
            await asyncio.sleep(0)
        return task.result()

    def look_at(self, samples: list[Sample]) -> None:
        """Every token has one version, follows from the tokens before it, and is not too old."""
        for sample in samples:
            versions, ids = token_versions(sample), list(sample.tokens)
            assert versions == sorted(versions), sample
            assert versions[-1] <= self.step, sample
            pairs = zip(ids[PROMPT:], versions, strict=True)
            assert list(sample.rollout_log_probs or ()) == [log_prob(*one) for one in pairs], sample
            places = range(PROMPT + 1, len(ids))
            assert [ids[place] for place in places] == [follows(ids[:place]) for place in places], sample
            assert (ids[-2:], ids.count(NINE)) == ([NINE, NINE], 2), sample
            if self.case.bound is not None and self.case.stale != "correct":
                assert self.step - versions[0] <= self.case.bound, sample

    def count(self, sampler: TrainSampler) -> None:
        """Every group that was handed out is in one place: in a file, in the sampler's hands, or with its source."""
        cursor = sampler.cursor()
        source = cursor["source"].get("source", cursor["source"])
        found = Counter(source["returned"])
        found.update(group for name in ("in_flight", "held") for group, _ in cursor["ledger"][name])
        found.update(group for step in range(self.step) for group in self.ended(step))
        assert found == Counter(range(source["next"]))
        indices = [sample.index for step in range(self.step) for sample in self.trained[step]]
        assert len(indices) == len(set(indices))

    def ended(self, step: int) -> set[int]:
        lines = (self.folder / "samples" / f"train-{step:06d}.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row.get("dropped") != "requeued"]
        return {row["group"] for row in rows} - {row["group"] for row in rows if row["status"] == "aborted"}

    def sampler(self, engine: Engine) -> TrainSampler:
        data = self.folder / "train.jsonl"
        data.write_text("".join(json.dumps({"prompt": f"1+{n}", "label": "2"}) + "\n" for n in range(9)))
        config = RunConfig(
            data=DataConfig(rollout_shuffle=False),
            rollout=self.case.rollout,
            algorithm=AlgorithmConfig(advantage_estimator="grpo"),
            eval=EvalConfig(eval_prompt_data=(("sums", data),)),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(components, "GenerateClient", lambda url, **_: engine)
            patch.setattr(components, "PromptEncoder", lambda folder, **_: encoder())
            where = SamplerSettings(config, FOLDER, data, "http://unused", samples_folder=self.folder / "samples")
            sampler = TrainSampler(where, registry())
        trainable = sampler._require_trainable

        def seen(batch: CollectedRollout) -> list[Sample]:
            self.trained[batch.rollout] = found = trainable(batch)
            return found

        sampler._require_trainable = seen  # type: ignore[method-assign]
        return sampler

    async def score(self, coins: Random, samples: Sequence[Sample]) -> list[float | RewardFailure]:
        """Takes its time, and now and then there is no reward."""
        for _ in range(self.dice.randrange(5)):
            await asyncio.sleep(0)
        lost = RewardFailure("timeout", "no reward within 1 s")
        return [lost if self.dice.random() < 0.03 else float(coins._coin(sample)) for sample in samples]


@settings(deadline=None, derandomize=True, database=None, max_examples=30)
@given(case=cases())
def test_every_prompt_is_in_one_place_whatever_happens(case: Case) -> None:
    lived(case)


@pytest.mark.parametrize(("stale", "seed"), [("requeue", 1), ("evict", 2)])
def test_a_rollout_that_trains_nothing_old_has_what_it_needs_without_refills(stale: str, seed: int) -> None:
    """What over-sampling leaves is too old for the next rollout, and would fill it."""
    lived(Case(seed, 0, 1, 2 * BATCH, False, 0, stale, "retract", "drop_sample", (), refills=0))


def lived(case: Case) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        run = Run(case, Path(folder), random.Random(case.seed))

        async def score(coins: Random, samples: Sequence[Sample]) -> list[float | RewardFailure]:
            return await run.score(coins, samples)

        patch.setattr(group_scheduler, "ABORT_LIMIT_S", group_scheduler.ABORT_LIMIT_S)
        patch.setattr(Random, "score", score)
        while run.step < ROLLOUTS:
            asyncio.run(run.live())


class Regular(random.Random):
    """Dice without chance: a request is always answered whole, the first one first, and each step is saved."""

    def random(self) -> float:
        return 0.29

    def randrange(self, *bounds: Any) -> int:
        return min(1, bounds[-1] - 1)

    def choice(self, seq: Any) -> Any:
        return seq[0]


class Uneventful(Run):
    """The answers of its engine depend on the prompt and on nothing else; the weights stay those of version 0."""

    shards: dict[int, Any]

    async def until(self, step: int) -> None:
        """One process: from the last checkpoint until it has trained ``step`` rollouts; then it is gone."""
        engine = Engine(self.dice)
        sampler = self.sampler(engine)
        try:
            if self.saved is not None:
                self.step = self.saved[0]
                sampler.restore(json.loads(self.saved[1]))
            self.publish(sampler, engine)
            while self.step < step:
                await self.one_step(sampler, engine)
        finally:
            await sampler.close()

    def publish(self, sampler: TrainSampler, engine: Engine) -> None:
        sampler.published(self.step)

    async def driven(self, engine: Engine, work: Coroutine[Any, Any, T]) -> T:
        found = await super().driven(engine, work)
        self.shards[self.step] = found
        return found

    def left(self) -> dict[str, Any]:
        """What it trained, and what is in its files."""
        files = sorted((self.folder / "samples").glob("*.jsonl"))
        shards = {step: [vars_of(shard) for shard in found.shards] for step, found in self.shards.items()}
        return {"shards": shards} | {path.name: path.read_text().splitlines() for path in files}


def vars_of(shard: Any) -> dict[str, Any]:
    """The fields of a shard, arrays bit for bit."""
    values = {one.name: getattr(shard, one.name) for one in fields(shard)}
    return {name: value.tobytes() if isinstance(value, np.ndarray) else repr(value) for name, value in values.items()}


@pytest.mark.parametrize("killed_at", [1, 3, 4])
@pytest.mark.parametrize(
    ("ahead", "fetch", "partial"), [(0, None, False), (0, 2 * BATCH, True), (2, None, False), (2, None, True)]
)
def test_after_a_resume_come_the_groups_and_shards_that_come_without_one(
    ahead: int, fetch: int | None, partial: bool, killed_at: int
) -> None:
    case = Case(0, ahead, 1, fetch, partial, None, "requeue", "retract", "drop_sample", ())
    left = []
    for stops in ([ROLLOUTS], [killed_at, ROLLOUTS]):
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            run = Uneventful(case, Path(folder), Regular())
            run.shards = {}

            async def score(coins: Random, samples: Sequence[Sample]) -> list[float]:
                return [float(coins._coin(sample)) for sample in samples]

            patch.setattr(Random, "score", score)
            for stop in stops:
                asyncio.run(run.until(stop))
            left.append(run.left())
    assert left[0].keys() == left[1].keys()
    if ahead:  # what was in flight at the kill is put back and taken again, which the journal says
        assert any("back" in line for line in left[1].pop("taken.jsonl"))
        assert left[0].pop("taken.jsonl")
    for name, whole in left[0].items():
        assert left[1][name] == whole, name
