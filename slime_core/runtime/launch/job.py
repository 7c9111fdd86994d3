"""What to run, and the settings of each of its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.learner.settings import LearnerSettings
from slime_core.modeling.layout import ParallelLayout
from slime_core.plugins.activation import Registry
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.selection import policy_loss
from slime_core.rollout.engines.fleet import EngineFleet
from slime_core.rollout.sampler_components import SamplerSettings
from slime_core.runtime.layout import Device
from slime_core.runtime.machine import cpu_threads
from slime_core.weights.publisher import PublisherSettings

__all__ = ["Job", "cpu_environment", "learner_settings", "publisher_settings", "sampler_settings"]


@dataclass(frozen=True, slots=True)
class Job:
    """What to run: the settings, the plugins and the folders.

    Arguments:
        config: all settings.
        registry, manifest: the activated plugins.
        options: plugin name -> its options object.
        architecture: the start weights' architecture string.
        logs: folder of the engines' and the router's logs.
        samples: folder of readable samples; None: none are written.
        resumed_step: training steps done when this start of the run began.
    """

    config: RunConfig
    registry: Registry
    manifest: Manifest
    architecture: str
    logs: Path
    samples: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int = 0

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.logs.parent

    @property
    def model(self) -> Path:
        """Hugging Face folder with the start weights."""
        return self.config.model.hf_checkpoint or ARITHMETIC / "model"

    @property
    def prompts(self) -> Path:
        """The training prompts."""
        return self.config.data.prompt_data or ARITHMETIC / "data" / "train.jsonl"

    @property
    def weights_folder(self) -> Path:
        """Folder of weights that travel as files; removed at the end of the run, however it ends."""
        shared, run = self.config.weights.update_weight_disk_dir, self.folder
        return run / "weights" if shared is None else shared / f"{run.name}-{os.getpid()}"


def learner_settings(job: Job, device: Device) -> LearnerSettings:
    """Settings of every rank of the learner, on the device that the run uses."""
    return LearnerSettings(
        config=_on(device, job.config),
        folder=job.model,
        architecture=job.architecture,
        policy_loss=policy_loss(job.config, job.registry),
        options=dict(job.options),
        num_steps=job.config.rollout.num_rollout * job.config.steps_per_rollout,
        layout=ParallelLayout.of(job.config.parallel),
        num_threads=cpu_threads() if device == "cpu" else 0,
        run_folder=job.folder,
        resumed_step=job.resumed_step,
    )


def sampler_settings(job: Job, servers: EngineFleet, device: Device, *, trains: bool) -> SamplerSettings:
    """Settings of the sampler; waits for the router and for auxiliary models."""
    return SamplerSettings(
        config=_on(device, job.config),
        folder=job.model,
        prompt_data=job.prompts,
        router_url=servers.policy.url(),
        num_ranks=job.config.num_data_ranks,
        options=dict(job.options),
        samples_folder=job.samples,
        rewards_log=job.logs / "rewards.log",
        bad_rows=job.logs / "bad-rows.log",
        num_engines=job.config.num_engines,
        trains=trains,
        model_urls=servers.model_urls(),
        engine_urls=servers.direct_urls(),
        run_folder=job.folder,
        resumed_step=job.resumed_step,
    )


def publisher_settings(
    job: Job, ranks: tuple[int, ...], gpus: Sequence[tuple[str, ...]], *, device: Device, address: str | None
) -> PublisherSettings:
    """How weights travel to engines.

    Arguments:
        ranks: processes of each engine.
        gpus: of each engine; empty where it has none.
        address: of the head node; None: the cluster is this machine.
    """
    config = job.config
    return PublisherSettings(
        model=job.model,
        dtype="bfloat16" if config.model.bf16 else "float32",
        bytes_limit=config.weights.update_weight_buffer_size,
        backend="nccl" if device == "gpu" else "gloo",
        devices_per_engine=ranks,
        address=address or "127.0.0.1",
        transport=config.transport,
        disk_folder=job.weights_folder,
        engine_gpus=tuple(gpus) if all(gpus) and len(gpus) == len(ranks) else (),
        pause_mode=config.rollout.pause_generation_mode,
        resumes=not config.cluster.colocate,
    )


def cpu_environment(device: Device) -> dict[str, str]:
    """Variables of a process that computes on ``device``."""
    # A CPU run on a machine with GPUs must not see them, because torch would use them.
    return {"OMP_NUM_THREADS": str(cpu_threads()), "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


def _on(device: Device, config: RunConfig) -> RunConfig:
    """``config`` with ``device`` resolved to the one that the run uses."""
    cluster = config.cluster.model_copy(update={"device": "cuda" if device == "gpu" else "cpu"})
    return config.model_copy(update={"cluster": cluster})
