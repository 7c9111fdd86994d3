"""Turns prompts into shards: generate, reward, estimate, pack. Runs as one Ray actor with its own event loop.

    rollouts    where groups come from: generated now, read from files, or made by a plugin
                (:mod:`slime_core.rollout.group_source`)
    harvest     which of them are kept, and how many are missing (:mod:`slime_core.rollout.collected_groups`)
    sample      a whole rollout, packed into one shard a data-parallel rank; only references leave
    evaluate    held-out prompts, measured and never trained on (:mod:`slime_core.rollout.evaluation`)

Nothing here knows Megatron or Ray: the actor around it (:mod:`slime_core.rollout.actor`) puts shards into the object
store.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from slime_core.errors import PluginError, RunError
from slime_core.plugins.contracts import Place, SamplerInfo, TrainSamples
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.prompts.recorded import Recorded, RolloutFiles, write_rollout
from slime_core.rollout.batch_plan import BatchPlan, batch_metrics
from slime_core.rollout.collected_groups import CollectedGroups, describe_failures
from slime_core.rollout.component_factory import RewardsAsAdvantages
from slime_core.rollout.engines.generation import spec_metrics
from slime_core.rollout.eval_scores import pass_rates
from slime_core.rollout.group_source import GroupSource, RolloutBatch
from slime_core.rollout.live_rollouts import LiveRollouts
from slime_core.rollout.prompt_ledger import LEDGER, PendingGroups, PromptLedger
from slime_core.rollout.recorded_rollouts import RecordedRollouts
from slime_core.rollout.requeue_buffer import RequeueBuffer, held_groups
from slime_core.rollout.sampler_components import SamplerComponents
from slime_core.rollout.sampler_records import SampledRollout, SamplerSettings, SamplerState
from slime_core.rollout.sampling_params import truncates
from slime_core.rollout.shards import grouped_rewards, loss_masks, make_shards
from slime_core.rollout.staleness import Staleness
from slime_core.rollout.transforms import Transforms, load_transforms, refuse_unusable
from slime_core.types import Sample, TrainBatch

__all__ = ["Sampler", "sampler_hooks"]


def sampler_hooks(settings: SamplerSettings, registry: Registry) -> LifecycleHooks:
    """The lifecycle hooks of a sampler that starts.

    Raises:
        PluginError: ``slime_sampler_start`` failed.
    """
    hooks = LifecycleHooks(registry, place=Place.SAMPLER, options=settings.options)
    info = SamplerInfo(settings.router_url, settings.model_urls, trains=settings.trains)
    hooks.call("slime_sampler_start", sampler=info)
    return hooks


class Sampler:
    """See the module; one public coroutine runs at a time, beside the groups in flight."""

    def __init__(self, settings: SamplerSettings, registry: Registry, *, manifest: Manifest | None = None) -> None:
        """Load the tokenizer, the data and the components.

        Arguments:
            manifest: of the plugins in ``registry``, for reward models in processes of their own; None: they run here.

        Raises:
            DataError: prompts or evaluation prompts cannot be read.
            PluginError: a component cannot be loaded.
        """
        config = settings.config
        self._settings, self._config = settings, config
        self.hooks = sampler_hooks(settings, registry)
        self._parts = SamplerComponents(settings, registry, hooks=self.hooks, manifest=manifest)
        self._components = self._parts.components
        self._plan = replace(BatchPlan.of(config, settings.folder), num_ranks=settings.num_ranks)
        self._transforms = load_transforms(
            config.rollout.sample_transforms, registry, options=settings.options, run=settings.run
        )
        self._estimator = self._components.estimator(str(config.algorithm.advantage_estimator))
        self._ledger = PromptLedger(settings.samples_folder, is_strict=config.rollout.rollout_source is None)
        self._staleness = Staleness.of(config)
        self._collector = self._parts.collector() if config.debug.generates else None
        self._rollouts = self._make_rollouts()
        self._ended_s: float | None = None
        self.evaluation = self._parts.evaluation()
        saved = config.debug.save_debug_rollout_data
        self._records = None if saved is None else RolloutFiles(saved, "save_debug_rollout_data")

    def _make_rollouts(self) -> GroupSource:
        """Where the run's groups come from."""
        config, files = self._config, self._config.debug.load_debug_rollout_data
        if self._collector is None:
            if files is None:
                raise RunError("nothing is generated, and no saved rollouts are named: --load-debug-rollout-data")
            return RecordedRollouts(files, share=config.debug.load_debug_rollout_data_subsample)
        data = self._components.prompts(self._settings.prompt_data, self._parts.encoder)
        live = LiveRollouts(
            config,
            self._parts,
            prompts=RequeueBuffer(data, self._ledger.journal, holds=config.rollout.partial_rollout),
            collector=self._collector,
            staleness=self._staleness,
            hooks=self.hooks,
        )
        name = config.rollout.rollout_source
        return live if name is None else self._components.rollout_source(name, live)

    # --- One rollout -------------------------------------------------------------------------------------------------

    async def sample(self, rollout: int) -> SampledRollout:
        """Collect and pack rollout ``rollout``.

        Raises:
            RunError: no sample of the rollout can be trained on, or too few groups are kept.
            PluginError: a hook, a sample transform or a rollout source failed.
            DataError: a saved rollout is missing or malformed.
        """
        begun_s = self._begun_s()
        harvest, own_metrics = await self._harvest(rollout)
        self._ended_s = time.monotonic()
        rollout_s = self._ended_s - begun_s
        trained = self._trainable(harvest, rollout)
        metrics = self._metrics(harvest, trained, rollout) | own_metrics
        ready = self._ready(trained, rollout)
        warnings = harvest.warnings() + self._plan.warnings([len(sample.tokens) for sample in ready.samples])
        shards = self._shards(ready, rollout)
        metrics |= batch_metrics(shards, self._plan) | spec_metrics(harvest.samples)
        if not self._rollouts.is_replay:
            per_second = metrics["rollout/response_tokens"] / rollout_s
            metrics["perf/tokens_per_gpu_per_sec"] = per_second / self._config.num_rollout_gpus
        logged = self.hooks.answers(
            "slime_log_rollout", rollout=rollout, samples=harvest.samples, metrics=metrics, seconds=rollout_s
        )
        return SampledRollout(shards, {} if any(logged) else metrics, [*warnings, *self._components.left_out.news()])

    def _begun_s(self) -> float:
        """Since when what comes next is generated: ahead of training, since the last rollout was there."""
        ahead = self._config.rollout.async_buffer_size > 0
        return self._ended_s if ahead and self._ended_s is not None else time.monotonic()

    def _ready(self, trained: list[Sample], rollout: int) -> TrainSamples:
        """What is trained of a rollout: ``trained``, or what a plugin puts in its place."""
        found = self.hooks.answers("slime_before_shards", rollout=rollout, samples=trained)
        if len(found) > 1:
            who = self.hooks.implementers("slime_before_shards")
            raise PluginError(
                f"slime_before_shards ({who}): {len(found)} plugins say what is trained; name only one of them"
            )
        return found[0] if found else TrainSamples(trained)

    def _shards(self, ready: TrainSamples, rollout: int) -> list[TrainBatch]:
        rewards = grouped_rewards(ready.samples, loss_masks(ready.samples), key=self._config.rollout.reward_key)
        # An estimator of scope token is asked on the learner's ranks.
        are_given = ready.rewards_are_advantages and self._estimator is not None
        estimator = RewardsAsAdvantages() if are_given else self._estimator
        advantages_B = self._components.advantages(estimator, rewards)
        return make_shards(
            ready.samples,
            advantages_B,
            self._plan,
            rollout=rollout,
            temperature=self._config.rollout.rollout_temperature,
            rewards_B=rewards.rewards_B,
            with_routes=self._config.learner.use_rollout_routing_replay,
            cuts=truncates(self._config.rollout),
        )

    def _metrics(self, harvest: CollectedGroups, trained: list[Sample], rollout: int) -> dict[str, float]:
        collector = self._collector
        failures = {} if collector is None else collector.take_failures()
        retries = {} if collector is None else collector.take_retries()
        metrics = {
            **harvest.metrics(trained),
            **{f"rollout/reward_failures/{cause}": count for cause, count in failures.items()},
            **{f"rollout/retries/{cause}": count for cause, count in retries.items()},
            **self._components.left_out.metrics(),
            **self._staleness.metrics(trained, rollout=rollout, left_out=len(harvest.stale)),
            **self._rollouts.metrics(),
        }
        if self._config.rollout.log_passrate:
            rates = pass_rates(harvest.solved(self._config.eval.eval_pass_threshold))
            metrics |= {f"rollout/pass@{k}": rate for k, rate in rates.items()}
        return metrics

    async def _harvest(self, rollout: int) -> tuple[CollectedGroups, dict[str, float]]:
        """A full harvest, written down whatever happens, and further metrics of where it came from."""
        settings, source = self._config.rollout, self._rollouts
        harvest = CollectedGroups(
            # The transforms of the run that saved a rollout have kept what is trained.
            Transforms() if source.is_replay else self._transforms,
            wanted=settings.rollout_batch_size,
            reward_key=settings.reward_key,
            drops_failed_groups=settings.failed_samples == "drop_group" and not source.is_replay,
        )
        batch = RolloutBatch(
            rollout,
            harvest,
            prompts=source.prompts,
            staleness=self._staleness,
            collector=self._collector,
            generation=self._parts.generation,
        )
        if source.is_replay:
            return harvest, dict(await source.fill(batch))
        try:
            own_metrics = dict(await source.fill(batch))
        finally:
            self._parts.writer.write("train", rollout, harvest.written, dropped=harvest.dropped)
        # Ended from outside: nothing is wrong with these prompts, so they come again, and only then are they trained.
        source.prompts.put_back(harvest.aborted)
        own_metrics |= self._ledger.close(rollout, self._present())
        if self._records is not None:
            temperature = self._config.rollout.rollout_temperature
            found = Recorded(rollout, temperature, harvest.trained, harvest.lost, self.cursor())
            write_rollout(self._records.path(rollout), found)
        return harvest, own_metrics

    def _trainable(self, harvest: CollectedGroups, rollout: int) -> list[Sample]:
        """What is trained on, once the plugins have seen it; enough of it for every rank and optimizer step."""
        trained = harvest.trained
        watchers = self.hooks.implementers("slime_after_rollout")
        if watchers:
            self.hooks.call("slime_after_rollout", rollout=rollout, samples=trained)
            for sample in trained:
                refuse_unusable(sample, self._config.rollout.reward_key, who=f"slime_after_rollout ({watchers})")
        self.hooks.call("slime_after_collect", rollout=rollout, groups=harvest.came, prompts=self._rollouts.prompts)
        needed = self._config.steps_per_rollout * self._settings.num_ranks
        if len(trained) < needed:
            raise RunError(
                f"rollout {rollout}: {len(trained)} of {len(harvest.samples)} samples can be trained on; {needed} are "
                f"needed, one for each optimizer step and learner rank: {describe_failures(harvest.samples)}"
            )
        return trained

    # --- Evaluation --------------------------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> dict[str, float]:
        """Scores of every evaluation set under the weights the engines hold now, as ``eval/...`` metrics.

        Where this sampler also generates ahead of training, the engines first end that.
        """
        await self._rollouts.rest()
        return await self.evaluation.run(self._parts.context(step, evaluation=True), self._rollouts.prompts)

    # --- State -------------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """The engines serve the weights that ``version`` rollouts have trained.

        Raises:
            SlimeError: what ended a group in the meantime.
        """
        if self._ended_s is None:
            self._ended_s = time.monotonic()  # what is generated ahead for the first rollout begins here
        self._rollouts.published(version)

    def cursor(self) -> dict[str, Any]:
        """Where the data stands, behind the rollouts that were returned, whatever was generated ahead."""
        return {LEDGER: self._ledger.state(self._present()), **self._rollouts.state()}

    def state(self) -> SamplerState:
        """What a checkpoint holds of the sampler.

        Raises:
            SlimeError: what ended a group in the meantime; or a plugin cannot say its state.
        """
        self._rollouts.check()
        return SamplerState(self.cursor(), self.hooks.states())

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue the data where ``cursor`` was taken."""
        self._ledger.restore(cursor.get(LEDGER))
        self._rollouts.restore(cursor)

    async def close(self) -> None:
        """End what is in flight; close connections and files."""
        await self._rollouts.close()
        await self.evaluation.close()
        await self._parts.close()

    def _present(self) -> PendingGroups:
        """The groups that are in nobody else's hands."""
        found = self._rollouts.present()
        return replace(found, held={**found.held, **held_groups(self._rollouts.prompts)})
