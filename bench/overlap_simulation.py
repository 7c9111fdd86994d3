"""Measures overlap without competition for cores: the real loop and sampler, with an engine and a learner that sleep.

    python -m bench.overlap_simulation    a minute; prints a table of docs/rollout.md; fails where a step is too slow

The engine is the fake one of the tests, over HTTP: it answers each prompt group after a while and takes a bounded
number at once, so a rollout takes a given time to generate. The learner sleeps and publishes to the engine.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import slime_core
from slime_core.checkpoint.folder import RunState
from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.contracts import Place
from slime_core.loop import train
from slime_core.plugins.activation import activate
from slime_core.plugins.lifecycle import Hooks
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import SampledRollout, SamplerCheckpoint, TrainSampler
from slime_core.runtime.device_pool import DevicePool
from slime_core.runtime.waiting import Termination
from slime_core.track.record import RunRecord
from slime_core.track.track import Track
from slime_core.weights.engine_control import EngineControl
from slime_testing.fake_engine import FakeEngine

ARITHMETIC = Path(slime_core.__file__).parent / "builtin" / "arithmetic"
GROUPS, AT_ONCE, SAMPLES, STEPS = 16, 4, 4, 10
HALVES = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0))
"""Seconds to generate a rollout, and to train it."""

LIMIT = 1.05
"""Limit on the time of a step, in multiples of its longer part."""


@dataclass
class Shards:
    """The loop's view of a rollout."""

    refs: list[Any]
    metrics: dict[str, float]


class Handle:
    """The sampler in an event loop of its own, as in its actor."""

    def __init__(self, sampler: TrainSampler) -> None:
        self._sampler, self._loop = sampler, asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def sample(self, rollout: int) -> Shards:
        """Return the next rollout."""
        sampled: SampledRollout = self._run(self._sampler.sample(rollout))
        return Shards(sampled.shards, sampled.metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        """Do nothing."""
        return {}

    def before_publish(self) -> None:
        """Do nothing: no evaluation has to end first."""

    def published(self, version: int) -> None:
        """Tell the sampler, in its own thread."""
        self._run(self._later(self._sampler.published, version))

    def state(self) -> SamplerCheckpoint:
        """Return the sampler's state for a checkpoint."""
        state: SamplerCheckpoint = self._run(self._later(self._sampler.state))
        return state

    def close(self) -> None:
        """Close the sampler, and stop its event loop."""
        self._run(self._sampler.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _later(self, method: Any, *arguments: Any) -> Any:
        return method(*arguments)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


@dataclass
class Sleeper:
    """A learner that only sleeps."""

    seconds: float
    control: EngineControl
    saved: list[RunState] = field(default_factory=list)

    def train(self, shards: list[Any]) -> dict[str, float]:
        """Sleep."""
        time.sleep(self.seconds)
        return {}

    def publish(self, version: int) -> None:
        """Pause the engine, publish a version, resume."""
        self.control.pause()
        self.control.set_version(str(version))
        self.control.resume()

    def save(self, state: RunState) -> None:
        """Record the save."""
        self.saved.append(state)

    def wait_for_save(self, *, required: bool = False) -> None:
        """Do nothing: nothing is being written."""

    def wait_for_save_after_failure(self) -> None:
        """Do nothing: nothing is being written."""


def main() -> None:
    """Measure all pairs, and print the table."""
    print("| generating | training | step, synchronous | step, one ahead | of the larger half |\n|---|---|---|---|---|")
    worst = 0.0
    for generating, training in HALVES:
        alone, ahead = (step_time(generating, training, ahead=number) for number in (0, 1))
        ratio = ahead / max(generating, training)
        worst = max(worst, ratio)
        print(f"| {generating:.2f} s | {training:.2f} s | {alone:.2f} s | {ahead:.2f} s | {ratio:.3f} |", flush=True)
    sys.exit(f"a step takes {worst:.3f} times its larger half; accepted: {LIMIT}" if worst > LIMIT else 0)


def step_time(generating: float, training: float, *, ahead: int) -> float:
    """Return the median seconds of a run's middle steps."""
    registry = activate(["datasets", "grpo"]).registry
    rollout = RolloutConfig(
        num_rollout=STEPS,
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=SAMPLES,
        sglang_server_concurrency=AT_ONCE * SAMPLES,
        async_buffer_size=ahead,
        max_staleness=2 * ahead,
        rollout_max_response_len=8,
    )
    config = RunConfig(rollout=rollout, algorithm=AlgorithmConfig(advantage_estimator="grpo"))
    with tempfile.TemporaryDirectory() as folder, FakeEngine() as engine:
        engine.delay_s = generating * AT_ONCE / GROUPS
        prompts = ARITHMETIC / "data" / "train.jsonl"
        sampler = Handle(TrainSampler(SamplerSettings(config, ARITHMETIC / "model", prompts, engine.url), registry))
        control = EngineControl([engine.url])
        with Track(RunRecord(Path(folder) / "run")) as track:
            train(
                Sleeper(training, control),
                sampler,
                config=config,
                state=RunState(),
                track=track,
                devices=DevicePool(),
                hooks=Hooks(registry, place=Place.DRIVER),
                stop=Termination(),
            )
        sampler.close()
        control.close()
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return float(statistics.median(row["perf/step_time"] for row in rows[2:-1]))


if __name__ == "__main__":
    main()
