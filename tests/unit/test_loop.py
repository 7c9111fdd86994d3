from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import ANY

import pytest

from slime_core.checkpoint.folder import RunState
from slime_core.config.learning import WeightsConfig
from slime_core.config.sampling import EvalConfig, RolloutConfig
from slime_core.config.schema import CheckpointConfig, RunConfig
from slime_core.contracts import Place
from slime_core.errors import NonFiniteError
from slime_core.loop import train
from slime_core.plugins.activation import activate
from slime_core.plugins.lifecycle import Hooks
from slime_core.runtime.device_pool import DevicePool
from slime_core.runtime.waiting import Terminated, Termination
from slime_core.track.record import RunRecord
from slime_core.track.track import Track


@dataclass
class Sampled:
    refs: list[Any]
    metrics: dict[str, float]


@dataclass
class State:
    cursor: dict[str, Any]
    plugin_states: dict[str, Any]


@dataclass
class Diary:
    """Plays learner and sampler, and writes down who was called, with what, and who had the devices."""

    devices: DevicePool = field(default_factory=DevicePool)
    calls: list[str] = field(default_factory=list)
    owners: dict[str, str | None] = field(default_factory=dict)
    saved: list[RunState] = field(default_factory=list)
    fails_at: int | None = None
    states: dict[str, Any] = field(default_factory=dict)
    sampled: int = 0
    served: list[int] = field(default_factory=list)
    unpublished: int = 0
    killed_at: str = ""

    def sample(self, rollout: int) -> Sampled:
        self._note("sample", rollout)
        self.sampled = rollout + 1
        return Sampled([f"shard-{rollout}"], {"rollout/raw_reward": float(rollout)})

    def train(self, shards: list[Any]) -> dict[str, float]:
        self._note("train", shards[0])
        if shards == [f"shard-{self.fails_at}"]:
            raise NonFiniteError("loss is NaN")
        return {"train/loss": 0.5}

    def publish(self, version: int) -> None:
        self._note("publish", version)

    def save(self, state: RunState) -> None:
        self._note("save", state.step)
        self.saved.append(state)

    def wait_for_save(self, *, required: bool = False) -> None:
        self.calls.append("wait for it, required" if required else "wait for it")

    def wait_for_save_after_failure(self) -> None:
        self.calls.append("wait, after a failure")

    def evaluate(self, step: int) -> dict[str, float]:
        self._note("evaluate", step)
        return {"eval/sums": step / 10}

    def before_publish(self) -> None:
        self.unpublished = len(self.calls)

    def published(self, version: int) -> None:
        assert self.unpublished == len(self.calls) - 1
        assert self.calls[-1] == f"publish {version}"
        self.served.append(version)

    def state(self) -> State:
        return State({"next": 10 * self.sampled}, self.states)

    def _note(self, what: str, detail: Any) -> None:
        self.calls.append(f"{what} {detail}")
        if self.calls[-1] == self.killed_at:
            os.kill(os.getpid(), signal.SIGTERM)
        self.owners[what] = self.devices.owner


def config(*, interval: int = 1, save: int | None = 2, evaluate: int | None = 2, steps: int = 3, **more) -> RunConfig:
    return RunConfig(
        rollout=RolloutConfig(num_rollout=steps),
        weights=WeightsConfig(update_weights_interval=interval),
        checkpoint=CheckpointConfig(save_interval=save),
        eval=EvalConfig(eval_interval=evaluate, **{"eval_prompt_data": (("sums", "sums.jsonl"),), **more}),
    )


ROW = {"train/loss": 0.5, "rollout/raw_reward": ANY, "perf/rollout_time": ANY, "perf/train_time": ANY}
"""The metrics of a step when it is saved."""


@pytest.fixture
def run(tmp_path):
    def start(
        diary: Diary,
        settings: RunConfig,
        state: RunState | None = None,
        plugins: tuple[str, ...] = (),
        stop: Termination | None = None,
    ) -> RunState:
        hooks = Hooks(activate(plugins).registry, place=Place.DRIVER, options={})
        with Track(RunRecord(tmp_path / "run")) as track:
            return train(
                diary,
                diary,
                config=settings,
                state=state or RunState(),
                track=track,
                devices=diary.devices,
                hooks=hooks,
                stop=stop or Termination(),
            )

    return start


STEPS = [
    ["sample 0", "train shard-0"],
    ["sample 1", "train shard-1", "save 2"],
    ["sample 2", "train shard-2", "save 3"],
]
REQUIRED = "wait for it, required"


@pytest.mark.parametrize(
    ("settings", "resumed", "calls"),
    [
        (
            {},
            0,
            [
                *("publish 0", "evaluate 0", *STEPS[0], "publish 1", *STEPS[1], "publish 2", "evaluate 2"),
                *(*STEPS[2], REQUIRED, "publish 3", "evaluate 3"),
            ],
        ),
        (
            {"interval": 2},
            0,
            [
                *("publish 0", "evaluate 0", *STEPS[0], *STEPS[1], "publish 2", "evaluate 2"),
                *(*STEPS[2], REQUIRED, "evaluate 3"),
            ],
        ),
        ({"interval": 0, "evaluate": None}, 0, ["publish 0", *STEPS[0], *STEPS[1], *STEPS[2], REQUIRED]),
        ({}, 2, ["publish 2", "evaluate 2", *STEPS[2], REQUIRED, "publish 3", "evaluate 3"]),
        ({}, 3, ["publish 3", "evaluate 3"]),
        (
            {"save": None, "skip_eval_before_train": True, "steps": 1},
            0,
            ["publish 0", *STEPS[0], "save 1", REQUIRED, "publish 1", "evaluate 1"],
        ),
    ],
    ids=["every step", "every other step", "only at the start", "resumed", "finished", "saved at the end"],
)
def test_what_is_called_in_which_order(run, settings, resumed, calls):
    diary = Diary()
    run(diary, config(**settings), RunState(resumed, cursor={"next": 10 * resumed}))
    assert diary.calls == calls
    assert diary.served == [int(call.split()[1]) for call in calls if call.startswith("publish")]


