"""Turns prompts into shards: generate, reward, estimate, pack. Runs as one Ray actor with its own event loop.

    production  groups in flight, for this rollout and those after it (:mod:`slime_core.rollout.production`)
    collect     one group generated, rewarded as it finishes (:mod:`slime_core.rollout.collect`)
    staleness   which of them are too old to be trained (:mod:`slime_core.rollout.staleness`)
    harvest     which of them are kept, and how many are missing (:mod:`slime_core.rollout.harvest`)
    sample      a whole rollout, packed into one shard a data-parallel rank; only references leave
    evaluate    held-out prompts, measured and never trained on (:mod:`slime_core.rollout.evaluation`)

Nothing here knows Megatron or Ray: the actor around it (:mod:`slime_core.rollout.actor`) puts shards into the object
store.
"""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

from slime_core.errors import RunError
from slime_core.plugins.contracts import DataSource, Place
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.prompts.recorded import Recorded, RolloutFiles, write_rollout
from slime_core.rollout.collect import missing_of
from slime_core.rollout.engines.speculation import spec_metrics
from slime_core.rollout.functions import AsRewarded
from slime_core.rollout.harvest import Harvest, causes
from slime_core.rollout.ledger import LEDGER, Ledger, Present
from slime_core.rollout.pace import Pace
from slime_core.rollout.parts import Parts
from slime_core.rollout.plan import BatchPlan, batch_metrics
from slime_core.rollout.production import Production
from slime_core.rollout.sampled import Sampled, SamplerSettings, SamplerState
from slime_core.rollout.sampling import cuts, train_sampling
from slime_core.rollout.scores import pass_rates
from slime_core.rollout.shards import grouped_rewards, loss_masks, make_shards
from slime_core.rollout.staleness import Staleness, never_young
from slime_core.rollout.supply import Supply, held_by
from slime_core.rollout.transforms import load_transforms, refuse_unusable
from slime_core.track.ledger import REQUEUED, STALE
from slime_core.types import PromptGroup, Sample, Status, TrainBatch

__all__ = ["Sampler"]

