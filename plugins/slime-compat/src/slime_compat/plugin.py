"""The hooks of plugin ``compat``: one component for each path setting that stands in for one; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core import (
    AdvantageTraits,
    Component,
    DataSource,
    DataTraits,
    EvalSamples,
    GenerateTraits,
    LearnerInfo,
    LossParts,
    MicroBatch,
    ModelSpec,
    RewardTraits,
    SamplerInfo,
    TrainSamples,
    TrainStep,
    TransformTraits,
    hookimpl,
)
from slime_core.types import PromptGroup, Sample, TrainBatch

if TYPE_CHECKING:
    from slime_core.generation import GenerateContext

__all__: list[str] = []


@hookimpl
def slime_register_advantage_estimators() -> Iterator[Component]:
    yield Component(
        "custom_advantage_function_path",
        target="slime_compat.advantage:CustomAdvantage",
        traits=AdvantageTraits(
            scope="token",
            reads={
                *("rewards", "lengths", "mask", "tokens", "log_probs", "rollout_log_probs"),
                *("kl", "gamma", "lambd"),
            },
        ),
        summary="The function of --custom-advantage-function-path",
    )


@hookimpl
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component(
        "custom_generate_function_path",
        target="slime_compat.generate:PathGenerate",
        traits=GenerateTraits(scope="group", rewards=True),
        summary="The function of --custom-generate-function-path",
    )


@hookimpl
def slime_register_reward_models() -> Iterator[Component]:
    yield Component(
        "custom_rm_path",
        target="slime_compat.reward:PathReward",
        traits=RewardTraits(scope="group"),
        summary="The function or class of --custom-rm-path",
    )


@hookimpl
def slime_register_data_sources() -> Iterator[Component]:
    yield Component(
        "data_source_path",
        target="slime_compat.data:PathSource",
        traits=DataTraits(),
        summary="The class of --data-source-path",
    )
    yield Component(
        "buffer_filter_path",
        target="slime_compat.data:BufferedSource",
        traits=DataTraits(reads_prompt_files=True),
        summary="Prompts with a buffer of what was put back; the function of --buffer-filter-path chooses from it",
    )


@hookimpl
def slime_register_rollout_sources() -> Iterator[Component]:
    yield Component(
        "rollout_function_path",
        target="slime_compat.rollout:PathRollouts",
        summary="The function of --rollout-function-path",
    )


@hookimpl
def slime_register_sample_transforms() -> Iterator[Component]:
    yield Component(
        "dynamic_sampling_filter_path",
        target="slime_compat.filters:PathGroupFilter",
        traits=TransformTraits(scope="group"),
        summary="The function of --dynamic-sampling-filter-path",
    )
    yield Component(
        "rollout_sample_filter_path",
        target="slime_compat.filters:PathRolloutFilter",
        traits=TransformTraits(scope="rollout"),
        summary="The function of --rollout-sample-filter-path",
    )


# `options` is None below where the plugin is named and no function is.
# --- In the sampler: the functions that see whole rollouts -----------------------------------------------------------


@hookimpl
def slime_sampler_start(sampler: SamplerInfo, options: Any) -> None:
    if options is not None:
        from slime_compat.rollout import reach

        reach(options, sampler)
        _ = options.rollout_functions  # one that cannot be called is refused before anything is loaded


@hookimpl
async def slime_after_generate(sample: Sample, context: GenerateContext, options: Any) -> Sample | None:
    return None if options is None else await options.rollout_functions.generated(sample, context)


@hookimpl
def slime_after_collect(groups: list[PromptGroup], prompts: DataSource, options: Any) -> None:
    if options is not None:
        options.rollout_functions.collected(groups, prompts)


@hookimpl
def slime_before_shards(samples: list[Sample], options: Any) -> TrainSamples | None:
    return None if options is None else options.rollout_functions.trained(samples)


@hookimpl
def slime_log_rollout(
    rollout: int, samples: list[Sample], metrics: dict[str, float], seconds: float, options: Any
) -> bool | None:
    return None if options is None else options.rollout_functions.log(rollout, samples, metrics, seconds)


@hookimpl
async def slime_evaluate(step: int, prompts: DataSource | None, options: Any) -> Mapping[str, float] | None:
    return None if options is None else await options.rollout_functions.evaluation(step, prompts)


@hookimpl
def slime_log_evaluation(
    step: int, sets: Mapping[str, EvalSamples], metrics: dict[str, float], options: Any
) -> bool | None:
    return None if options is None else options.rollout_functions.log_evaluation(step, sets, metrics)


# --- In the learner: the functions around Megatron, and the one between writing weights and reading them -------------


@hookimpl
def slime_after_weight_write(folder: Path | None, engine_urls: Sequence[str], options: Any) -> None:
    if options is not None and options.post_write is not None:
        options.post_write(folder, engine_urls)


@hookimpl
def slime_learner_start(learner: LearnerInfo, options: Any) -> None:
    if options is not None:
        from slime_compat import megatron, training

        training.check(options)
        megatron.learner_start(options, learner)


@hookimpl
def slime_model_spec(spec: ModelSpec, options: Any) -> None:
    if options is not None:
        from slime_compat import model

        model.change(options, spec)


@hookimpl
def slime_loss_parts(options: Any) -> LossParts | None:
    if options is None:
        return None
    from slime_compat import parts

    return parts.loss_parts(options)


@hookimpl
def slime_before_training(shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]], options: Any) -> None:
    if options is not None and "rollout_data_postprocess_path" in options.sources:
        from slime_compat.columns import Postprocess

        Postprocess(options)(shard, steps)


@hookimpl
def slime_before_log_probs(role: str, learner: LearnerInfo, options: Any) -> None:
    if options is not None:
        from slime_compat import megatron

        megatron.before_log_probs(options, learner, role)


@hookimpl
def slime_before_train_step(step: TrainStep, options: Any) -> None:
    if options is not None:
        from slime_compat import megatron

        megatron.before_train_step(options, step)