def test_a_save_that_is_not_asynchronous_is_waited_for_and_only_the_last_one_is_required(run):
    diary = Diary()
    settings = config(interval=0, evaluate=None)
    run(diary, settings.model_copy(update={"checkpoint": CheckpointConfig(save_interval=2, async_save=False)}))
    waits = [place for place, call in enumerate(diary.calls) if call.startswith("wait")]
    assert [diary.calls[place - 1 : place + 1] for place in waits] == [
        ["save 2", "wait for it"],
        ["save 3", "wait for it, required"],
    ]


def test_a_checkpoint_holds_the_cursor_after_the_trained_rollout(run):
    diary = Diary()
    end = run(diary, config(), RunState(plugins={"version": 1}))
    states = {"driver": {}, "sampler": {}}
    assert diary.saved == [
        RunState(2, {"next": 20}, {"version": 1}, states, ROW),
        RunState(3, {"next": 30}, {"version": 1}, states, ROW),
    ]
    assert end == diary.saved[-1]


def test_a_checkpoint_holds_what_plugins_of_driver_and_sampler_return(run, tmp_path):
    plugin = tmp_path / "toy.py"
    plugin.write_text(
        "from slime_core import hookimpl\nseen = []\n"
        "@hookimpl\ndef slime_after_weight_sync(version):\n    seen.append(version)\n"
        "@hookimpl\ndef slime_checkpoint_state(place):\n    return {place: list(seen)}\n"
        "@hookimpl\ndef slime_checkpoint_restore(state):\n    seen[:] = state['driver']\n"
    )
    diary = Diary(states={"toy": {"sampler": 1}})
    run(diary, config(), plugins=(str(plugin),))
    states = [state.plugin_states for state in diary.saved]
    assert states == [
        {"driver": {"toy": {"driver": [0, 1]}}, "sampler": {"toy": {"sampler": 1}}},
        {"driver": {"toy": {"driver": [0, 1, 2]}}, "sampler": {"toy": {"sampler": 1}}},
    ]


def test_an_observer_that_fails_is_counted_in_the_row_of_the_step_and_off_after_three(run, tmp_path):
    plugin = tmp_path / "toy.py"
    plugin.write_text(
        "from slime_core import hookimpl\n"
        "@hookimpl\ndef slime_after_weight_sync(version):\n    raise ValueError(f'version {version}')\n"
    )
    run(Diary(), config(steps=4), plugins=(str(plugin),))
    # The first publication belongs to no step; the row of step 0 counts it with its own.
    assert [row.get("plugins/failures/toy") for row in rows(tmp_path)] == [2.0, 1.0, None, None, None]


def test_training_saving_and_publishing_borrow_the_devices(run):
    diary = Diary()
    run(diary, config())
    assert {what for what, owner in diary.owners.items() if owner == "learner"} == {"train", "save", "publish"}
    assert {what for what, owner in diary.owners.items() if owner is None} == {"sample", "evaluate"}
    assert diary.devices.owner is None


def test_a_failed_step_publishes_and_saves_nothing_and_gives_the_devices_back(run, tmp_path):
    diary = Diary(fails_at=1)
    with pytest.raises(NonFiniteError):
        run(diary, config())
    assert diary.calls[-4:] == ["publish 1", "sample 1", "train shard-1", "wait, after a failure"]
    assert diary.saved == []
    assert diary.devices.owner is None
    assert [row["step"] for row in rows(tmp_path)] == [0]


def test_rows_hold_metrics_times_and_the_evaluation_of_the_weights_they_start_from(run, tmp_path):
    run(Diary(), config())
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [0, 1, 2, 3]
    assert [row.get("eval/sums") for row in found] == [0.0, None, 0.2, 0.3]
    assert [row.get("rollout/raw_reward") for row in found] == [0.0, 1.0, 2.0, None]
    assert [row.get("train/loss") for row in found] == [0.5, 0.5, 0.5, None]
    timed = {name for name in found[1] if name.startswith("perf/")}
    assert timed == {f"perf/{phase}_time" for phase in ("rollout", "train", "save", "update_weights", "step")}


def rows(folder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("killed_at", "last", "partial_rollout"),
    [
        ("sample 1", "sample 1", False),
        ("evaluate 2", "evaluate 2", False),
        # What moves the weights or writes them runs to its end.
        ("train shard-0", "publish 1", False),
        ("publish 1", "publish 1", False),
        ("save 2", "publish 2", False),
        # A rollout that cannot be sampled again continues; the next wait that may end is the evaluation.
        ("sample 0", "publish 2", True),
    ],
)
def test_a_sigterm_ends_the_run_while_it_waits_for_the_sampler(run, killed_at: str, last: str, partial_rollout: bool):
    diary, settings = Diary(killed_at=killed_at), config()
    rollout = settings.rollout.model_copy(update={"partial_rollout": partial_rollout})
    with pytest.raises(Terminated), Termination() as stop:
        run(diary, settings.model_copy(update={"rollout": rollout}), stop=stop)
    assert diary.calls[-1] == last
