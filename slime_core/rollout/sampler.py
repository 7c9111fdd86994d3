"""Turns prompts into shards: collect groups, estimate advantages, pack. Runs in one Ray actor with one event loop.

    GroupSource       where groups come from: generated now, read from files, or a plugin's rollout source
                      (:mod:`slime_core.rollout.group_source`)
    CollectedGroups   which groups are kept, and how many are missing (:mod:`slime_core.rollout.rollout_batch`)
    Sampler           collects a rollout and packs it into one shard a data-parallel rank; evaluates
    EvalSampler       evaluates only

Nothing here knows Megatron or Ray: the actor around it (:mod:`slime_core.rollout.actor`) puts shards into the object
store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from slime_core.errors import PluginError, RunError
from slime_core.plugins.contracts import Place, SamplerInfo, TrainSamples
from slime_core.plugins.lifecycle import LifecycleHooks, PlaceStates
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.rollout.components import RewardsAsAdvantages, Transforms, refuse_unusable
from slime_core.rollout.engines.responses import spec_metrics
from slime_core.rollout.evaluation import pass_rates
from slime_core.rollout.group_generator import truncates
from slime_core.rollout.group_scheduler import LiveRollouts
from slime_core.rollout.group_source import GroupSource, PluginRollouts, RecordedRollouts
from slime_core.rollout.requeue import RequeueBuffer, Staleness, held_groups
from slime_core.rollout.rollout_batch import CollectedGroups, RolloutBatch, describe_failures
from slime_core.rollout.rollout_files import Recorded, RolloutFiles, write_rollout
from slime_core.rollout.sampler_components import SamplerComponents, SamplerSettings
from slime_core.rollout.shards import BatchPlan, batch_metrics, grouped_rewards, loss_masks, make_shards
from slime_core.track.ledger import LEDGER, PendingGroups, PromptLedger
from slime_core.track.record import Timeline
from slime_core.types import Sample, TrainBatch


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """One rollout: a shard a data-parallel rank, and what its samples look like; ``warnings`` are for people."""

    shards: list[TrainBatch]
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The sampler's part of a checkpoint, all of one moment.

    Arguments:
        cursor: the data source, and every group that was taken from it and not trained, JSON-ready.
        plugin_states: what the plugins of this process want to find again.
    """

    cursor: dict[str, Any]
    plugin_states: PlaceStates


class EvalSampler:
    """The sampler of a run, or of an actor, that only evaluates: it takes no prompts and trains nothing.

    Arguments:
        manifest: of the plugins in ``registry``, for reward models in their own processes; None: they run in this one.

    Raises:
        DataError: evaluation prompts cannot be read.
        PluginError: a component cannot be loaded, or ``slime_sampler_start`` failed.
    """

    def __init__(self, settings: SamplerSettings, registry: Registry, *, manifest: Manifest | None = None) -> None:
        self.hooks = _start_hooks(settings, registry)
        self._components = SamplerComponents(settings, registry, hooks=self.hooks, manifest=manifest)
        self.evaluation = self._components.make_evaluation()

    async def evaluate(self, step: int) -> dict[str, float]:
        """Score every evaluation set with the weights that the engines serve; returns ``eval/...`` metrics."""
        return await self.evaluation.run(self._components.context(step, evaluation=True), None)

    async def close(self) -> None:
        """Close connections; stop processes."""
        await self.evaluation.close()
        await self._components.close()


