"""What the sampler is handed, and what it hands out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.plugins.construction import run_view
from slime_core.plugins.contracts import RunView
from slime_core.plugins.lifecycle import PlaceStates
from slime_core.types import TrainBatch

__all__ = ["SampledRollout", "SamplerSettings", "SamplerState"]


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """What the sampler needs to know.

    Arguments:
        config: the run's settings.
        folder: Hugging Face folder with tokenizer and chat template.
        prompt_data: the training prompts.
        router_url: where generation requests go.
        num_ranks: data-parallel ranks of the learner.
        options: plugin name -> its options object.
        samples_folder: where readable samples are written; None: nowhere.
        bad_rows: receives what is wrong with rows that are left out of the prompts; None: nothing does.
        rewards_log: receives what reward models print; None: nothing does.
        num_engines: servers behind the router, for the number of requests in flight.
        model_urls: name -> URL of every model beside the policy.
        engine_urls: of engines that are asked directly; empty: the router is.
        trains: False: only evaluations are asked for, so neither prompts nor an advantage estimator are needed.
        run_folder: of the run; None: there is none.
        resumed_step: training steps done when this start of the run began.
    """

    config: RunConfig
    folder: Path
    prompt_data: Path
    router_url: str
    num_ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    samples_folder: Path | None = None
    rewards_log: Path | None = None
    bad_rows: Path | None = None
    num_engines: int = 1
    trains: bool = True
    model_urls: dict[str, str] = field(default_factory=dict)
    engine_urls: tuple[str, ...] = ()
    run_folder: Path | None = None
    resumed_step: int = 0

    @property
    def run(self) -> RunView:
        """What the sampler's components are made with."""
        return run_view(
            self.config,
            self.options,
            model_folder=self.folder,
            folder=self.run_folder,
            resumed_step=self.resumed_step,
            models=self.model_urls,
        )


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """One rollout: a shard a data-parallel rank, and what its samples look like; ``warnings`` are for people."""

    shards: list[TrainBatch]
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SamplerState:
    """What a checkpoint holds of the sampler, all of one moment.

    Arguments:
        cursor: the data source, and every group that was taken from it and not trained, JSON-ready.
        plugin_states: what the plugins of this process want to find again.
    """

    cursor: dict[str, Any]
    plugin_states: PlaceStates
