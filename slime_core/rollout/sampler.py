"""Turns prompts into shards: collect groups, estimate advantages, pack. Runs in one Ray actor with one event loop.

    TrainSampler      collects a rollout and packs it into one shard a data-parallel rank; evaluates
    EvalSampler       evaluates only
    GroupRunner       generates and rewards the groups that the scheduler admits

The groups of a rollout come from a :class:`~slime_core.rollout.group_scheduler.GroupSource`:

    GroupScheduler    groups are generated now, and dropped ones are replaced
    PluginRollouts    with ``--rollout-source``: a plugin's rollout source fills the batch

In a train-only run the source is :class:`~slime_core.rollout.rollout_files.RecordedRollouts`, which reads rollouts of
another run, saved after rewards and sample transforms. From there on they run the same code as live ones: hooks,
advantages, balancing and packing. The same samples under the same settings become the same shards, bit for bit.

Nothing here imports Megatron or Ray: the actor around it (:mod:`slime_core.rollout.actor`) puts shards into the object
store.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.components.selection import engine_columns
from slime_core.contracts import DataSource, GroupedRewards, Place, SamplerInfo, TrainSamples
from slime_core.errors import PluginError, RunError
from slime_core.plugins.lifecycle import Hooks, PlaceStates
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.rollout.collected_rollout import CollectedRollout, Staleness, describe_failures
from slime_core.rollout.components import SamplerComponents, SamplerSettings, make_encoder
from slime_core.rollout.engines.responses import spec_metrics
from slime_core.rollout.evaluation import Evaluation, pass_rates, waiting_for
from slime_core.rollout.group_generator import GroupGenerator, mark_missing_failed
from slime_core.rollout.group_scheduler import GroupScheduler, GroupSource, RequeueBuffer
from slime_core.rollout.rollout_files import Recorded, RecordedRollouts, rollout_file, write_rollout
from slime_core.rollout.routing import RoutedComponent, component_boundary, require_metrics
from slime_core.rollout.shards import BatchPlan, batch_metrics, grouped_rewards, loss_masks, make_shards
from slime_core.rollout.transforms import Transforms, refuse_unusable
from slime_core.runtime.progress import Progress
from slime_core.track.ledger import LEDGER, PendingGroups, PromptLedger
from slime_core.track.timeline import Timeline
from slime_core.types import PromptGroup, Sample, Status, TrainBatch
from slime_core.user_code.failures import boundary


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """One rollout: a shard for each data-parallel rank, metrics of its samples, and warnings for people."""

    shards: list[TrainBatch]
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SamplerCheckpoint:
    """The sampler's part of a checkpoint, all of one moment.

    Arguments:
        cursor: the data source, and every group that was taken from it and not trained, JSON-ready.
        plugin_states: states of the plugins of this process.
    """

    cursor: dict[str, Any]
    plugin_states: PlaceStates


class EvalSampler:
    """The sampler of a run, or of an actor, that only evaluates: it takes no prompts and trains nothing.

    Arguments:
        manifest: of the plugins in ``registry``, for reward models in separate processes. None: they run in this one.

    Raises:
        DataError: evaluation prompts cannot be read, or the tokenizer lacks the chat template that the run requires.
        PluginError: a component cannot be loaded, or ``slime_sampler_start`` failed.
    """

    def __init__(self, settings: SamplerSettings, registry: Registry, *, manifest: Manifest | None = None) -> None:
        self.hooks = Hooks(registry, place=Place.SAMPLER, options=settings.options)
        encoder = make_encoder(settings)
        info = SamplerInfo(
            settings.router_url,
            settings.model_urls,
            trains=settings.trains,
            encoder=encoder,
            folder=settings.run_folder,
        )
        self.hooks.call("slime_sampler_start", sampler=info)
        self._components = SamplerComponents(settings, registry, hooks=self.hooks, encoder=encoder, manifest=manifest)
        self.evaluation = Evaluation(settings.config, self._components)

    async def evaluate(self, step: int) -> dict[str, float]:
        """Score every evaluation set with the weights that the engines serve; return ``eval/...`` metrics."""
        return await self.evaluation.run(self._components.context(step, evaluation=True), None)

    def progress(self) -> Progress | None:
        """Return the progress of the evaluation, or None if none runs. Called by another thread."""
        return self.evaluation.progress()

    async def close(self) -> None:
        """Close connections; stop processes."""
        await self.evaluation.close()
        await self._components.close()


class TrainSampler(EvalSampler):
    """Also collects rollouts. The actor calls one public coroutine at a time, while groups may be in flight.

    Raises:
        DataError: prompts or evaluation prompts cannot be read.
        PluginError: a component cannot be loaded, or ``slime_sampler_start`` failed.
    """

    def __init__(self, settings: SamplerSettings, registry: Registry, *, manifest: Manifest | None = None) -> None:
        super().__init__(settings, registry, manifest=manifest)
        config = settings.config
        self._settings = settings
        self._config = config
        self._plan = replace(BatchPlan.of(config, settings.folder), num_ranks=settings.num_ranks)
        self._transforms = self._components.make_transforms()
        self._estimator = self._components.make_estimator()
        self._engine_columns = engine_columns(config, registry)
        self._ledger = PromptLedger(settings.samples_folder, is_strict=config.rollout.rollout_source is None)
        self._staleness = Staleness.of(config)
        self._generator = self._components.make_generator() if config.debug.generates else None
        self._rollouts = self._make_group_source()
        self._timeline = Timeline(settings.run_folder, "sampler")
        self._batch: CollectedRollout | None = None  # the rollout that is being collected
        self._last_end_s: float | None = None  # when the last rollout was complete, on time.monotonic's clock

    def _make_group_source(self) -> GroupSource:
        config = self._config
        if self._generator is None:
            recorded = RoutedComponent("recorded", RecordedRollouts(self._settings.run))
            return PluginRollouts(recorded, live=GroupSource(_SavedCursor()))
        data = self._components.make_prompts()
        prompts = RequeueBuffer(data, self._ledger.journal, holds=config.rollout.partial_rollout)
        runner = GroupRunner(self._components, self._generator, self._staleness)
        live = GroupScheduler(prompts, runner, config.rollout)
        name = config.rollout.rollout_source
        if name is None:
            return live
        return PluginRollouts(self._components.make_routed(Kind.ROLLOUT_SOURCE, name), live=live)

    # --- One rollout -------------------------------------------------------------------------------------------------

    async def sample(self, rollout: int) -> SampledRollout:
        """Collect rollout ``rollout``, estimate advantages and pack shards.

        Raises:
            RunError: no sample of the rollout can be trained on, or too few groups are kept.
            PluginError: a hook, a sample transform or a rollout source failed.
            DataError: a saved rollout is missing or malformed.
        """
        start_s = self._generation_start_s()
        batch, source_metrics = await self._collect(rollout)
        self._last_end_s = time.monotonic()
        rollout_s = self._last_end_s - start_s
        self._timeline.ended("generate", rollout, rollout_s)
        trained = self._require_trainable(batch)
        metrics = self._collect_metrics(batch, trained) | source_metrics
        selected = self._select_train_samples(trained, rollout)
        warnings = batch.warnings() + self._plan.warnings([len(sample.tokens) for sample in selected.samples])
        with self._timeline.span("pack", rollout):
            shards = self._make_shards(selected, rollout)
        metrics |= batch_metrics(shards, self._plan) | spec_metrics(batch.samples)
        if self._generator is not None:
            per_second = metrics["rollout/response_tokens"] / rollout_s
            metrics["perf/tokens_per_gpu_per_sec"] = per_second / self._config.num_rollout_gpus
        logged = self.hooks.call(
            "slime_log_rollout", rollout=rollout, samples=batch.samples, metrics=metrics, seconds=rollout_s
        )
        warnings += self._components.prompt_filter.news() + self._components.take_warnings()
        return SampledRollout(shards, {} if any(logged) else metrics, warnings)

    def _generation_start_s(self) -> float:
        """Return when generation of this rollout started: now, or with a buffer, when the last one was complete."""
        runs_ahead = self._config.rollout.async_buffer_size > 0
        return self._last_end_s if runs_ahead and self._last_end_s is not None else time.monotonic()

    async def _collect(self, rollout: int) -> tuple[CollectedRollout, dict[str, float]]:
        """Return a full rollout, and additional metrics of its source; write its samples to disk even if it fails."""
        source, is_recorded = self._rollouts, self._generator is None
        batch = CollectedRollout(
            rollout,
            self._config.rollout,
            # Transforms and the bound were applied before a rollout was saved.
            transforms=Transforms() if is_recorded else self._transforms,
            staleness=replace(self._staleness, bound=None) if is_recorded else self._staleness,
            prompts=source.prompts,
            components=self._components,
            generator=self._generator,
        )
        if is_recorded:
            return batch, dict(await source.fill(batch))
        self._batch = batch
        try:
            source_metrics = dict(await source.fill(batch))
        finally:
            self._batch = None
            self._components.writer.write("train", rollout, batch.written, dropped=batch.dropped)
        source.prompts.put_back(batch.aborted)
        source_metrics |= self._ledger.close(rollout, source.pending_groups())
        template = self._config.debug.save_debug_rollout_data
        if template is not None:
            temperature = self._config.rollout.rollout_temperature
            recorded = Recorded(rollout, temperature, batch.trained, batch.lost, self.cursor())
            write_rollout(rollout_file(template, rollout), recorded)
        return batch, source_metrics

    def progress(self) -> Progress | None:
        """Return the progress of the rollout or the evaluation, or None if neither runs. Called by another thread."""
        batch, generator = self._batch, self._generator
        if batch is None or generator is None:
            return super().progress()
        done = max(0, batch.wanted - batch.missing) + self._rollouts.num_ready
        waiting = waiting_for([generator], self._components.client)
        return Progress(min(done, batch.wanted), batch.wanted, "groups", waiting)

    def _require_trainable(self, batch: CollectedRollout) -> list[Sample]:
        """Return the samples that are trained, after the hooks of plugins; at least one a rank and optimizer step."""
        rollout, trained = batch.rollout, batch.trained
        plugins = self.hooks.implementers("slime_after_rollout")
        if plugins:
            self.hooks.call("slime_after_rollout", rollout=rollout, samples=trained)
            for sample in trained:
                refuse_unusable(sample, self._config.rollout.reward_key, source=f"slime_after_rollout ({plugins})")
        self.hooks.call("slime_after_collect", rollout=rollout, groups=batch.received, prompts=self._rollouts.prompts)
        needed = self._config.steps_per_rollout * self._settings.num_ranks
        if len(trained) < needed:
            raise RunError(
                f"rollout {rollout}: {len(trained)} of {len(batch.samples)} samples can be trained on; {needed} are "
                f"needed, one for each optimizer step and learner rank: {describe_failures(batch.samples)}"
            )
        return trained

    def _select_train_samples(self, trained: list[Sample], rollout: int) -> TrainSamples:
        """Return ``trained``, or the samples with which a plugin replaces it (``slime_before_shards``)."""
        selected = self.hooks.call("slime_before_shards", rollout=rollout, samples=trained)
        if not (selected is None or isinstance(selected, TrainSamples)):
            plugins = self.hooks.implementers("slime_before_shards")
            raise PluginError(
                f"slime_before_shards of {plugins} returned {selected!r:.80}; return a TrainSamples, or None."
            )
        return selected or TrainSamples(trained)

    def _make_shards(self, selected: TrainSamples, rollout: int) -> list[TrainBatch]:
        rewards = grouped_rewards(selected.samples, loss_masks(selected.samples), key=self._config.rollout.reward_key)
        advantages_B = None  # of an estimator with scope token: the learner's ranks estimate from the rewards
        if self._estimator is not None:
            advantages_B = estimate_advantages(self._estimator, rewards, are_final=selected.rewards_are_advantages)
        return make_shards(
            selected.samples,
            advantages_B,
            self._plan,
            rollout=rollout,
            temperature=self._config.rollout.rollout_temperature,
            rewards_B=rewards.rewards_B,
            with_routes=self._config.learner.use_rollout_routing_replay,
            cuts=self._config.rollout.truncates,
            columns=self._engine_columns,
        )

    def _collect_metrics(self, batch: CollectedRollout, trained: list[Sample]) -> dict[str, float]:
        metrics = {
            **batch.metrics(trained),
            **({} if self._generator is None else self._generator.take_metrics()),
            **self._components.prompt_filter.metrics(),
            **self._staleness.metrics(trained, rollout=batch.rollout, num_untrained=len(batch.stale)),
        }
        if self._config.rollout.log_passrate:
            rates = pass_rates(batch.solved(self._config.eval.eval_pass_threshold))
            metrics |= {f"rollout/pass@{k}": rate for k, rate in rates.items()}
        return metrics

    # --- Evaluation --------------------------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> dict[str, float]:
        """Score every evaluation set with the weights that the engines serve; return ``eval/...`` metrics.

        Groups in flight finish first, so that the evaluation does not share the engines.
        """
        await self._rollouts.drain()
        with self._timeline.span("evaluate", step):
            return await self.evaluation.run(self._components.context(step, evaluation=True), self._rollouts.prompts)

    # --- State -------------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """Note that the engines serve the weights of ``version`` trained rollouts.

        Raises:
            SlimeError: a group in flight has failed.
        """
        if self._last_end_s is None:
            self._last_end_s = time.monotonic()  # generation of the first rollout starts here
        self._rollouts.published(version)

    def cursor(self) -> dict[str, Any]:
        """Return the data cursor after the last returned rollout; groups generated ahead are pending in it."""
        return {LEDGER: self._ledger.state(self._rollouts.pending_groups()), **self._rollouts.state()}

    def state(self) -> SamplerCheckpoint:
        """Return the sampler's part of a checkpoint.

        Raises:
            SlimeError: a group in flight has failed, or a plugin cannot return its state.
        """
        self._rollouts.raise_failure()
        return SamplerCheckpoint(self.cursor(), self.hooks.states())

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue the data from ``cursor``."""
        self._ledger.restore(cursor.get(LEDGER))
        self._rollouts.restore(cursor)

    async def close(self) -> None:
        """Cancel groups in flight; close connections and files; stop processes."""
        await self._rollouts.close()
        await super().close()


