"""What a sampler generates and rewards with: made once, from its settings."""

from __future__ import annotations

from functools import cache, partial

from slime_core.config.described import context_length, routes_shape
from slime_core.config.eval_sets import EvalSet
from slime_core.config.schema import RolloutConfig
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.plugins.component import Kind
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.processing import InputProcessor, has_processor
from slime_core.prompts.requests import template_arguments
from slime_core.rollout.component_factory import ComponentFactory
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.evaluation import EvalComponents, Evaluation
from slime_core.rollout.group_collector import GroupCollector
from slime_core.rollout.rewards.scorers import RewardScorers, make_pool
from slime_core.rollout.sampler_records import SamplerSettings
from slime_core.rollout.sampling_params import apply_row_sampling, train_sampling
from slime_core.track.samples import SampleWriter
from slime_core.types import Sample

__all__ = ["SamplerComponents"]


class SamplerComponents:
    """See the module.

    Arguments:
        hooks: of plugins, which see samples, and may evaluate.
        manifest: of the plugins in ``registry``, for reward models in processes of their own; None: they run here.

    Attributes:
        encoder: prompts to ids, ids to text.
        client: asks the engines.
        components: of the run, by name.
        writer: of readable samples.

    Raises:
        DataError: the tokenizer is not what the run asks for.
        PluginError: a component cannot be loaded.
    """

    def __init__(
        self, settings: SamplerSettings, registry: Registry, *, hooks: LifecycleHooks, manifest: Manifest | None = None
    ) -> None:
        config = settings.config
        self._settings, self._config, self._hooks = settings, config, hooks
        self.encoder = self._encodes(templated=config.data.apply_chat_template)
        self._processor = self._processes()
        self.client = self._asks()
        self.components = ComponentFactory(config, registry, settings.options, settings.run, bad_rows=settings.bad_rows)
        self._rewarding = RewardScorers(
            registry,
            make=partial(self.components.make, Kind.REWARD_MODEL),
            pool=make_pool(manifest, settings),
        )
        self._generators = cache(self.components.generators)
        self._rewards = cache(partial(self.components.rewards, make=self._rewarding))
        self.writer = SampleWriter(settings.samples_folder)

    def collector(self, rollout: RolloutConfig | None = None) -> GroupCollector:
        """Generates and rewards groups.

        Arguments:
            rollout: how; None: as the run does.
        """
        settings = rollout or self._config.rollout
        return GroupCollector(
            self._generators(settings.generate_function),
            self._rewards(settings.rm_type),
            rollout=settings,
            hooks=self._hooks,
        )

    def evaluation(self) -> Evaluation:
        """Measures the evaluation sets of the run, each with its own settings."""
        measures = EvalComponents(
            encoder=self._encoder_of,
            collector=self._collector_of,
            hooks=self._hooks,
            writer=self.writer,
            checks=self.components.checks(trains=False),
            models=self._settings.model_urls,
            formats=self.components.formats,
        )
        return Evaluation(self._config, measures)

    def context(self, number: int, *, evaluation: bool) -> GenerateContext:
        """What generate functions are handed.

        Arguments:
            number: of the rollout; of an evaluation, the steps done.
        """
        return GenerateContext(
            self.client,
            self.encoder,
            evaluation,
            number,
            masks_resumed=self._config.rollout.mask_offpolicy_in_partial_rollout,
            models=self._settings.model_urls,
            processor=self._processor,
            context_length=self._config.engine.sglang_context_length or context_length(self._settings.folder),
        )

    def generation(self, rollout: int, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """What a generate function is handed in training for ``sample`` and its group.

        Raises:
            DataError: the sample's row asks for sampling that does not exist or cannot be trained on.
        """
        run = train_sampling(self._config, end_ids=self.encoder.end_ids)
        return apply_row_sampling(sample, self.context(rollout, evaluation=False), run)

    async def close(self) -> None:
        """Close connections; end processes."""
        await self.client.close()
        if self._processor is not None:
            self._processor.close()
        await self._rewarding.close()

    def _collector_of(self, one: EvalSet) -> GroupCollector:
        own = {"generate_function": one.generate_function, "rm_type": one.rm_type, "reward_key": one.reward_key}
        return self.collector(self._config.rollout.model_copy(update=own))

    def _encoder_of(self, templated: bool) -> PromptEncoder:
        is_ours = templated == self._config.data.apply_chat_template
        return self.encoder if is_ours else self._encodes(templated=templated)

    def _encodes(self, *, templated: bool) -> PromptEncoder:
        return PromptEncoder(
            self._settings.folder,
            apply_chat_template=templated,
            template_arguments=template_arguments(self._config.data),
            trust_remote_code=self._config.model.trust_remote_code,
        )

    def _processes(self) -> InputProcessor | None:
        has_images = self._settings.trains and self._config.data.multimodal_keys is not None
        if not has_images or not has_processor(self._settings.folder):
            return None
        return InputProcessor(self.encoder, trust_remote_code=self._config.model.trust_remote_code)

    def _asks(self) -> GenerateClient:
        settings, config = self._settings, self._config
        return GenerateClient(
            settings.router_url,
            max_in_flight=config.rollout.sglang_server_concurrency * settings.num_engines,
            timeout_s=config.rollout.rollout_request_timeout_s,
            vocab_size=self.encoder.vocab_size,
            routes=routes_shape(settings.folder) if config.learner.use_rollout_routing_replay else None,
            engines=settings.engine_urls,
        )
