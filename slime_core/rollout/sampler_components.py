"""The settings of a sampler, and the tokenizer, client and components that are made from them once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from slime_core.config.eval_sets import EvalSet
from slime_core.config.model_config import context_length, routes_shape
from slime_core.config.schema import RolloutConfig
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import ProcessSettings
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.prompts.chat import InputProcessor, PromptEncoder, has_processor
from slime_core.prompts.requests import template_arguments
from slime_core.rollout.components import ComponentFactory
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.evaluation import EvalComponents, Evaluation
from slime_core.rollout.group_generator import GroupGenerator, apply_row_sampling, train_sampling
from slime_core.rollout.reward_pool import RewardPool, RewardPoolSettings
from slime_core.rollout.reward_scoring import RewardScorers
from slime_core.track.record import SampleWriter
from slime_core.types import Sample

FEWEST_WORKERS, MOST_WORKERS = 2, 16
"""Two, so that one can hang; more than 16 cost memory and help only rewards that compute for long."""


@dataclass(frozen=True, slots=True)
class SamplerSettings(ProcessSettings):
    """The settings of a sampler.

    Arguments:
        prompt_data: the training prompts.
        router_url: where generation requests go.
        num_ranks: data-parallel ranks of the learner.
        samples_folder: where readable samples are written; None: nowhere.
        bad_rows: receives what is wrong with rows that are left out of the prompts; None: nothing does.
        rewards_log: receives what reward models print; None: nothing does.
        num_engines: servers of the router, for the number of requests in flight.
        engine_urls: of engines that get requests directly; empty: requests go to the router.
        trains: False: the sampler only evaluates, so it needs neither prompts nor an advantage estimator.
    """

    prompt_data: Path
    router_url: str
    num_ranks: int = 1
    samples_folder: Path | None = None
    rewards_log: Path | None = None
    bad_rows: Path | None = None
    num_engines: int = 1
    trains: bool = True
    engine_urls: tuple[str, ...] = ()


class SamplerComponents:
    """The components with which a sampler generates, rewards and evaluates.

    Arguments:
        hooks: of plugins, called after generation and for evaluations.
        manifest: of the plugins in ``registry``, for reward models in their own processes; None: they run in this one.

    Attributes:
        encoder: prompts to ids, ids to text.
        client: sends requests to the engines.
        factory: makes the run's components by name.
        writer: writes readable samples.

    Raises:
        DataError: the tokenizer lacks the chat template that the run requires.
        PluginError: a component cannot be loaded.
    """

    def __init__(
        self, settings: SamplerSettings, registry: Registry, *, hooks: LifecycleHooks, manifest: Manifest | None = None
    ) -> None:
        config = settings.config
        self._settings = settings
        self._config = config
        self._hooks = hooks
        self.encoder = self._make_encoder(templated=config.data.apply_chat_template)
        self._processor = self._make_processor()
        self.client = self._make_client()
        self._context_length = config.engine.sglang_context_length or context_length(settings.folder)
        self.factory = ComponentFactory(config, registry, settings.options, settings.run, bad_rows=settings.bad_rows)
        self._reward_scorers = RewardScorers(
            registry,
            make=partial(self.factory.make, Kind.REWARD_MODEL),
            pool=make_pool(manifest, settings),
        )
        self._generators = cache(self.factory.generators)
        self._rewards = cache(partial(self.factory.rewards, make=self._reward_scorers))
        self.writer = SampleWriter(settings.samples_folder, num_with_tokens=config.run.num_token_samples)

    def make_collector(self, rollout: RolloutConfig | None = None) -> GroupGenerator:
        """A collector with the generate function and the reward model of ``rollout``; None: of the run's settings."""
        settings = rollout or self._config.rollout
        return GroupGenerator(
            self._generators(settings.generate_function),
            self._rewards(settings.rm_type),
            rollout=settings,
            hooks=self._hooks,
        )

    def make_evaluation(self) -> Evaluation:
        """The evaluation sets of the run, each with its own settings."""
        components = EvalComponents(
            make_encoder=self._encoder_for,
            make_collector=self._make_eval_collector,
            hooks=self._hooks,
            writer=self.writer,
            checks=self.factory.checks(trains=False),
            models=self._settings.model_urls,
            formats=self.factory.formats,
        )
        return Evaluation(self._config, components)

    def context(self, number: int, *, evaluation: bool) -> GenerateContext:
        """The context of generate functions.

        Arguments:
            number: of the rollout; for an evaluation, the training steps done.
        """
        return GenerateContext(
            self.client,
            self.encoder,
            evaluation,
            number,
            masks_resumed=self._config.rollout.mask_offpolicy_in_partial_rollout,
            models=self._settings.model_urls,
            processor=self._processor,
            context_length=self._context_length,
        )

    def generation(self, rollout: int, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """The arguments of a generate function in training, for ``sample`` and its group.

        Raises:
            DataError: the sample's row requests sampling that does not exist or cannot be trained on.
        """
        run = train_sampling(self._config, end_ids=self.encoder.end_ids)
        return apply_row_sampling(sample, self.context(rollout, evaluation=False), run)

    async def close(self) -> None:
        """Close connections; stop processes."""
        await self.client.close()
        if self._processor is not None:
            self._processor.close()
        await self._reward_scorers.close()

    def _make_eval_collector(self, one: EvalSet) -> GroupGenerator:
        own = {"generate_function": one.generate_function, "rm_type": one.rm_type, "reward_key": one.reward_key}
        return self.make_collector(self._config.rollout.model_copy(update=own))

    def _encoder_for(self, templated: bool) -> PromptEncoder:
        is_same = templated == self._config.data.apply_chat_template
        return self.encoder if is_same else self._make_encoder(templated=templated)

    def _make_encoder(self, *, templated: bool) -> PromptEncoder:
        return PromptEncoder(
            self._settings.folder,
            apply_chat_template=templated,
            template_arguments=template_arguments(self._config.data),
            trust_remote_code=self._config.model.trust_remote_code,
        )

    def _make_processor(self) -> InputProcessor | None:
        has_images = self._settings.trains and self._config.data.multimodal_keys is not None
        if not has_images or not has_processor(self._settings.folder):
            return None
        return InputProcessor(self.encoder, trust_remote_code=self._config.model.trust_remote_code)

    def _make_client(self) -> GenerateClient:
        settings, config = self._settings, self._config
        return GenerateClient(
            settings.router_url,
            max_in_flight=config.rollout.sglang_server_concurrency * settings.num_engines,
            timeout_s=config.rollout.rollout_request_timeout_s,
            vocab_size=self.encoder.vocab_size,
            routes=routes_shape(settings.folder) if config.learner.use_rollout_routing_replay else None,
            engines=settings.engine_urls,
            num_engines=settings.num_engines,
            restart_s=config.engine.engine_start_timeout_s if config.restarts_engines else 0.0,
        )


def default_num_workers(num_cores: int) -> int:
    """Number of reward processes on a machine with ``num_cores`` cores, which engines and learner use too."""
    return max(FEWEST_WORKERS, min(MOST_WORKERS, num_cores // 2))


def make_pool(manifest: Manifest | None, settings: SamplerSettings) -> RewardPool | None:
    """The pool of a run; None without a manifest. It starts its first process with the first call."""
    if manifest is None:
        return None
    rollout = settings.config.rollout
    return RewardPool(
        RewardPoolSettings(
            manifest.to_json(),
            settings.options,
            settings.run,
            num_workers=rollout.reward_num_workers or default_num_workers(len(os.sched_getaffinity(0))),
            timeout_s=rollout.reward_timeout_s,
            memory_gib=rollout.reward_memory_gib,
            log_file=settings.rewards_log,
        )
    )
