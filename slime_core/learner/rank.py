"""One process of the learner: builds its part of the model, trains shards, and hands weights out.

A plain class, so that a recipe can use it without Ray; :mod:`slime_core.learner.actor` makes an actor of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.config.schema import RunConfig
from slime_core.config.settings import core_values
from slime_core.cpu.accelerator import accelerator
from slime_core.errors import NonFiniteError, RunError, SlimeError
from slime_core.learner.custom import Custom
from slime_core.learner.layout import ParallelLayout, initialize
from slime_core.learner.parity import ParityGate
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Kind
from slime_core.plugins.contracts import LearnerInfo, Place, TrainStep
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.registry import Registry
from slime_core.types import TrainBatch
from slime_core.weights.group import listening_store

__all__ = ["Learner", "LearnerSettings"]

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Limit of one collective operation; torch's own default for gloo is half an hour."""


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What a learner rank needs to know.

    Arguments:
        config: the run's settings.
        folder: Hugging Face folder with the start weights.
        architecture: the checkpoint's architecture string; a plugin's model spec fits it.
        policy_loss: name of the policy loss component.
        options: plugin name -> its options object.
        num_steps: optimizer steps of the whole run, for the schedule.
        rank, world_size: of the process among the learner's.
        address: ``host:port`` where rank 0 listens for the others.
        num_threads: threads of one operation on a CPU; 0: torch decides.
    """

    config: RunConfig
    folder: Path
    architecture: str
    policy_loss: str
    options: dict[str, Any]
    num_steps: int
    rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1:29500"
    num_threads: int = 0
    layout: ParallelLayout = field(default_factory=ParallelLayout)


class Learner:
    """The actor, its optimizer, and the reference if one is needed. Methods are collective over all ranks."""

    def __init__(self, settings: LearnerSettings, registry: Registry) -> None:
        """Join the process group and build the model with the start weights.

        Raises:
            ConfigError: the model cannot be built as asked.
            PluginError: a function that the run names by path is not there, or cannot be called as it has to be.
            CheckpointError: the weights do not fit the model.
            PluginError: a hook, a component or the model spec failed.
        """
        from slime_core.cpu import megatron

        megatron.install()
        from slime_core.learner.components import build_model_spec, who_builds

        config = settings.config
        self._settings, self._config = settings, config
        self.custom = Custom(settings.options)
        self.device = _prepare_process(settings)
        where = f"learner rank {settings.rank}"
        self.hooks = LifecycleHooks(registry, place=Place.RANK, options=settings.options, where=where)
        self._info = LearnerInfo(settings.rank, settings.world_size, core_values(config))
        self.hooks.call("slime_learner_start", learner=self._info)
        self._bf16 = config.model.bf16
        self._spec = build_model_spec(registry, settings.architecture, options=settings.options, custom=self.custom)
        self._builder = who_builds(registry, settings.architecture)
        self.chunks = self._build(settings)
        self._objective, self._estimation = self._components(registry)
        self._postprocess = self.custom.find("rollout_data_postprocess_path")
        self.parity = ParityGate(config.weights, bf16=self._bf16)
        traits: Any = registry.find(Kind.POLICY_LOSS, settings.policy_loss).traits
        self._reads = traits.reads
        self._trainable()
        self._bed: Any = None
        self._roles = self._remember_reference()

    # --- Building ----------------------------------------------------------------------------------------------------

    def _build(self, settings: LearnerSettings) -> list[torch.nn.Module]:
        from transformers import AutoConfig

        trusted = settings.config.model.trust_remote_code
        hf_config = AutoConfig.from_pretrained(settings.folder, trust_remote_code=trusted)
        dtype = torch.bfloat16 if self._bf16 else torch.float32
        overrides = {"calculate_per_token_loss": True, **settings.config.megatron.transformer}
        with boundary(self._builder, "building the model", locate=True, passes=(SlimeError,)):
            chunks: list[torch.nn.Module] = self._spec.build(
                hf_config, dtype=dtype, parallel=settings.layout, overrides=overrides
            )
        self._load_weights(chunks, settings.folder)
        return chunks

    def _load_weights(self, chunks: list[torch.nn.Module], folder: Path) -> None:
        with boundary(self._builder, f"loading weights of {folder}", locate=True, passes=(SlimeError,)):
            self._spec.load_weights(chunks, folder)

    def _components(self, registry: Registry) -> tuple[Any, Any]:
        from megatron.core import parallel_state

        from slime_core.learner.components import build_estimation, build_objective

        settings = self._settings
        shared = parallel_state.get_context_parallel_group() if settings.layout.context > 1 else None
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=False)
        algorithm, options = settings.config.algorithm, settings.options
        return (
            build_objective(
                registry, settings.policy_loss, algorithm, options=options, context_group=shared, custom=self.custom
            ),
            build_estimation(registry, algorithm, options=options, data_group=replicas, context_group=shared),
        )

    def _trainable(self) -> None:
        from slime_core.learner.optimizer import build_optimizer, build_schedule, wrap

        self.model = wrap(self.chunks, bf16=self._bf16)
        config = self._config
        self.optimizer = build_optimizer(
            self.model, config.optimizer, bf16=self._bf16, overrides=config.megatron.optimizer
        )
        self.schedule = build_schedule(self.optimizer, config.optimizer, num_steps=self._settings.num_steps)
        self._info = replace(self._info, model=tuple(self.model), optimizer=self.optimizer, schedule=self.schedule)

    def _remember_reference(self) -> Any:
        from slime_core.learner.roles import Roles

        roles = Roles(self.chunks)
        if not self._reads_reference:
            return roles
        other = self._config.model.ref_load
        if other is None:
            roles.remember("reference")
            return roles
        roles.remember("actor")
        self._load_weights(self.chunks, other)
        roles.remember("reference")
        roles.restore("actor")
        return roles

    # --- Training ----------------------------------------------------------------------------------------------------

    def train(self, shard: TrainBatch) -> dict[str, float]:
        """Run every optimizer step of ``shard``; only numbers come back.

        Returns:
            ``train/...`` metrics, averaged over the optimizer steps, and ``parity/...`` metrics where it was due; the
            same on every rank.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite; the weights of this process are spoilt from then
            on.
            ParityError: learner and engines give the same tokens other log-probabilities; nothing was trained.
            PluginError: a hook failed.
        """
        from slime_core.learner.passes import log_probs
        from slime_core.learner.totals import average

        steps = self._cut(shard)
        self.parity.mark(shard, steps[0])
        every = [micro for step in steps for micro in step]
        if self._reads_reference:
            with self._roles.playing("reference"):
                self._before_log_probs("reference")
                for micro, values_U in zip(every, log_probs(self.model, every), strict=False):
                    micro.ref_log_probs_U = values_U
        if self._reads_old_log_probs(len(steps)):
            self._before_log_probs("actor")
            for micro, values_U in zip(every, log_probs(self.model, every), strict=False):
                micro.old_log_probs_U = values_U
        self._estimate(shard, every)
        if self._postprocess is not None:
            self._postprocess(shard, steps)
        results = [self._hooked_step(step, TrainStep(shard.rollout, i, self._info)) for i, step in enumerate(steps)]
        return {f"train/{name}": value for name, value in average(results).items()} | self.parity.report()

    @property
    def _reads_reference(self) -> bool:
        return self._objective.uses_reference or self._estimation_reads("ref_log_probs")

    def _reads_old_log_probs(self, num_steps: int) -> bool:
        # With one step the current log-probabilities are the old ones; the loss needs no second pass for those.
        of_loss = "old_log_probs" in self._reads or self._objective.corrects
        named = self._objective.of_logits is not None  # a loss that is named by path finds them in its batch
        return named or (num_steps > 1 and of_loss) or self._estimation_reads("log_probs")

    def _estimation_reads(self, column: str) -> bool:
        return self._estimation is not None and column in self._estimation.reads

    def _estimate(self, shard: TrainBatch, micro_batches: list[Any]) -> None:
        from megatron.core import parallel_state

        # Earlier pipeline stages know no log-probabilities and compute no loss.
        if self._estimation is not None and parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self._estimation.fill(shard, micro_batches)

    def _cut(self, shard: TrainBatch) -> list[list[Any]]:
        from megatron.core import parallel_state

        from slime_core.learner.batches import cut
        from slime_core.learner.passes import fill_up

        layout, context_rank = self._settings.layout, parallel_state.get_context_parallel_rank()
        steps = cut(shard, device=self.device, layout=layout, context_rank=context_rank)
        fill_up(steps, layout)
        return steps

    def _before_log_probs(self, role: str) -> None:
        self.hooks.call("slime_before_log_probs", role=role, learner=self._info)

    def _hooked_step(self, micro_batches: list[Any], step: TrainStep) -> dict[str, float]:
        self.hooks.call("slime_before_train_step", step=step)
        metrics = self._step(micro_batches, rollout=step.rollout)
        self.hooks.call("slime_after_train_step", step=replace(step, metrics=dict(metrics)))
        return metrics

    def _step(self, micro_batches: list[Any], *, rollout: int) -> dict[str, float]:
        from slime_core.learner.passes import backward

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        metrics = backward(self.model, micro_batches, self._objective)
        self._objective.corrections.refuse_faults(metrics, rollout=rollout)
        _refuse_non_finite(metrics, rollout)
        _refuse_wrong_weights(metrics.pop("weight"), rollout)
        self.parity.check(metrics, rollout=rollout, temperature=micro_batches[0].temperature)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.parity.moved()
        _, grad_norm, _ = self.optimizer.step()
        metrics |= {"grad_norm": float(grad_norm), "lr": learning_rate}
        _refuse_non_finite(metrics, rollout)
        self.schedule.step(increment=1)
        return metrics

    # --- Weights -----------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names, gathered over ranks; views, valid until the next step."""
        weights: Iterator[tuple[str, torch.Tensor]] = self._spec.export_weights(self.chunks)
        return weights

    @property
    def is_sender(self) -> bool:
        """Whether this rank is the one that talks to the engines and writes shared files."""
        return self._settings.rank == 0

    # --- Devices -----------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Give all device memory away until :meth:`wake`; returns its bytes. Not collective."""
        from slime_core.learner.sleep import Bed, device_tensors, drop_scratch

        if self._bed is None:
            self.optimizer.zero_grad()
            drop_scratch()
            # Anew each time: the optimizer makes its state at its first step.
            self._bed = Bed(*device_tensors(self.model, self.optimizer))
        return int(self._bed.sleep())

    def wake(self) -> None:
        """Hold everything on the device again, where it was. Nothing to do if it is awake."""
        if self._bed is not None:
            self._bed.wake()
            self._bed = None

    def close(self) -> None:
        """Leave the process group."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _prepare_process(settings: LearnerSettings) -> torch.device:
    kind = accelerator(settings.config.cluster.device)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    device = torch.device("cpu")
    if kind == "cuda":
        # Ray shows every actor its own device only, which is then number 0.
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=_meeting_point(settings),
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    seed = settings.config.run.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    initialize(settings.layout, seed=seed)
    return device


def _meeting_point(settings: LearnerSettings) -> Any:
    """The store where the ranks find each other; rank 0 serves it, on the agreed address only."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = settings.address.rpartition(":")
    if settings.rank == 0:
        return listening_store(host, world_size=settings.world_size, timeout=COLLECTIVE_TIMEOUT, port=int(port))
    return TCPStore(host, int(port), settings.world_size, is_master=False, timeout=COLLECTIVE_TIMEOUT)


def _refuse_non_finite(metrics: dict[str, float], rollout: int) -> None:
    bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if bad:
        raise NonFiniteError(
            f"rollout {rollout}: not finite (NaN or infinity): {', '.join(bad)}. Nothing of this step was published or "
            "saved. Look at the samples of this rollout, then lower --lr or --clip-grad, or resume from the last "
            "checkpoint with --load."
        )


def _refuse_wrong_weights(weight: float, rollout: int) -> None:
    # The sampler's weights add up to 1 over an optimizer step, or to 0 where every token is masked.
    if not (math.isclose(weight, 1.0, abs_tol=1e-3) or weight == 0.0):
        raise RunError(
            f"rollout {rollout}: the loss weights of a step add up to {weight:.6f} instead of 1; "
            "a shard is missing or doubled"
        )
