"""One process of the learner: builds its part of the model, trains shards, and hands weights out.

A plain class, so that a recipe can use it without Ray; :mod:`slime_core.learner.actor` makes an actor of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.config.settings import core_values
from slime_core.learner.annotator import Annotator
from slime_core.learner.cast import Cast
from slime_core.learner.columns import Columns
from slime_core.learner.components import accepted_inputs, build_learning, build_model_spec, loss_parts, who_builds
from slime_core.learner.critic.critic import Critic
from slime_core.learner.finite import refuse_non_finite_weights
from slime_core.learner.loss.parity import ParityGate
from slime_core.learner.process import prepare_process
from slime_core.learner.refusals import refuse_non_finite, refuse_wrong_weights
from slime_core.learner.replay import Replay
from slime_core.learner.roles import ACTOR
from slime_core.learner.settings import LearnerSettings
from slime_core.learner.sleep import Bed
from slime_core.learner.train_data import save_train_data
from slime_core.learner.trained import TrainedModel
from slime_core.plugins.component import Kind
from slime_core.plugins.contracts import LearnerInfo, Place, TrainStep
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.registry import Registry
from slime_core.types import TrainBatch

__all__ = ["Learner", "LearnerSettings"]


class Learner:
    """The actor, its optimizer, and reference and critic if they are needed. Methods are collective over all ranks."""

    def __init__(self, settings: LearnerSettings, registry: Registry) -> None:
        """Join the process group and build the model with the start weights.

        Raises:
            ConfigError: the model cannot be built as asked.
            CheckpointError: the weights do not fit the model.
            PluginError: a hook, a component or the model spec failed.
        """
        from slime_core.cpu import megatron

        megatron.install()
        config = settings.config
        self._settings, self._config = settings, config
        self.device = prepare_process(settings)
        where = f"learner rank {settings.rank}"
        self.hooks = LifecycleHooks(registry, place=Place.RANK, options=settings.options, where=where)
        self._info = LearnerInfo(settings.rank, settings.world_size, core_values(config))
        self.hooks.call("slime_learner_start", learner=self._info)
        self.actor = self._trained_model(registry)
        self._info = replace(
            self._info, model=tuple(self.actor.model), optimizer=self.actor.optimizer, schedule=self.actor.schedule
        )
        self._objective, self._estimation = build_learning(registry, settings, parts=loss_parts(self.hooks, self._info))
        traits: Any = registry.find(Kind.POLICY_LOSS, settings.policy_loss).traits
        distils = config.algorithm.use_opd
        self._columns = Columns(self._objective, self._estimation, loss_reads=traits.reads, distils=distils)
        self._shares_prompts = self._can_share_prompts()
        self.parity = ParityGate(config.weights, bf16=config.model.bf16, strict=config.algorithm.true_on_policy_mode)
        self._bed: Bed | None = None
        self._cast = Cast(self.actor, self._columns, config=config, folder=settings.folder)
        shares = self._columns.values and not config.num_critic_ranks
        self.critic = self._build_critic(registry) if shares else None
        self.returns_U: torch.Tensor | None = None
        self._replay = Replay.of(config.learner, self.actor.chunks)
        self._annotator = self._annotates()

    # --- Building ----------------------------------------------------------------------------------------------------

    def _trained_model(self, registry: Registry) -> TrainedModel:
        from slime_core.learner.model.freezing import freeze

        settings, config = self._settings, self._config
        self._accepts = accepted_inputs(registry, settings)
        self._spec = build_model_spec(registry, settings, hooks=self.hooks)
        return TrainedModel(
            self._spec,
            builder=who_builds(registry, settings.architecture),
            settings=replace(settings, num_steps=settings.num_steps - self._critic_only * config.steps_per_rollout),
            folder=settings.folder,
            optimizer=config.optimizer,
            adapt=lambda chunks: freeze(
                chunks,
                only=config.optimizer.only_train_params_name_list,
                frozen=config.optimizer.freeze_params_name_list,
            ),
        )

    def _build_critic(self, registry: Registry) -> Critic:
        settings = self._settings
        spec = build_model_spec(registry, settings, hooks=self.hooks)
        return Critic(spec, builder=who_builds(registry, settings.architecture), settings=settings)

    def _annotates(self) -> Annotator:
        return Annotator(
            self.actor.model,
            self._cast,
            self.critic,
            self._objective,
            self._estimation,
            replay=self._replay,
            config=self._config,
            before_pass=lambda role: self.hooks.call("slime_before_log_probs", role=role, learner=self._info),
        )

    @property
    def _models(self) -> list[TrainedModel]:
        return [self.actor] if self.critic is None else [self.actor, self.critic.trained]

    @property
    def _critic_only(self) -> int:
        """Rollouts at the start that leave the actor as it is."""
        return self._config.critic.num_critic_only_steps

    def _can_share_prompts(self) -> bool:
        from slime_core.learner.model.sharing import can_share_prompts

        # A loss of logits finds its tokens by where they would stand if every sample had its prompt.
        able = can_share_prompts(self.actor.chunks, context=self._settings.layout.context, device=self.device)
        return able and self._config.learner.shared_prompts == "auto" and self._objective.of_logits is None

    # --- Training ----------------------------------------------------------------------------------------------------

    def train(self, shard: TrainBatch, values_U: np.ndarray | None = None) -> dict[str, float]:
        """Run every optimizer step of ``shard``, the critic's first; only numbers come back.

        Afterwards ``returns_U`` holds what a critic is to learn, float32 [u] in the order of the shard, on the ranks
        that estimate it.

        Arguments:
            values_U: float32 [u], those of a critic apart.

        Returns:
            ``train/...`` metrics, averaged over the optimizer steps, and ``parity/...`` metrics where it was due; the
            same on every rank.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite; the weights of this process are spoilt from then
            on.
            ParityError: learner and engines give the same tokens other log-probabilities; nothing was trained.
            PluginError: a hook failed.
            RunError: the samples carry inputs that the model does not take.
        """
        from slime_core.learner.loss.totals import average

        for model in self._models:
            model.begin_rollout()
        self._replay.require_fitting(shard)
        self._accepts.require(shard.inputs.keys())
        steps = self._cut(shard)
        self.parity.mark(shard, steps[0])
        every = [micro for step in steps for micro in step]
        trains_actor = shard.rollout >= self._critic_only
        # A plugin that changes columns finds the same ones in every rollout.
        num_reading = len(steps) if trains_actor or self.hooks.implementers("slime_before_training") else 0
        self._annotator.annotate(every, num_steps=num_reading, values_U=values_U)
        self.returns_U = self._annotator.estimate(shard, every)
        self.hooks.answers("slime_before_training", shard=shard, steps=steps)
        if (saved := self._config.debug.save_debug_train_data) is not None:
            save_train_data(saved, shard, steps, self._settings)
        numbered = enumerate(steps if trains_actor else [])
        judged = [self.critic.step(step, rollout=shard.rollout) for step in steps if self.critic]
        results = [self._hooked_step(step, TrainStep(shard.rollout, i, self._info)) for i, step in numbered]
        refuse_non_finite_weights(self.actor.chunks, rollout=shard.rollout)
        if self.critic is not None:
            self.critic.refuse_non_finite_weights(shard.rollout)
        if trains_actor:
            self._cast.trained(shard.rollout)
        metrics = average(results) | average(judged)
        return {f"train/{name}": value for name, value in metrics.items()} | self.parity.report()

    def _cut(self, shard: TrainBatch) -> list[list[Any]]:
        from megatron.core import parallel_state

        from slime_core.learner.packed.batches import cut
        from slime_core.learner.passes import fill_up

        layout, context_rank = self._settings.layout, parallel_state.get_context_parallel_rank()
        steps = cut(
            shard,
            device=self.device,
            layout=layout,
            context_rank=context_rank,
            share=self._shares_prompts,
            max_tokens=self._config.learner.max_tokens_per_gpu,
        )
        fill_up(steps, layout)
        return steps

    def _hooked_step(self, micro_batches: list[Any], step: TrainStep) -> dict[str, float]:
        self.hooks.call("slime_before_train_step", step=step)
        metrics = self._step(micro_batches, rollout=step.rollout)
        self.hooks.call("slime_after_train_step", step=replace(step, metrics=dict(metrics)))
        return metrics

    def _step(self, micro_batches: list[Any], *, rollout: int) -> dict[str, float]:
        with self._replay.kept(micro_batches, ACTOR):
            metrics = self.actor.backward(micro_batches, self._objective)
        self._objective.corrections.refuse_faults(metrics, rollout=rollout)
        refuse_non_finite(metrics, rollout)
        refuse_wrong_weights(metrics.pop("weight"), rollout)
        self.parity.check(metrics, rollout=rollout, temperature=micro_batches[0].temperature)
        self.parity.moved()
        metrics |= self.actor.update()
        refuse_non_finite(metrics, rollout)
        return metrics

    # --- Weights -----------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """The engines hold the actor's weights, as ``version``."""
        self.parity.published(version)
        self._cast.published()

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names, gathered over ranks; views, valid until the next step."""
        weights: Iterator[tuple[str, torch.Tensor]] = self._spec.export_weights(self.actor.chunks)
        return weights

    @property
    def is_sender(self) -> bool:
        """Whether this rank is the one that talks to the engines and writes shared files."""
        return self._settings.rank == 0

    # --- Checkpoints -------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write this rank's part: ``torch_dist``, and where they change ``critic`` and ``roles``. Collective.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.actor.save(folder / "torch_dist")
        self._cast.save(folder / "roles")
        if self.critic is not None:
            self.critic.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from what :meth:`save` wrote, in any layout. Collective.

        Raises:
            CheckpointError: it is of another model, or of a run without the critic that this one trains.
        """
        if self.critic is not None:
            self.critic.load(folder)
        self.actor.load(folder / "torch_dist")
        self._cast.load(folder / "roles")
        self.parity.moved()

    # --- Devices -----------------------------------------------------------------------------------------------------

    def sleep(self) -> int:
        """Give all device memory away until :meth:`wake`; returns its bytes. Not collective."""
        if self._bed is None:
            self.returns_U = None
            self._bed = Bed.of(self._models)  # anew each time: an optimizer makes its state at its first step
        return self._bed.sleep()

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
