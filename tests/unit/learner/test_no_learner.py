"""The loop without a learner, or without engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint.folder import RunState
from slime_core.config.sampling import EvalConfig, RolloutConfig
from slime_core.config.schema import DebugConfig, RunConfig, WatchConfig
from slime_core.contracts import Place
from slime_core.launch import _loop_config
from slime_core.learner.background_save import SaveSettings
from slime_core.learner.handle import LearnerHandle, NoLearner
from slime_core.loop import train
from slime_core.plugins.activation import activate
from slime_core.plugins.lifecycle import Hooks
from slime_core.rollout.actor import SampledShards
from slime_core.rollout.sampler import SamplerCheckpoint
from slime_core.runtime.actors import ActorGroup
from slime_core.runtime.device_pool import DevicePool
from slime_core.runtime.waiting import RunWait, Termination
from slime_core.track.failures import Failures
from slime_core.track.record import RunRecord, read_rows
from slime_core.track.track import Track


class Generating:
    """The sampler, as far as the loop asks it."""

    def sample(self, rollout: int) -> Any:
        return SampledShards(["shard"], {"rollout/raw_reward": 0.5})

    def evaluate(self, step: int) -> dict[str, float]:
        return {"eval/sums": 0.25}

    def before_publish(self) -> None:
        """Nothing is under way."""

    def published(self, version: int) -> None:
        """Nothing is generated ahead."""

    def state(self) -> SamplerCheckpoint:
        return SamplerCheckpoint({}, {})


@pytest.mark.parametrize("load", [None, Path("r-{rollout_id}.jsonl")])
def test_a_run_of_one_half_publishes_only_at_the_start(load: Path | None) -> None:
    debug = DebugConfig(debug_rollout_only=load is None, load_debug_rollout_data=load)
    assert _loop_config(RunConfig(debug=debug)).weights.update_weights_interval == 0
    assert _loop_config(RunConfig()) == RunConfig()


def test_without_a_learner_the_loop_samples_evaluates_and_knows_whose_weights_it_measured(tmp_path: Path) -> None:
    config = RunConfig(
        rollout=RolloutConfig(num_rollout=2),
        eval=EvalConfig(eval_interval=2, eval_prompt_data=(("sums", Path("sums.jsonl")),)),
        debug=DebugConfig(debug_rollout_only=True),
    )
    hooks = Hooks(activate(()).registry, place=Place.DRIVER, options={})
    with Track(RunRecord(tmp_path / "run")) as track:
        end = train(
            NoLearner(),
            Generating(),
            config=_loop_config(config),
            state=RunState(),
            track=track,
            devices=DevicePool(),
            hooks=hooks,
            stop=Termination(),
        )
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert end.step == 2
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["rollout/raw_reward"] for row in rows[:2]] == [0.5, 0.5]
    assert [rows[place]["eval/weight_version"] for place in (0, 2)] == [0, 0]
    assert not any(name.startswith("train/") for row in rows for name in row)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_without_engines_no_rank_is_called_to_publish() -> None:
    # A group without ranks: publishing would fail, because it reads the result of the first.
    learner = LearnerHandle(
        ActorGroup(()),
        wait=RunWait(WatchConfig(), print),
        saving=SaveSettings(Path("checkpoints"), Path("model")),
        data_ranks=[],
        checks_equal=True,
        warn=print,
        failures=Failures(),
        has_engines=False,
    )
    learner.publish(0)
