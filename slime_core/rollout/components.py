"""The settings of a sampler, and the tokenizer, client and components that are constructed from them once."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from slime_core.components.construction import ProcessSettings, construct
from slime_core.components.selection import engine_columns
from slime_core.config.model_config import context_length, routes_shape
from slime_core.config.options import PROMPT_FILES
from slime_core.config.schema import EvalSet
from slime_core.contracts import PromptRequest
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.prompts.chat import CheckpointProcessor, PromptEncoder, has_processor
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import start_limit_s
from slime_core.rollout.group_generator import GroupGenerator, apply_row_sampling, train_sampling
from slime_core.rollout.prompt_filter import PromptLengths, RunFilter, template_arguments, training_request
from slime_core.rollout.reward_pool import RewardPool
from slime_core.rollout.reward_scoring import make_scorer
from slime_core.rollout.reward_worker import RewardPoolSettings
from slime_core.rollout.routing import ComponentRouter, RoutedComponent, component_boundary
from slime_core.rollout.row_checks import RowChecks, offered_to_rows
from slime_core.rollout.transforms import Transform, Transforms
from slime_core.track.samples import SampleWriter
from slime_core.types import PromptGroup, Sample

MIN_WORKERS, MAX_WORKERS = 2, 16
"""Two, so that one can hang; more than 16 cost memory and help only rewards that compute for long."""


@dataclass(frozen=True, slots=True)
class SamplerSettings(ProcessSettings):
    """The settings of a sampler.

    Arguments:
        prompt_data: the training prompts.
        router_url: receives generation requests.
        num_ranks: data-parallel ranks of the learner.
        samples_folder: receives readable samples. None: no samples are written.
        bad_rows: receives the mistakes of rows that are left out of the prompts. None: they are not written.
        rewards_log: receives the output of reward models. None: it is discarded.
        num_engines: servers of the router, for the number of requests in flight.
        engine_urls: of engines that get requests directly; empty: requests go to the router.
        first_answer_s, masks_up_to: as in :class:`GenerateClient`.
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
    first_answer_s: float = 0.0
    masks_up_to: int = 0