def estimate_advantages(
    estimator: RoutedComponent, rewards: GroupedRewards, *, are_final: bool = False
) -> NDArray[np.float32]:
    """Return the advantages by ``estimator``, float32 [B].

    Arguments:
        are_final: the rewards are the advantages; see :class:`~slime_core.TrainSamples`.

    Raises:
        RunError: it failed, or did not return one finite number per sample.
    """
    source = f"advantage estimator {estimator.name!r} of {estimator.plugin}"
    with boundary(source, "estimating advantages", error=RunError, locate=True):
        estimates = rewards.rewards_B if are_final else estimator.component.estimate(rewards)
    with boundary(source, "reading its return value as one number per sample", error=RunError):
        advantages_B = np.asarray(estimates, np.float32)
    if advantages_B.shape != (len(rewards),) or not np.isfinite(advantages_B).all():
        raise RunError(
            f"{source} returned shape {advantages_B.shape} for {len(rewards)} samples, or NaN or infinity; accepted: "
            "one finite number per sample"
        )
    return advantages_B


class GroupRunner:
    """Generates and rewards the groups that the scheduler admits; its :class:`GroupWork`."""

    def __init__(self, components: SamplerComponents, generator: GroupGenerator, staleness: Staleness) -> None:
        self._components = components
        self._generator = generator
        self._staleness = staleness

    def prepare(self, rollout: int, groups: list[PromptGroup]) -> int:
        """Reset or resume the samples of each group, and call ``slime_before_rollout``.

        Returns:
            The number of aborted samples that restart because their tokens are too old to be trained.
        """
        num_restarted = 0
        for group in groups:
            is_stale = self._staleness.refuses(group, rollout=rollout)
            num_restarted += is_stale * sum(sample.status is Status.ABORTED for sample in group)
            self._generator.prepare_group(group, is_stale=is_stale)
        self._components.hooks.call("slime_before_rollout", rollout=rollout, groups=groups)
        return num_restarted

    async def run(self, rollout: int, group: PromptGroup) -> PromptGroup:
        """Generate and reward ``group``; samples that the generate function did not return come back as failed."""
        context = self._components.context(rollout, evaluation=False)
        before = list(group)
        samples = await self._generator.collect(context, group, self._components.train_sampling)
        return [*samples, *mark_missing_failed(before, samples)]

    def abort_requests(self) -> AbstractAsyncContextManager[None]:
        """Abort the client's requests while the context lasts."""
        return self._components.client.aborting()