MOST_OLD_ROUNDS = 100
"""One after the other, of which some groups were too old; over-sampling leaves no more than a few."""


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
        self.hooks = LifecycleHooks(registry, place=Place.SAMPLER, options=settings.options)
        self._parts = Parts(settings, registry, manifest=manifest)
        self._components, self._functions = self._parts.components, self._parts.functions
        self._sampling = train_sampling(config, end_ids=self._parts.encoder.end_ids)
        self._collector = self._collects()
        self._plan = replace(BatchPlan.of(config, settings.folder), num_ranks=settings.num_ranks)
        self._transforms = load_transforms(
            config.rollout.sample_transforms, registry, options=settings.options, run=settings.run
        )
        self._estimator = self._components.estimator(str(config.algorithm.advantage_estimator))
        if self._functions.shapes_rewards and self._estimator is not None:
            self._estimator = AsRewarded()
        own_rollouts = config.custom.rollout_function_path is not None
        self._ledger = Ledger(settings.samples_folder, is_strict=not own_rollouts)
        self._source = self._data_source()
        self._production = self._produces()
        self._staleness, self._begun_anew = Staleness.of(config), 0
        self._ended_s: float | None = None
        self.evaluation = self._parts.evaluation()
        saved = config.debug.save_debug_rollout_data
        self._records = None if saved is None else RolloutFiles(saved, "save_debug_rollout_data")

    # --- One rollout -------------------------------------------------------------------------------------------------

    async def sample(self, rollout: int) -> Sampled:
        """Generate, reward and pack rollout ``rollout``.

        Raises:
            RunError: no sample of the rollout can be trained on, or too few groups are kept.
            PluginError: a hook or a sample transform failed.
        """
        begun_s = self._begun_s()
        harvest, own_metrics = await self._harvest(rollout)
        self._ended_s = time.monotonic()
        rollout_s = self._ended_s - begun_s
        trained = self._trainable(harvest, rollout)
        metrics = self._metrics(harvest, trained, rollout) | own_metrics
        replaced = self._functions.trained(trained)
        trained = trained if replaced is None else replaced
        warnings = harvest.warnings() + self._plan.warnings([len(sample.tokens) for sample in trained])
        shards = self._shards(trained, rollout)
        metrics |= batch_metrics(shards, self._plan) | spec_metrics(harvest.samples)
        per_second = metrics["rollout/response_tokens"] / rollout_s
        metrics["perf/tokens_per_gpu_per_sec"] = per_second / self._config.num_rollout_gpus
        metrics = {} if self._functions.log(rollout, harvest.samples, metrics, rollout_s) else metrics
        return Sampled(shards, metrics, [*warnings, *self._components.left_out.news()])

    def _begun_s(self) -> float:
        """Since when what comes next is generated: ahead of training, since the last rollout was there."""
        ahead = self._config.rollout.async_buffer_size > 0
        return self._ended_s if ahead and self._ended_s is not None else time.monotonic()

    def _shards(self, trained: list[Sample], rollout: int) -> list[TrainBatch]:
        rewards = grouped_rewards(trained, loss_masks(trained), key=self._config.rollout.reward_key)
        return make_shards(
            trained,
            self._components.advantages(self._estimator, rewards),
            self._plan,
            rollout=rollout,
            temperature=self._config.rollout.rollout_temperature,
            rewards_B=rewards.rewards_B,
            with_routes=self._config.learner.use_rollout_routing_replay,
            cuts=cuts(self._config.rollout),
        )

    def _metrics(self, harvest: Harvest, trained: list[Sample], rollout: int) -> dict[str, float]:
        failures, retries = self._collector.take_failures(), self._collector.take_retries()
        begun_anew, self._begun_anew = self._begun_anew, 0
        metrics = {
            **harvest.metrics(trained),
            **{f"rollout/reward_failures/{cause}": count for cause, count in failures.items()},
            **{f"rollout/retries/{cause}": count for cause, count in retries.items()},
            **self._components.left_out.metrics(),
            **self._staleness.metrics(trained, rollout=rollout, left_out=len(harvest.stale)),
            **({"rollout/staleness/begun_anew": float(begun_anew)} if begun_anew else {}),
            **self._production.metrics(),
        }
        if self._config.rollout.log_passrate:
            rates = pass_rates(harvest.solved(self._config.eval.eval_pass_threshold))
            metrics |= {f"rollout/pass@{k}": rate for k, rate in rates.items()}
        return metrics

    async def _harvest(self, rollout: int) -> tuple[Harvest, dict[str, float]]:
        """A full harvest, written down whatever happens, and the metrics of the run's own function."""
        settings = self._config.rollout
        harvest = Harvest(
            self._transforms,
            wanted=settings.rollout_batch_size,
            reward_key=settings.reward_key,
            drops_failed_groups=settings.failed_samples == "drop_group",
        )
        try:
            own_metrics = await self._fill(harvest, rollout)
        finally:
            self._parts.writer.write("train", rollout, harvest.written, dropped=harvest.dropped)
        # Ended from outside: nothing is wrong with these prompts, so they come again, and only then are they trained.
        self._source.put_back(harvest.aborted)
        own_metrics |= self._ledger.close(rollout, self._present())
        if self._records is not None:
            temperature = self._config.rollout.rollout_temperature
            found = Recorded(rollout, temperature, harvest.trained, harvest.lost, self.cursor())
            write_rollout(self._records.path(rollout), found)
        return harvest, own_metrics

    def _trainable(self, harvest: Harvest, rollout: int) -> list[Sample]:
        """What is trained on, once the plugins have seen it; enough of it for every rank and optimizer step."""
        trained = harvest.trained
        watchers = self.hooks.implementers("slime_after_rollout")
        if watchers:
            self.hooks.call("slime_after_rollout", rollout=rollout, samples=trained)
            for sample in trained:
                refuse_unusable(sample, self._config.rollout.reward_key, who=f"slime_after_rollout ({watchers})")
        self._functions.finished(harvest.came, self._source)
        needed = self._config.steps_per_rollout * self._settings.num_ranks
        if len(trained) < needed:
            raise RunError(
                f"rollout {rollout}: {len(trained)} of {len(harvest.samples)} samples can be trained on; {needed} are "
                f"needed, one for each optimizer step and learner rank: {causes(harvest.samples)}"
            )
        return trained

    async def _fill(self, harvest: Harvest, rollout: int) -> dict[str, float]:
        """All groups of a rollout, rewarded and transformed: by the run's own function, or by the run's components.

        Of the latter, other prompts take the place of groups that transforms drop (dynamic sampling, DAPO 2503.14476,
        section 3.2), in as many rounds as the run allows. What was too old, as over-sampling leaves it, is always
        replaced: it is the sampler's own doing.

        Returns:
            The function's own metrics.
        """
        made = await self._functions.rollout(rollout, self._source)
        if made is not None:
            await self._collector.reward_missing(made.groups)
            harvest.wanted = len(made.groups)
            self._receive(harvest, made.groups, rollout)
            return made.metrics
        limit = self._config.rollout.rollout_max_refills
        num_old, rounds = await self._round(harvest, rollout, harvest.missing), 0
        while harvest.missing and (num_old or harvest.refills < limit):
            harvest.refills += not num_old
            rounds = rounds + 1 if num_old else 0
            if rounds > MOST_OLD_ROUNDS:
                raise never_young(harvest.stale, rollout=rollout)
            num_old = await self._round(harvest, rollout, min(harvest.missing, num_old) or harvest.missing)
        await self._production.settle()
        if harvest.missing and limit:
            raise RunError(f"rollout {rollout}: {harvest.shortage(limit)}")
        return {}

    async def _round(self, harvest: Harvest, rollout: int, count: int) -> int:
        return self._receive(harvest, await self._production.take(rollout, count), rollout)

    def _receive(self, harvest: Harvest, came: list[PromptGroup], rollout: int) -> int:
        """Put ``came`` into the harvest; how many of them were too old."""
        fresh, stale = self._staleness.split(came, rollout=rollout)
        if self._staleness.stale == "requeue":
            self._source.put_back(stale)
        harvest.leave_out(stale, STALE if self._staleness.stale == "evict" else REQUEUED)
        harvest.take(fresh)
        return len(stale)

    def _prepare(self, rollout: int, groups: list[PromptGroup]) -> None:
        for group in groups:
            too_old = self._staleness.refuses(group, rollout=rollout)
            self._begun_anew += too_old * sum(sample.status is Status.ABORTED for sample in group)
            self._collector.prepare(group, too_old=too_old)
        self.hooks.call("slime_before_rollout", rollout=rollout, groups=groups)

    async def _make(self, rollout: int, group: PromptGroup) -> PromptGroup:
        context = self._parts.context(rollout, evaluation=False)
        given = list(group)
        (made,) = await self._collector.collect(context, [group], self._sampling)
        return [*made, *missing_of(given, made)]

    # --- Evaluation --------------------------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> dict[str, float]:
        """Scores of every evaluation set under the weights the engines hold now, as ``eval/...`` metrics.

        Where this sampler also generates ahead of training, the engines first end that.
        """
        await self._production.rest()
        return await self.evaluation.run(self._parts.context(step, evaluation=True), self._source)

    # --- State -------------------------------------------------------------------------------------------------------

    def published(self, version: int) -> None:
        """The engines serve the weights that ``version`` rollouts have trained.

        Raises:
            SlimeError: what ended a group in the meantime.
        """
        if self._ended_s is None:
            self._ended_s = time.monotonic()  # what is generated ahead for the first rollout begins here
        self._production.published(version)

    def cursor(self) -> dict[str, Any]:
        """Where the data stands, behind the rollouts that were returned, whatever was generated ahead."""
        state: dict[str, Any] = self._production.state()
        return {LEDGER: self._ledger.state(self._present()), **state}

    def state(self) -> SamplerState:
        """What a checkpoint holds of the sampler.

        Raises:
            SlimeError: what ended a group in the meantime; or a plugin cannot say its state.
        """
        self._production.check()
        return SamplerState(self.cursor(), self.hooks.states())

    def restore(self, cursor: dict[str, Any]) -> None:
        """Continue the data where ``cursor`` was taken."""
        self._ledger.restore(cursor.get(LEDGER))
        self._production.restore(cursor)

    async def close(self) -> None:
        """End what is in flight; close connections and files."""
        await self._production.close()
        await self.evaluation.close()
        await self._parts.close()

    # --- Parts -------------------------------------------------------------------------------------------------------

    def _collects(self) -> Any:
        return self._parts.collector()

    def _produces(self) -> Any:
        pace = Pace.of(self._config)
        return Production(self._source, prepare=self._prepare, make=self._make, pace=pace, ends=self._ends_requests)

    def _ends_requests(self) -> AbstractAsyncContextManager[None]:
        return self._parts.client.ended()

    def _data_source(self) -> DataSource:
        prompts = self._components.prompts(self._settings.prompt_data, self._parts.encoder)
        return Supply(prompts, self._ledger.journal, holds=self._config.rollout.partial_rollout)

    def _present(self) -> Present:
        """The groups that are in nobody else's hands."""
        found: Present = self._production.present()
        return replace(found, held={**found.held, **held_by(self._source)})
