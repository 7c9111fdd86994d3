"""One process of the learner: builds its part of the model, trains shards, and exports weights.

:class:`LearnerRank` is a plain class, so a recipe can use it without Ray; :mod:`slime_core.learner.actor` wraps it
in a Ray actor.

:func:`save_train_data` writes the training data of a rank in a rollout to a file. Per-sample and per-token columns are
in the order of the shard. A rank writes only its tokens: NaN marks a token that another context-parallel rank holds. A
column that no pass computed is left out, such as ``old_log_probs_U`` in a rollout of one optimizer step: then the
current log-probabilities are the old ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import save

from slime_core.config.model_config import ForwardFlops, described, forward_flops
from slime_core.config.secrets import engine_access
from slime_core.config.settings import core_values
from slime_core.contracts import LearnerInfo, Place, TrainStep
from slime_core.contracts.learning import NamedTensors, WriteTensors
from slime_core.errors import ConfigError
from slime_core.learner import LearnerSettings
from slime_core.learner.advantages import fill_advantages
from slime_core.learner.checks import (
    can_share_prompts,
    require_finite_metrics,
    require_finite_weights,
    require_loss_weight,
)
from slime_core.learner.components import build_learning, build_model_spec, collect_loss_parts
from slime_core.learner.critic import Critic
from slime_core.learner.freezing import freeze
from slime_core.learner.frozen_models import FrozenModels, RequiredColumns
from slime_core.learner.micro_batches import PackedMicroBatch
from slime_core.learner.objective import average_metrics
from slime_core.learner.parity import ParityGate
from slime_core.learner.process import Offloader, leave_process_groups, prepare_process
from slime_core.learner.rank_load import RankLoad, peak_flops, rank_load
from slime_core.learner.routing_replay import RoutingReplay
from slime_core.learner.trained_model import (
    ACTOR,
    REFERENCE,
    TEACHER,
    NamedSpec,
    TrainedModel,
    build_chunks,
    choose_kernels,
    compute_log_probs,
    forward_backward_policy,
    micro_batches_of_rank,
)
from slime_core.learner.wrapping import WrappedSpec
from slime_core.modeling import prepare_megatron
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.track.record import write_atomically
from slime_core.track.timeline import Timeline
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    from slime_core.checkpoint.sharded import StateCopy

PASSES = ("log_probs", "critic_train", "actor_train")
"""Spans of :meth:`LearnerRank.train`."""


class LearnerRank:
    """The actor with its optimizer, and frozen models and a critic if the run needs them.

    Methods are collective over all ranks. :meth:`train` runs a rollout: micro-batches, log-prob pass, advantages, the
    critic's optimizer steps, the actor's.

    Attributes:
        device: of this rank.
        kernels: part of the model -> the implementation that this process uses, and why, in words.
        hooks: the plugins' lifecycle hooks of this rank.
        actor: the policy that trains.
        critic: on the actor's ranks; None without a critic, and with one on separate ranks.
        parity: compares log-probabilities of learner and engines.
        timeline: of this rank; :meth:`speed` reports the times of its passes.
        returns_U: the critic's targets of the last rollout, float32 [u] in the order of the shard; None on ranks that
            do not estimate them.
    """

    def __init__(self, settings: LearnerSettings, registry: Registry) -> None:
        """Join the process group and build the model with the start weights.

        Raises:
            ConfigError: the model cannot be built with these settings.
            CheckpointError: the weights are of another model.
            PluginError: a hook, a component or the model spec failed.
        """
        prepare_megatron()  # before anything imports Megatron, whose modules it patches
        config = settings.config
        self._settings = settings
        self._config = config
        self.device = prepare_process(settings)
        where = f"learner rank {settings.rank}"
        self.hooks = Hooks(registry, place=Place.RANK, options=settings.options, where=where)
        self._info = LearnerInfo(settings.rank, settings.world_size, core_values(config), folder=settings.run_folder)
        self.hooks.call("slime_learner_start", learner=self._info)
        self._wrapped = self._wrap_model(build_model_spec(registry, settings, hooks=self.hooks))
        self.actor = self._build_actor(self._wrapped)
        self.kernels = choose_kernels(self.actor.chunks, config, device=self.device)
        self._info = replace(
            self._info, model=tuple(self.actor.model), optimizer=self.actor.optimizer, schedule=self.actor.schedule
        )
        parts = collect_loss_parts(self.hooks, self._info)
        self._objective, self._estimation = build_learning(registry, settings, parts=parts)
        if config.learner.fp32_lm_head and self._objective.parts.of_logits is not None:
            raise ConfigError("fp32_lm_head = true, and a plugin's loss reads all logits; leave --fp32-lm-head out")
        self._of_logits: dict[str, Any] = {
            "chunk_size": config.learner.log_probs_chunk_size,
            "fp32_logits": config.learner.fp32_lm_head,
        }
        self._shares_prompts = self._can_share_prompts()
        self.parity = ParityGate(
            config.weights,
            bf16=config.model.bf16,
            mixture=bool(getattr(self.actor.chunks[0].config, "num_moe_experts", None)),
            strict=config.algorithm.true_on_policy_mode,
            is_alone=engine_access().key is not None and not config.engine.rollout_external_engine_addrs,
            write=None if settings.run_folder is None else partial(_write_compared, settings),
        )
        self._columns = RequiredColumns(
            self._objective,
            self._estimation,
            loss_reads=registry.traits(Kind.POLICY_LOSS, settings.policy_loss).reads,
            distils=config.algorithm.use_opd,
        )
        self._frozen = FrozenModels(
            self.actor,
            reads_reference=self._columns.reference,
            config=config,
            folder=settings.folder,
            original=self._wrapped.model.original,
        )
        has_critic = self._columns.values and not config.num_critic_ranks
        self.critic: Critic | None = None
        if has_critic:
            self.critic = Critic(build_model_spec(registry, settings, hooks=self.hooks), settings=settings)
        self.returns_U: torch.Tensor | None = None
        self._replay = RoutingReplay(self.actor.chunks, config.learner)
        self.timeline = Timeline(settings.run_folder, f"learner-{settings.rank}")
        self._flops = _forward_flops(settings.folder)
        on_gpu = self.device.type == "cuda" and config.model.bf16
        self._peak_flops = peak_flops(torch.cuda.get_device_name(self.device)) if on_gpu else None
        self._offloader: Offloader | None = None  # set while the rank is offloaded to the host

    # --- Building ----------------------------------------------------------------------------------------------------

    def _wrap_model(self, spec: NamedSpec) -> WrappedSpec:
        """Build the chunks of the actor, and let plugins wrap them."""
        folder = self._config.model.initial_megatron_checkpoint or self._settings.folder
        chunks = build_chunks(spec, settings=self._settings, folder=folder)
        return WrappedSpec(spec, chunks, hooks=self.hooks, learner=self._info, folder=self._settings.folder)

    def _build_actor(self, wrapped: WrappedSpec) -> TrainedModel:
        settings, config = self._settings, self._config
        freeze(
            wrapped.chunks,
            only=config.optimizer.only_train_params_name_list,
            frozen=config.optimizer.freeze_params_name_list,
        )
        num_steps = settings.num_steps - self._critic_only * config.steps_per_rollout
        settings = replace(settings, num_steps=num_steps)
        return TrainedModel(
            wrapped.chunks,
            spec=wrapped.spec,
            settings=settings,
            optimizer=config.optimizer,
            stores=wrapped.model.stores,
        )

    @property
    def _critic_only(self) -> int:
        """Rollouts at the start in which only the critic trains."""
        return self._config.critic.num_critic_only_steps

    def _can_share_prompts(self) -> bool:
        able = can_share_prompts(self.actor.chunks, context=self._settings.layout.context, device=self.device)
        # A loss of logits finds its tokens by their positions in a row where every sample has all its tokens.
        return able and self._config.learner.shared_prompts == "auto" and self._objective.parts.of_logits is None

    # --- Training ----------------------------------------------------------------------------------------------------

    def train(self, shard: TrainBatch, critic_values_U: np.ndarray | None = None) -> dict[str, float]:
        """Run every optimizer step of ``shard``, the critic's first.

        Arguments:
            critic_values_U: float32 [u], values of a separate critic.

        Returns:
            ``train/...`` metrics, averaged over the optimizer steps, and ``parity/...`` metrics if parity was compared;
            the same on every rank.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is NaN or infinite; the weights of this process are then
                unusable.
            ParityError: learner and engines give the same tokens other log-probabilities; nothing was trained.
            PluginError: a hook failed.
            RunError: the samples carry inputs that the model does not take.
        """
        self.actor.begin_rollout()
        self._replay.require_routes(shard)
        self._wrapped.spec.require_inputs(shard.inputs.keys(), context=self._settings.layout.context)
        steps = micro_batches_of_rank(
            shard,
            self._settings.layout,
            device=self.device,
            share=self._shares_prompts,
            max_tokens=self._config.learner.max_tokens_per_gpu,
        )
        self.parity.mark(shard, steps[0])
        trains_actor = shard.rollout >= self._critic_only
        with self.timeline.span("log_probs", shard.rollout):
            self._fill_columns(shard, steps, trains_actor=trains_actor, critic_values_U=critic_values_U)
        critic_steps: list[dict[str, float]] = []
        if self.critic is not None:
            with self.timeline.span("critic_train", shard.rollout):
                critic_steps = [self.critic.step(step, rollout=shard.rollout) for step in steps]
                self.critic.trained.finish_gather()
        with self.timeline.span("actor_train", shard.rollout):
            actor_steps = [self._hooked_step(step, shard, i) for i, step in enumerate(steps if trains_actor else [])]
            self.actor.finish_gather()
        require_finite_weights(self.actor.chunks, rollout=shard.rollout)
        if self.critic is not None:
            require_finite_weights(self.critic.trained.chunks, rollout=shard.rollout, of="critic_")
        if trains_actor:
            self._frozen.trained(shard.rollout)
        metrics = average_metrics(actor_steps) | average_metrics(critic_steps)
        return {f"train/{name}": value for name, value in metrics.items()} | self.parity.report()

    def speed(self, shard: TrainBatch) -> dict[str, float]:
        """Return the ``perf/...`` metrics of the last :meth:`train`, which trained ``shard``.

        They are the seconds of this rank by part, and the actor's steps in TFLOP/s, and as a fraction of the GPU's peak
        if that is known and the run computes in bfloat16. Forward and backward count as three times the forward pass
        (Kaplan et al., 2001.08361, section 2.1); recomputed operations count once. Ranks that share a sample share its
        work.
        """
        seconds = self.timeline.take_seconds()
        metrics = {f"perf/{name}_time": seconds[name] for name in PASSES if name in seconds}
        if self._flops is not None and shard.rollout >= self._critic_only:
            flops = self._work(shard) / seconds["actor_train"]
            metrics["perf/actor_train_tflops"] = flops / 1e12
            if self._peak_flops is not None:
                metrics["perf/actor_train_mfu"] = flops / self._peak_flops
        return metrics

    def measure_load(self, shard: TrainBatch) -> RankLoad:
        """Measure time, memory and work of this rank in the last :meth:`train`, which trained ``shard``."""
        return rank_load(self.actor.clock, self.device, work=self._work(shard))

    def _work(self, shard: TrainBatch) -> float:
        """Return the operations of this rank's passes over ``shard``; tokens, if operations are not counted."""
        lengths = list(map(int, shard.lengths_B))
        work = sum(lengths) if self._flops is None else sum(map(self._flops.of, lengths))
        return 3 * work / self._settings.layout.model_size

    def _fill_columns(
        self,
        shard: TrainBatch,
        steps: list[list[PackedMicroBatch]],
        *,
        trains_actor: bool,
        critic_values_U: np.ndarray | None,
    ) -> None:
        """Fill the columns that the steps read: log-probabilities, values, advantages, returns, columns of plugins."""
        micro_batches = [micro for step in steps for micro in step]
        # A plugin that changes columns finds the same ones in every rollout.
        num_steps = len(steps) if trains_actor or self.hooks.implementers("slime_before_training") else 0
        for role in self._columns.roles(num_steps, old_actor_differs=self._frozen.old_actor_differs):
            with self._frozen.weights_of(role):
                self._fill_log_probs(micro_batches, role)
        if self._objective.algorithm.use_rollout_logprobs:
            self._objective.take_from_engine(micro_batches)
        if self.critic is not None:
            self.critic.fill_values(micro_batches)
        if critic_values_U is not None:
            values_U = torch.as_tensor(critic_values_U, device=self.device)
            for micro in micro_batches:
                micro.values_U = values_U[micro.places_U]
        normalizes = self._config.algorithm.normalize_advantages
        fill_advantages(self._estimation, shard, micro_batches, normalizes=normalizes)
        self.hooks.call("slime_before_training", shard=shard, steps=steps)
        if self._estimation is not None:
            self.returns_U = self._estimation.returns_of(micro_batches, count=len(shard.loss_mask_U))
        if (saved := self._config.debug.save_debug_train_data) is not None:
            save_train_data(saved, shard, steps, self._settings)

    def _fill_log_probs(self, micro_batches: Sequence[PackedMicroBatch], role: str) -> None:
        """Run one pass of ``role``, whose weights the model holds; only the last stage has log-probabilities."""
        self.hooks.call("slime_before_log_probs", role=role, learner=self._info)
        with self._replay.record_or_replay(micro_batches, role):
            results = compute_log_probs(self.actor.model, micro_batches, **self._of_logits)
        for micro, log_probs_U in zip(micro_batches, results, strict=False):
            if role == REFERENCE:
                micro.ref_log_probs_U = log_probs_U
            elif role == TEACHER:
                micro.teacher_log_probs_U = log_probs_U
            else:
                micro.old_log_probs_U = log_probs_U

    def _hooked_step(self, micro_batches: list[PackedMicroBatch], shard: TrainBatch, number: int) -> dict[str, float]:
        step = TrainStep(shard.rollout, number, self._info)
        self.hooks.call("slime_before_train_step", step=step)
        metrics = self._step(micro_batches, rollout=step.rollout)
        if any(map(self.hooks.implementers, ("slime_before_train_step", "slime_after_train_step"))):
            self.actor.finish_gather()  # a hook may read the weights
        self.hooks.call("slime_after_train_step", step=replace(step, metrics=dict(metrics)))
        return metrics

    def _step(self, micro_batches: list[PackedMicroBatch], *, rollout: int) -> dict[str, float]:
        """Take one optimizer step of the actor; run the checks that can refuse it before the weights change."""
        self.actor.zero_gradients()
        self.actor.clock.start()
        with self._replay.record_or_replay(micro_batches, ACTOR):
            metrics = forward_backward_policy(self.actor.model, micro_batches, self._objective, **self._of_logits)
        self._objective.corrections.refuse_faults(metrics, rollout=rollout)
        require_finite_metrics(metrics, rollout)
        require_loss_weight(metrics.pop("weight"), rollout)
        self.parity.check(metrics, rollout=rollout, temperature=micro_batches[0].temperature)
        self.parity.weights_changed()
        metrics |= self.actor.step()
        require_finite_metrics(metrics, rollout)
        return metrics

    # --- Weights -----------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """Record that the engines hold the actor's weights, as ``version``."""
        self.parity.published(version)
        self._frozen.published()

    def export_weights(self) -> NamedTensors:
        """Iterate over the weights for engines, with Hugging Face names, gathered over ranks; views, valid until the
        next step."""
        return self._wrapped.published()

    def saved_weights(self) -> NamedTensors:
        """Iterate over the tensors of the folder ``hf``, as :meth:`export_weights`."""
        return self._wrapped.saved()

    @property
    def write_hf(self) -> WriteTensors | None:
        """Function of a plugin that writes the folder ``hf``; None for a Hugging Face folder."""
        return self._wrapped.model.write

    @property
    def is_sender(self) -> bool:
        """True if this rank sends weights to the engines and writes shared files."""
        return self._settings.rank == 0

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def copy(self, folder: Path) -> list[StateCopy]:
        """Copy this rank's part of ``torch_dist``, and of ``critic`` and ``roles`` if the run has them.

        Collective; the caller writes the copies.
        """
        critic = [] if self.critic is None else [self.critic.copy(folder)]
        return [self.actor.copy(folder / "torch_dist"), *self._frozen.copy(folder / "roles"), *critic]

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, written in any layout. Collective.

        Raises:
            CheckpointError: the checkpoint is of another model, or lacks the critic that this run trains.
        """
        if self.critic is not None:
            self.critic.load(folder)
        self.actor.load(folder / "torch_dist")
        self._frozen.load(folder / "roles")
        self.parity.weights_changed()  # the engines hold other weights until the next publication

    # --- Devices -----------------------------------------------------------------------------------------------------

    def offload(self, *, keeps_weights: bool = False) -> int:
        """Move all device memory to the host until :meth:`onload`; return its bytes. Not collective.

        Arguments:
            keeps_weights: leave the actor's weights, which can still be published; a second call moves them too.
        """
        if self._offloader is None:
            self.returns_U = None
            # Each time: an optimizer makes its state at its first step.
            models = [self.actor] if self.critic is None else [self.actor, self.critic.trained]
            self._offloader = Offloader.of(models)
        weights = [tensor for chunk in self.actor.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
        return self._offloader.offload(but=weights if keeps_weights else ())

    def onload(self) -> None:
        """Move everything back to the device, unless it is there."""
        if self._offloader is not None:
            self._offloader.restore()
            self._offloader = None

    def close(self) -> None:
        """Leave the process group."""
        leave_process_groups()


FORMAT, VERSION = "slime train data", "1"

LEFT_OUT = frozenset({"rows_U", "targets_U", "samples_U", "places_U", "fresh_U"})
"""Columns left out of the file: indices, which follow from the shard, and the tokens that parity compares."""


def _forward_flops(folder: Path) -> ForwardFlops | None:
    """Return the work of a forward pass; None if it is not counted for this kind of model."""
    try:
        return forward_flops(described(folder) or {})
    except ValueError:
        return None


def _write_compared(settings: LearnerSettings, shard: TrainBatch, compared: Sequence[PackedMicroBatch]) -> Path:
    """Write what the parity gate compared on this rank into the run folder; return the path."""
    assert settings.run_folder is not None
    template = settings.run_folder / "parity" / "{rollout_id}-{rank}.safetensors"
    return save_train_data(template, shard, [compared], settings)


def save_train_data(
    template: Path, shard: TrainBatch, steps: Sequence[Sequence[PackedMicroBatch]], settings: LearnerSettings
) -> Path:
    """Write this rank's training data of ``shard``, atomically; return the path.

    Arguments:
        template: path, in which ``{rollout_id}`` and ``{rank}`` are replaced by numbers.
        steps: the micro-batches of each optimizer step, with every column that the run computes.
    """
    name = f"{template}".replace("{rollout_id}", f"{shard.rollout}").replace("{rank}", f"{settings.rank}")
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "rollout": f"{shard.rollout}",
        "rank": f"{settings.rank}",
        "world_size": f"{settings.world_size}",
        "temperature": repr(float(shard.temperature)),
        "steps": json.dumps([asdict(step) for step in shard.steps]),
    }
    return write_atomically(Path(name), save(trained_columns(shard, steps), metadata=metadata))


def trained_columns(shard: TrainBatch, steps: Sequence[Sequence[PackedMicroBatch]]) -> dict[str, np.ndarray]:
    """Return every column of ``shard``, and its micro-batches' per-token columns, float32 [u] in the shard's order."""
    arrays = {name: values for name, values in _values(shard).items() if isinstance(values, np.ndarray)}
    arrays |= {f"{name}_B": values for name, values in shard.columns_B.items()}
    columns = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    for name, opaque in shard.inputs.items():
        columns |= {f"inputs/{name}": opaque.values}
        columns |= {f"inputs/{name}/starts_B": opaque.starts_B, f"inputs/{name}/counts_B": opaque.counts_B}
    # An idle micro-batch repeats another one with weight 0, to complete a schedule.
    for micro in (micro for step in steps for micro in step if micro.scale):
        for name, values_U in _per_token(micro).items():
            column_U = columns.setdefault(f"trained/{name}", np.full(shard.loss_mask_U.shape, np.nan, np.float32))
            column_U[micro.places_U.cpu().numpy()] = values_U.detach().float().cpu().numpy()
    return columns


def _values(record: TrainBatch | PackedMicroBatch) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _per_token(micro: PackedMicroBatch) -> dict[str, torch.Tensor]:
    values = {name: values_U for name, values_U in _values(micro).items() if name.endswith("_U")}
    tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor) and n not in LEFT_OUT}
    # The loss fills learner_log_probs_U, later than --save-debug-train-data writes.
    return {n: v for n, v in tensors.items() if not (v.numel() and v.isnan().all())}