class SamplerComponents:
    """The components with which a sampler generates, rewards and evaluates, each constructed with its plugin's options.

    Arguments:
        hooks: of plugins, called after generation and for evaluations.
        manifest: of the plugins in ``registry``, for reward models in separate processes. None: they run in this one.
        encoder: prompts to ids, ids to text; see :func:`make_encoder`.

    Attributes:
        train_sampling: sampling parameters of training, unless a row overrides them.
        client: sends requests to the engines.
        models: name -> URL of every auxiliary model that the run serves.
        prompt_filter: selects the training prompts of the run and counts the others.
        writer: writes readable samples.

    Raises:
        PluginError: a component cannot be loaded.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        registry: Registry,
        *,
        hooks: Hooks,
        encoder: PromptEncoder,
        manifest: Manifest | None = None,
    ) -> None:
        config = settings.config
        self._settings = settings
        self._config = config
        self._registry = registry
        self.hooks = hooks
        self.encoder = encoder
        self.train_sampling = train_sampling(config, end_ids=self.encoder.end_ids)
        self._processor = self._make_processor()
        self.client = self._make_client()
        self.first_answer_s = settings.first_answer_s
        self.models = settings.model_urls
        self._context_length = config.engine.sglang_context_length or context_length(settings.folder)
        self.prompt_filter = RunFilter()
        self._reward_pool = make_pool(manifest, settings)
        self._make_reward_model = cache(partial(self.make, Kind.REWARD_MODEL))  # once, although several sums name it
        self._router = cache(self._make_router)
        self.writer = SampleWriter(settings.samples_folder, num_with_tokens=config.run.num_token_samples)
        self._warned: set[str] = set()
        self._warnings: list[str] = []

    def make(self, kind: Kind, name: str) -> Any:
        """Construct a component; raises as :func:`~slime_core.components.construction.construct` does."""
        return construct(self._registry, kind, name, self._settings.options, self._settings.run)

    def make_generator(self, eval_set: EvalSet | None = None) -> GroupGenerator:
        """Return the group generator of an evaluation set, or of the run."""
        settings = self._config.rollout
        if eval_set is not None:
            names = ("generate_function", "rm_type", "reward_key")
            settings = settings.model_copy(update={name: getattr(eval_set, name) for name in names})
        return GroupGenerator(
            self._router(Kind.GENERATE_FUNCTION, settings.generate_function),
            self._router(Kind.REWARD_MODEL, settings.rm_type),
            rollout=settings,
            hooks=self.hooks,
        )

    def make_transforms(self) -> Transforms:
        """Return the sample transforms of the run, in order."""
        kind, key = Kind.SAMPLE_TRANSFORM, self._settings.run.reward_key
        return Transforms(
            [
                Transform(
                    name,
                    self._registry.owner(kind, name),
                    self.make(kind, name),
                    sees_rollout=self._registry.traits(kind, name).scope == "rollout",
                    reward_key=key,
                )
                for name in self._config.rollout.sample_transforms
            ]
        )

    def make_estimator(self) -> RoutedComponent | None:
        """Return the run's advantage estimator, or None if its scope is ``token``: the learner's ranks load it."""
        kind, name = Kind.ADVANTAGE_ESTIMATOR, str(self._config.algorithm.advantage_estimator)
        if self._registry.traits(kind, name).scope != "sample":
            return None
        return self.make_routed(kind, name)

    def make_prompts(self) -> RoutedComponent:
        """Return the data source of the training prompts."""
        settings, data = self._settings, self._config.data
        name = data.data_source
        self.prompt_filter = RunFilter(
            self.row_checks(),
            longest=data.rollout_max_prompt_len,
            lengths=PromptLengths(self.encoder, num_workers=data.num_data_workers),
            bad_rows=settings.bad_rows,
            encoder=self.renders(self._config.rollout.generate_function, self.encoder),
        )
        request = training_request(
            self._config, settings.prompt_data, self.prompt_filter, vocab_size=self.encoder.vocab_size
        )
        run = replace(settings.run, prompts=request)
        source = construct(self._registry, Kind.DATA_SOURCE, name, settings.options, run)
        return RoutedComponent(name, source, plugin=self._registry.owner(Kind.DATA_SOURCE, name))

    def evaluation_prompts(self, request: PromptRequest) -> list[PromptGroup]:
        """Return all prompt groups of an evaluation set; options of plugins are for the training prompts."""
        run = replace(self._settings.run, prompts=request)
        source = construct(self._registry, Kind.DATA_SOURCE, PROMPT_FILES, {}, run)
        with component_boundary(self._registry.owner(Kind.DATA_SOURCE, PROMPT_FILES), "reading an evaluation set"):
            groups: list[PromptGroup] = source.next_groups(len(source))
        return groups

    def make_routed(self, kind: Kind, name: str) -> RoutedComponent:
        """Return a component with its plugin."""
        return RoutedComponent(name, self.make(kind, name), plugin=self._registry.owner(kind, name))

    def row_checks(self, eval_set: EvalSet | None = None) -> RowChecks:
        """Return the checks of the rows of an evaluation set, or of the training prompts."""
        return RowChecks.of(self._config, self._registry, evaluates=eval_set, options=self._settings.options)

    def renders(self, generate_function: str, encoder: PromptEncoder) -> PromptEncoder | None:
        """Return ``encoder`` if the generate function renders prompts unchanged, or None if it changes them."""
        traits = self._registry.traits(Kind.GENERATE_FUNCTION, generate_function)
        return encoder if traits.sends_prompts_whole else None

    def encoder_for(self, templated: bool) -> PromptEncoder:
        """Return the encoder of prompts that are rendered with the chat template, or without it."""
        is_same = templated == self._config.data.apply_chat_template
        return self.encoder if is_same else make_encoder(self._settings, templated=templated)

    def context(self, number: int, *, evaluation: bool) -> GenerateContext:
        """Return the context of generate functions.

        Arguments:
            number: of the rollout; for an evaluation, of the training steps before it.
        """
        return GenerateContext(
            self.client,
            self.encoder,
            evaluation,
            number,
            masks_resumed=self._config.rollout.mask_offpolicy_in_partial_rollout,
            models=self.models,
            processor=self._processor,
            context_length=self._context_length,
            warn=self._warn,
        )

    def take_warnings(self) -> list[str]:
        """Return the warnings of generate functions since the last call; each text only once in a run."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warnings.append(text)

    def generation(self, rollout: int, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """Return the arguments of a generate function in training, for ``sample`` and its group.

        Raises:
            DataError: the sample's row requests sampling that does not exist or cannot be trained on.
        """
        return apply_row_sampling(sample, self.context(rollout, evaluation=False), self.train_sampling)

    async def close(self) -> None:
        """Close connections; stop processes."""
        await self.client.close()
        if self._processor is not None:
            self._processor.close()
        if self._reward_pool is not None:
            await self._reward_pool.close()

    def _make_router(self, kind: Kind, default: str) -> ComponentRouter:
        make = partial(self.make, kind)
        if kind is Kind.REWARD_MODEL:
            make = partial(make_scorer, registry=self._registry, make=self._make_reward_model, pool=self._reward_pool)
        return ComponentRouter(
            kind,
            default=default,
            registry=self._registry,
            offered=offered_to_rows(self._config, self._registry, self._settings.options),
            make=make,
        )

    def _make_processor(self) -> CheckpointProcessor | None:
        has_images = self._settings.trains and self._config.data.multimodal_keys is not None
        if not has_images or not has_processor(self._settings.folder):
            return None
        return CheckpointProcessor(self.encoder, trust_remote_code=self._config.model.trust_remote_code)

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
            restart_s=start_limit_s(config.engine.engine_start_timeout_s, settings.folder)
            if config.restarts_engines
            else 0.0,
            first_answer_s=settings.first_answer_s,
            masks_up_to=settings.masks_up_to,
            columns=engine_columns(config, self._registry) if settings.trains else {},
        )


def make_encoder(settings: SamplerSettings, *, templated: bool | None = None) -> PromptEncoder:
    """Return the encoder of the run's model.

    Arguments:
        templated: render prompts with the chat template. None: if ``--apply-chat-template`` is given.

    Raises:
        DataError: the tokenizer lacks the chat template that is needed.
    """
    data = settings.config.data
    return PromptEncoder(
        settings.folder,
        apply_chat_template=data.apply_chat_template if templated is None else templated,
        template_arguments=template_arguments(data),
        trust_remote_code=settings.config.model.trust_remote_code,
    )


def default_num_workers(num_cores: int) -> int:
    """Return the number of reward processes on a machine whose ``num_cores`` cores engines and learner share."""
    return max(MIN_WORKERS, min(MAX_WORKERS, num_cores // 2))


def make_pool(manifest: Manifest | None, settings: SamplerSettings) -> RewardPool | None:
    """Return the pool of a run, or None without a manifest. It starts its first process with the first call."""
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
