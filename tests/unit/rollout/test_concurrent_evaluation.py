"""Concurrent evaluations: one at a time, of weights that do not change meanwhile, reported once. Ray is faked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint.folder import RunState
from slime_core.config.learning import LearnerConfig, WeightsConfig
from slime_core.config.sampling import EvalConfig, RolloutConfig
from slime_core.config.schema import CheckpointConfig, ClusterConfig, RunConfig
from slime_core.contracts import Place
from slime_core.launch import _has_lost_evaluation
from slime_core.loop import train
from slime_core.plugins.activation import activate
from slime_core.plugins.lifecycle import Hooks
from slime_core.rollout import actor
from slime_core.rollout.actor import ConcurrentEvalSampler, SampledShards, SamplerActor, eval_sampler_settings
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import SamplerCheckpoint
from slime_core.runtime.device_pool import DevicePool
from slime_core.runtime.waiting import Termination
from slime_core.track.record import RunRecord
from slime_core.track.track import Track


@dataclass(eq=False)
class Started:
    """A call of the sampler of evaluations; ends when it is waited for, or when a test says so."""

    method: str
    step: int
    version: int
    ended: bool = False


@dataclass
class Play:
    """A fake of learner, engines and both samplers that records the order of calls. An evaluation measures the
    version that its engines hold at its end, so weights that change meanwhile fail its test."""

    own: bool = True
    devices: DevicePool = field(default_factory=DevicePool)
    calls: list[str] = field(default_factory=list)
    monitors: list[Any] = field(default_factory=list)
    ends_during: int | None = None
    served: int = -1
    eval_served: int = -1
    under_way: Started | None = None

    def sample(self, rollout: int) -> SampledShards:
        self.calls.append(f"sample {rollout}")
        if self.under_way is not None and rollout == self.ends_during:
            self.under_way.ended = True
        return SampledShards(["shard"], {"rollout/raw_reward": 0.5})

    def published(self, version: int) -> None:
        self.calls.append(f"published {version}")

    def state(self) -> SamplerCheckpoint:
        self.calls.append("state")
        return SamplerCheckpoint({}, {})

    def close(self) -> None:
        self.calls.append("close")

    def train(self, shards: list[Any]) -> dict[str, float]:
        self.calls.append("train")
        return {}

    def publish(self, version: int) -> None:
        self.calls.append(f"publish {version}")
        self.served = version

    def publish_for_evaluation(self, version: int) -> None:
        assert self.under_way is None, "weights change under an evaluation"
        self.calls.append(f"send {version}")
        self.eval_served = version

    def save(self, state: RunState) -> None:
        self.calls.append(f"save {state.step}")

    def wait_for_save(self, *, required: bool = False) -> None: ...

    def wait_for_save_after_failure(self) -> None: ...

    def start(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self.calls.append(" ".join([method.__name__, *map(str, arguments)]))
        if method is not SamplerActor.evaluate:
            return Started(method.__name__, 0, 0)
        assert self.under_way is None, "two evaluations at once"
        self.under_way = Started(method.__name__, arguments[0], self._held)
        return self.under_way

    @property
    def _held(self) -> int:
        return self.eval_served if self.own else self.served

    def wait(self, calls: list[Started], *, what: str) -> list[Any]:
        (one,) = calls
        if one.method != "evaluate":
            return [None]
        assert self.monitors == [one]
        assert self._held == one.version, f"it began on weights {one.version} and ended on {self._held}"
        self.calls.append(f"ended {one.step}")
        self.under_way = None
        return [{"eval/sums": one.version / 10}]


@pytest.fixture(autouse=True)
def calls_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "has_ended", lambda call: call.ended)


def config(*, own: bool = True, steps: int = 3, interval: int = 1, save: int | None = None, **more: Any) -> RunConfig:
    place = {"eval_num_gpus": 1} if own else {"eval_interleaved": True}
    return RunConfig(
        rollout=RolloutConfig(num_rollout=steps),
        weights=WeightsConfig(update_weights_interval=interval),
        checkpoint=CheckpointConfig(save_interval=save),
        cluster=ClusterConfig(**more),
        eval=EvalConfig(eval_interval=2, eval_prompt_data=(("sums", Path("sums.jsonl")),), **place),
    )


def run(play: Play, settings: RunConfig, folder: Path, state: RunState | None = None) -> list[dict[str, float]]:
    """The rows of the loop with ``play``."""
    hooks = Hooks(activate(()).registry, place=Place.DRIVER, options={})
    with Track(RunRecord(folder / "run")) as track:
        publish = play.publish_for_evaluation if play.own else None
        sampler = ConcurrentEvalSampler(
            play,  # type: ignore[arg-type]
            play,  # type: ignore[arg-type]
            config=settings,
            report=track.evaluation,
            wait=play.wait,
            monitors=play.monitors,
            publish=publish,
        )
        state = state or RunState()
        common: Any = {"config": settings, "track": track, "devices": play.devices, "hooks": hooks}
        train(play, sampler, state=state, stop=Termination(), **common)
        sampler.close()
    assert play.monitors == []
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def scores(rows: list[dict[str, float]]) -> list[tuple[float, float, float]]:
    found = [row for row in rows if "eval/sums" in row]
    return [(row["step"], row["eval/sums"], row["eval/weight_version"]) for row in found]


def test_engines_for_evaluation_get_the_weights_when_one_starts_and_training_continues(tmp_path: Path) -> None:
    play = Play()
    rows = run(play, config(), tmp_path)
    assert play.calls == [
        *("publish 0", "published 0", "send 0", "evaluate 0"),
        *("sample 0", "train", "publish 1", "published 1"),
        *("sample 1", "train", "publish 2", "published 2", "ended 0", "send 2", "evaluate 2"),
        *("sample 2", "train", "ended 2", "state", "save 3", "publish 3", "published 3", "send 3", "evaluate 3"),
        *("ended 3", "close", "close"),
    ]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert scores(rows) == [(0, 0.0, 0.0), (2, 0.2, 2.0), (3, 0.3, 3.0)]


def test_a_finished_evaluation_is_reported_with_the_next_rollout_without_a_wait(tmp_path: Path) -> None:
    play = Play(ends_during=0)
    rows = run(play, config(), tmp_path)
    assert play.calls[4:7] == ["sample 0", "ended 0", "train"]
    assert scores(rows)[0] == (0, 0.0, 0.0)


def test_interleaved_evaluation_delays_the_publication_until_it_has_ended(tmp_path: Path) -> None:
    play = Play(own=False)
    rows = run(play, config(own=False), tmp_path)
    assert play.calls == [
        *("publish 0", "published 0", "evaluate 0"),
        *("sample 0", "train", "ended 0", "publish 1", "published 1"),
        *("sample 1", "train", "publish 2", "published 2", "evaluate 2"),
        *("sample 2", "train", "ended 2", "state", "save 3", "publish 3", "published 3", "evaluate 3"),
        *("ended 3", "close", "close"),
    ]
    assert scores(rows) == [(0, 0.0, 0.0), (2, 0.2, 2.0), (3, 0.3, 3.0)]


def test_interleaved_between_rare_publications_the_served_version_is_named(tmp_path: Path) -> None:
    play = Play(own=False)
    rows = run(play, config(own=False, interval=3, steps=4), tmp_path)
    assert scores(rows) == [(0, 0.0, 0.0), (2, 0.0, 0.0), (4, 0.3, 3.0)]
    # The one after two steps went on until the third was to be published.
    assert play.calls.index("ended 2") == play.calls.index("publish 3") - 1


def test_interleaved_evaluation_on_shared_devices_ends_before_the_learner_gets_them(tmp_path: Path) -> None:
    play = Play(own=False)
    run(play, config(own=False, colocate=True), tmp_path)
    assert play.calls[3:6] == ["sample 0", "ended 0", "train"]


def test_a_checkpoint_waits_for_the_evaluation_in_flight(tmp_path: Path) -> None:
    play = Play()
    rows = run(play, config(save=1, steps=2), tmp_path)
    assert play.calls[4:9] == ["sample 0", "train", "ended 0", "state", "save 1"]
    assert scores(rows) == [(0, 0.0, 0.0), (2, 0.2, 2.0)]


def test_a_resumed_run_measures_its_start_weights_and_no_version_twice(tmp_path: Path) -> None:
    rows = run(Play(), config(), tmp_path, RunState(2))
    assert scores(rows) == [(2, 0.2, 2.0), (3, 0.3, 3.0)]


def test_every_row_says_what_waiting_for_evaluations_has_cost(tmp_path: Path) -> None:
    rows = run(Play(own=False), config(own=False), tmp_path)
    waited = [row["perf/eval_waited_time"] for row in rows[:3]]
    assert waited[0] == 0.0
    assert waited[1] > 0.0
    assert waited[2] == 0.0
    assert rows[3].keys() == {"step", "eval/sums", "eval/weight_version"}


def pending(folder: Path, step: int, *, evaluated: bool) -> Track:
    """The track of a run that is resumed at ``step``, whose folder has that row."""
    with Track(RunRecord(folder)) as track:
        for one in range(step + 1):
            with track.step(one):
                pass
        if evaluated:
            track.evaluation(step, {"eval/sums": 0.5})
    record = RunRecord(folder, resumed_step=step)
    record.begin()
    return Track(record)


@pytest.mark.parametrize(("step", "evaluated", "owed"), [(2, False, True), (2, True, False), (1, False, False)])
def test_a_resumed_run_repeats_an_evaluation_that_was_lost(
    tmp_path: Path, step: int, evaluated: bool, owed: bool
) -> None:
    with pending(tmp_path, step, evaluated=evaluated) as track:
        assert _has_lost_evaluation(config(), track, step) is owed


def test_the_sampler_of_evaluations_asks_the_engines_that_only_evaluate(tmp_path: Path) -> None:
    run_config = RunConfig(learner=LearnerConfig(use_rollout_routing_replay=True))
    log = tmp_path / "rewards.log"
    policy = SamplerSettings(
        run_config, tmp_path, tmp_path, "http://router", rewards_log=log, engine_urls=("http://e",)
    )
    shared = eval_sampler_settings(policy, url="", num_engines=0)
    assert (shared.router_url, shared.engine_urls, shared.config) == ("http://router", ("http://e",), run_config)
    assert shared.rewards_log == tmp_path / "rewards-eval.log"
    alone = eval_sampler_settings(policy, url="http://eval", num_engines=2)
    assert (alone.router_url, alone.engine_urls, alone.num_engines) == ("http://eval", (), 2)
    assert not alone.config.learner.use_rollout_routing_replay