class Sampler:
    """Collects rollouts and evaluates. The actor calls one public coroutine at a time; groups may be in flight
    meanwhile.

    Arguments:
        manifest: of the plugins in ``registry``, for reward models in their own processes; None: they run in this one.

    Raises:
        DataError: prompts or evaluation prompts cannot be read.
        PluginError: a component cannot be loaded, or ``slime_sampler_start`` failed.
    """

    def __init__(self, settings: SamplerSettings, registry: Registry, *, manifest: Manifest | None = None) -> None:
        config = settings.config
        self._settings = settings
        self._config = config
        self.hooks = _start_hooks(settings, registry)
        self._components = SamplerComponents(settings, registry, hooks=self.hooks, manifest=manifest)
        self._factory = self._components.factory
        self._plan = replace(BatchPlan.of(config, settings.folder), num_ranks=settings.num_ranks)
        self._transforms = self._factory.transforms()
        self._estimator = self._factory.estimator(str(config.algorithm.advantage_estimator))
        self._ledger = PromptLedger(settings.samples_folder, is_strict=config.rollout.rollout_source is None)
        self._staleness = Staleness.of(config)
        self._collector = self._components.make_collector() if config.debug.generates else None
        self._rollouts = self._make_group_source()
        self._timeline = Timeline(settings.run_folder, "sampler")
        self._last_end_s: float | None = None  # when the last rollout was complete, on time.monotonic's clock
        self.evaluation = self._components.make_evaluation()
        saved = config.debug.save_debug_rollout_data
        self._saved_rollouts = None if saved is None else RolloutFiles(saved, "save_debug_rollout_data")

    def _make_group_source(self) -> GroupSource:
        config, files = self._config, self._config.debug.load_debug_rollout_data
        if self._collector is None:
            if files is None:
                raise RunError("nothing is generated, and no saved rollouts are named: --load-debug-rollout-data")
            return RecordedRollouts(files, share=config.debug.load_debug_rollout_data_subsample)
        data = self._factory.prompts(self._settings.prompt_data, self._components.encoder)
        live = LiveRollouts(
            config,
            self._components,
            prompts=RequeueBuffer(data, self._ledger.journal, holds=config.rollout.partial_rollout),
            collector=self._collector,
            staleness=self._staleness,
            hooks=self.hooks,
        )
        name = config.rollout.rollout_source
        if name is None:
            return live
        source, plugin = self._factory.rollout_source(name)
        return PluginRollouts(source, name=name, plugin=plugin, live=live)

    # --- One rollout -------------------------------------------------------------------------------------------------

    async def sample(self, rollout: int) -> SampledRollout:
        """Collect rollout ``rollout``, estimate advantages and pack shards.

        Raises:
            RunError: no sample of the rollout can be trained on, or too few groups are kept.
            PluginError: a hook, a sample transform or a rollout source failed.
            DataError: a saved rollout is missing or malformed.
        """
        start_s = self._generation_start_s()
        groups, source_metrics = await self._collect(rollout)
        self._last_end_s = time.monotonic()
        rollout_s = self._last_end_s - start_s
        self._timeline.ended("generate", rollout, rollout_s)
        trained = self._require_trainable(groups, rollout)
        metrics = self._collect_metrics(groups, trained, rollout) | source_metrics
        selected = self._select_train_samples(trained, rollout)
        warnings = groups.warnings() + self._plan.warnings([len(sample.tokens) for sample in selected.samples])
        with self._timeline.span("pack", rollout):
            shards = self._make_shards(selected, rollout)
        metrics |= batch_metrics(shards, self._plan) | spec_metrics(groups.samples)
        if not self._rollouts.is_replay:
            per_second = metrics["rollout/response_tokens"] / rollout_s
            metrics["perf/tokens_per_gpu_per_sec"] = per_second / self._config.num_rollout_gpus
        logged = self.hooks.answers(
            "slime_log_rollout", rollout=rollout, samples=groups.samples, metrics=metrics, seconds=rollout_s
        )
        return SampledRollout(shards, {} if any(logged) else metrics, [*warnings, *self._factory.filter.news()])

    def _generation_start_s(self) -> float:
        """When generation of this rollout started: now, or, with a buffer, when the last rollout was complete."""
        runs_ahead = self._config.rollout.async_buffer_size > 0
        return self._last_end_s if runs_ahead and self._last_end_s is not None else time.monotonic()

    async def _collect(self, rollout: int) -> tuple[CollectedGroups, dict[str, float]]:
        """A full rollout, and additional metrics of its source. Its samples are written to disk even if it fails."""
        settings, source = self._config.rollout, self._rollouts
        groups = CollectedGroups(
            # A recorded rollout was saved after the transforms of its run.
            Transforms() if source.is_replay else self._transforms,
            wanted=settings.rollout_batch_size,
            reward_key=settings.reward_key,
            drops_failed_groups=settings.failed_samples == "drop_group" and not source.is_replay,
        )
        batch = RolloutBatch(
            rollout,
            groups,
            prompts=source.prompts,
            staleness=self._staleness,
            collector=self._collector,
            generation=self._components.generation,
        )
        if source.is_replay:
            return groups, dict(await source.fill(batch))
        try:
            source_metrics = dict(await source.fill(batch))
        finally:
            self._components.writer.write("train", rollout, groups.written, dropped=groups.dropped)
        source.prompts.put_back(groups.aborted)
        source_metrics |= self._ledger.close(rollout, self._pending_groups())
        if self._saved_rollouts is not None:
            temperature = self._config.rollout.rollout_temperature
            recorded = Recorded(rollout, temperature, groups.trained, groups.lost, self.cursor())
            write_rollout(self._saved_rollouts.path(rollout), recorded)
        return groups, source_metrics

    def _require_trainable(self, groups: CollectedGroups, rollout: int) -> list[Sample]:
        """The samples that are trained, after the hooks of plugins; at least one a rank and optimizer step."""
        trained = groups.trained
        plugins = self.hooks.implementers("slime_after_rollout")
        if plugins:
            self.hooks.call("slime_after_rollout", rollout=rollout, samples=trained)
            for sample in trained:
                refuse_unusable(sample, self._config.rollout.reward_key, who=f"slime_after_rollout ({plugins})")
        self.hooks.call("slime_after_collect", rollout=rollout, groups=groups.received, prompts=self._rollouts.prompts)
        needed = self._config.steps_per_rollout * self._settings.num_ranks
        if len(trained) < needed:
            raise RunError(
                f"rollout {rollout}: {len(trained)} of {len(groups.samples)} samples can be trained on; {needed} are "
                f"needed, one for each optimizer step and learner rank: {describe_failures(groups.samples)}"
            )
        return trained

    def _select_train_samples(self, trained: list[Sample], rollout: int) -> TrainSamples:
        """``trained``, or the samples with which a plugin replaces it (``slime_before_shards``)."""
        found = self.hooks.answers("slime_before_shards", rollout=rollout, samples=trained)
        if len(found) > 1:
            plugins = self.hooks.implementers("slime_before_shards")
            raise PluginError(
                f"slime_before_shards ({plugins}): {len(found)} plugins say what is trained; name only one of them"
            )
        selected = found[0] if found else TrainSamples(trained)
        if not isinstance(selected, TrainSamples):
            plugins = self.hooks.implementers("slime_before_shards")
            raise PluginError(
                f"slime_before_shards of {plugins} returned {selected!r:.80}; return TrainSamples, or None."
            )
        return selected

    def _make_shards(self, selected: TrainSamples, rollout: int) -> list[TrainBatch]:
        rewards = grouped_rewards(selected.samples, loss_masks(selected.samples), key=self._config.rollout.reward_key)
        # Without an estimator here its scope is token: the ranks of the learner estimate advantages from the rewards.
        are_given = selected.rewards_are_advantages and self._estimator is not None
        estimator = RewardsAsAdvantages() if are_given else self._estimator
        advantages_B = self._factory.advantages(estimator, rewards)
        return make_shards(
            selected.samples,
            advantages_B,
            self._plan,
            rollout=rollout,
            temperature=self._config.rollout.rollout_temperature,
            rewards_B=rewards.rewards_B,
            with_routes=self._config.learner.use_rollout_routing_replay,
            cuts=truncates(self._config.rollout),
        )

    def _collect_metrics(self, groups: CollectedGroups, trained: list[Sample], rollout: int) -> dict[str, float]:
        collector = self._collector
        failures = {} if collector is None else collector.take_failures()
        retries = {} if collector is None else collector.take_retries()
        metrics = {
            **groups.metrics(trained),
            **{f"rollout/reward_failures/{cause}": count for cause, count in failures.items()},
            **{f"rollout/retries/{cause}": count for cause, count in retries.items()},
            **self._factory.filter.metrics(),
            **self._staleness.metrics(trained, rollout=rollout, left_out=len(groups.stale)),
            **self._rollouts.metrics(),
        }
        if self._config.rollout.log_passrate:
            rates = pass_rates(groups.solved(self._config.eval.eval_pass_threshold))
            metrics |= {f"rollout/pass@{k}": rate for k, rate in rates.items()}
        return metrics

    # --- Evaluation --------------------------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> dict[str, float]:
        """Score every evaluation set with the weights that the engines serve; returns ``eval/...`` metrics.

        Groups in flight finish first, so that the evaluation has the engines to itself.
        """
        await self._rollouts.drain()
        with self._timeline.span("evaluate", step):
            return await self.evaluation.run(self._components.context(step, evaluation=True), self._rollouts.prompts)

    # --- State -------------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """The engines serve the weights of ``version`` trained rollouts.

        Raises:
            SlimeError: a group in flight has failed.
        """
        if self._last_end_s is None:
            self._last_end_s = time.monotonic()  # generation of the first rollout starts here
        self._rollouts.published(version)

    def cursor(self) -> dict[str, Any]:
        """The data cursor after the last returned rollout: groups generated ahead are pending in it, not trained."""
        return {LEDGER: self._ledger.state(self._pending_groups()), **self._rollouts.state()}

    def state(self) -> SamplerState:
        """The sampler's part of a checkpoint.

        Raises:
            SlimeError: a group in flight has failed, or a plugin cannot return its state.
        """
        self._rollouts.raise_failure()
        return SamplerState(self.cursor(), self.hooks.states())

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue the data where ``cursor`` was taken."""
        self._ledger.restore(cursor.get(LEDGER))
        self._rollouts.restore(cursor)

    async def close(self) -> None:
        """Cancel what is in flight; close connections and files; stop processes."""
        await self._rollouts.close()
        await self.evaluation.close()
        await self._components.close()

    def _pending_groups(self) -> PendingGroups:
        """Groups that were taken from the data source and not trained: in flight, finished, or held to be resumed."""
        found = self._rollouts.pending_groups()
        return replace(found, held={**found.held, **held_groups(self._rollouts.prompts)})


def _start_hooks(settings: SamplerSettings, registry: Registry) -> LifecycleHooks:
    hooks = LifecycleHooks(registry, place=Place.SAMPLER, options=settings.options)
    info = SamplerInfo(settings.router_url, settings.model_urls, trains=settings.trains)
    hooks.call("slime_sampler_start", sampler=info)
    return hooks