SOURCE_STATE = "rollout_source"
"""Key of a plugin's rollout source in the state of the rollouts."""


class PluginRollouts(GroupSource):
    """Calls a plugin's rollout source.

    Arguments:
        source: fills batches.
        live: owns the prompts and their state.
    """

    def __init__(self, source: RoutedComponent, *, live: GroupSource) -> None:
        self._source = source
        self._live = live
        self.prompts = live.prompts

    async def fill(self, batch: CollectedRollout) -> Mapping[str, float]:
        """Let the source fill ``batch``.

        Raises:
            PluginError: the source failed, or returned no metrics.
        """
        with self._boundary():
            metrics = await self._source.component.fill(batch)
        return require_metrics(metrics, source=f"{self._source.plugin}: rollout source {self._source.name!r}")

    def pending_groups(self) -> PendingGroups:
        """Return the groups that the requeue buffer holds."""
        return self._live.pending_groups()

    def state(self) -> dict[str, Any]:
        """Return the state of the live rollouts and of the plugin's source."""
        with self._boundary(": state"):
            state = self._source.component.state()
        return {**self._live.state(), **({SOURCE_STATE: dict(state)} if state else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state` returned."""
        self._live.restore(state)
        if SOURCE_STATE in state:
            with self._boundary(": restore"):
                self._source.component.restore(state[SOURCE_STATE])

    def _boundary(self, method: str = "") -> AbstractContextManager[None]:
        return component_boundary(self._source.plugin, f"rollout source {self._source.name!r}{method}")


class _SavedCursor(DataSource):
    """The data cursor of the run that saved the rollouts, so that a live run can resume from this one."""

    def __init__(self) -> None:
        self.cursor: dict[str, Any] = {}

    def next_groups(self, n: int) -> list[PromptGroup]:
        raise AssertionError("a train-only run takes no prompts")

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Do nothing: groups are read from their file."""

    def state(self) -> dict[str, Any]:
        return self.cursor

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cursor = dict(state)

    def __len__(self) -> int:
        return 0
