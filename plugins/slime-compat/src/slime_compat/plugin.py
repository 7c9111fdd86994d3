"""The hooks of plugin ``compat``: its settings, a component for each path setting that replaces one, and lifecycle
hooks for the other path settings; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_compat.options import LOG_FLAGS, CompatOptions, PathOptions, read_extra, selected, weight_transport
from slime_core import (
    AdvantageTraits,
    Component,
    DataSource,
    DataTraits,
    DerivedSetting,
    EvalSamples,
    FunctionSource,
    GenerateTraits,
    LearnerInfo,
    LossParts,
    MicroBatch,
    ModelSpec,
    RewardTraits,
    RunPlan,
    SamplerInfo,
    TrainSamples,
    TrainStep,
    TransformTraits,
    hookimpl,
)
from slime_core.types import JsonValue, PromptGroup, Sample, TrainBatch

if TYPE_CHECKING:
    from slime_core.generation import GenerateContext

__all__: list[str] = []


NOT_NORMALISED = ("ppo", "reinforce_plus_plus")
"""slime's estimators that do not compare rewards within a group."""


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


# --- The settings of a run, on the driver ----------------------------------------------------------------------------


@hookimpl
def slime_options() -> type[CompatOptions]:
    return CompatOptions


@hookimpl
def slime_settings(options: CompatOptions, settings: Mapping[str, JsonValue]) -> Iterator[DerivedSetting]:
    yield from selected(options, settings)
    if options.eval_config is not None:
        from slime_compat.evaluation import derived_sets

        yield from derived_sets(options.eval_config)
    if options.sglang_config is not None:
        from slime_compat.engines import derived_engines

        yield from derived_engines(options.sglang_config, settings)


@hookimpl
def slime_check(plan: RunPlan, options: CompatOptions, code: Mapping[str, Sequence[FunctionSource]]) -> Iterator[str]:
    from slime_compat.forms import check_rollout_functions
    from slime_compat.training import check_training_functions

    check_rollout_functions(code, group_rm=options.group_rm, has_model=options.rm_model_path is not None)
    check_training_functions(code)
    if options.custom_config_path is not None and not code:
        yield f"custom_config_path = {options.custom_config_path} has no effect: no function is named by path"
    if "custom_tis_function_path" in code and plan.settings.get("offpolicy.use_tis") is True:
        yield (
            "use_tis = true and custom_tis_function_path would correct twice: the function corrects in place of tis. "
            "Leave --use-tis out"
        )
    estimator = str(plan.settings.get("advantage_estimator")).rpartition(":")[2]
    if options.disable_rewards_normalization and estimator in NOT_NORMALISED:
        yield (
            f"disable_rewards_normalization = true has no effect: advantage estimator {estimator!r} takes rewards as "
            "they are. Leave --disable-rewards-normalization out"
        )
    path, transport = options.custom_update_weight_post_write_path, weight_transport(plan)
    if path is not None and transport != "disk":
        yield (
            f"custom_update_weight_post_write_path = {path} has no effect where weights travel by {transport}, because "
            "no file is written; add --update-weight-transport disk, or leave it out"
        )


@hookimpl
def slime_prepare(
    plan: RunPlan, options: CompatOptions, code: Mapping[str, Sequence[FunctionSource]]
) -> CompatOptions | PathOptions:
    if not code and not any(getattr(options, name) for name in LOG_FLAGS):
        return options
    extra = read_extra(options.custom_config_path, plan)
    return PathOptions(plan=plan, sources={name: tuple(found) for name, found in code.items()}, extra=extra)


# Below, `options` are CompatOptions if the run names no function and selects none of slime's metrics.
# --- In the sampler: the functions that see whole rollouts -----------------------------------------------------------


@hookimpl
def slime_sampler_start(sampler: SamplerInfo, options: CompatOptions | PathOptions) -> None:
    if isinstance(options, PathOptions):
        from slime_compat.rollout import reach

        reach(options, sampler)
        _ = options.rollout_functions  # refuses functions that cannot be called, before anything is loaded


@hookimpl
async def slime_after_generate(
    sample: Sample, context: GenerateContext, options: CompatOptions | PathOptions
) -> Sample | None:
    # Without a hook by path, too: a reward by path reads the rendered prompt in another process.
    return None if isinstance(options, CompatOptions) else await options.rollout_functions.generated(sample, context)


@hookimpl
def slime_after_collect(groups: list[PromptGroup], prompts: DataSource, options: CompatOptions | PathOptions) -> None:
    if isinstance(options, PathOptions):
        options.rollout_functions.collected(groups, prompts)


@hookimpl
def slime_before_shards(samples: list[Sample], options: CompatOptions | PathOptions) -> TrainSamples | None:
    found = None if isinstance(options, CompatOptions) else options.rollout_functions.trained(samples)
    as_they_are = options.disable_rewards_normalization
    return TrainSamples(samples, rewards_are_advantages=True) if found is None and as_they_are else found


@hookimpl
def slime_log_rollout(
    rollout: int, samples: list[Sample], metrics: dict[str, float], seconds: float, options: CompatOptions | PathOptions
) -> bool | None:
    if isinstance(options, CompatOptions):
        return None
    from slime_compat.metrics import rollout_metrics

    metrics |= rollout_metrics(samples, options)
    return options.rollout_functions.log(rollout, samples, metrics, seconds)


@hookimpl
async def slime_evaluate(
    step: int, prompts: DataSource | None, options: CompatOptions | PathOptions
) -> Mapping[str, float] | None:
    return None if isinstance(options, CompatOptions) else await options.rollout_functions.evaluation(step, prompts)


@hookimpl
def slime_log_evaluation(
    step: int, sets: Mapping[str, EvalSamples], metrics: dict[str, float], options: CompatOptions | PathOptions
) -> bool | None:
    return None if isinstance(options, CompatOptions) else options.rollout_functions.log_evaluation(step, sets, metrics)


# --- In the learner: the functions around Megatron, and the one between writing weights and reading them -------------


@hookimpl
def slime_after_weight_write(
    folder: Path | None, engine_urls: Sequence[str], options: CompatOptions | PathOptions
) -> None:
    if isinstance(options, PathOptions) and options.post_write is not None:
        options.post_write(folder, engine_urls)


@hookimpl
def slime_learner_start(learner: LearnerInfo, options: CompatOptions | PathOptions) -> None:
    if isinstance(options, PathOptions):
        from slime_compat import megatron, training

        training.check(options)
        megatron.learner_start(options, learner)


@hookimpl
def slime_model_spec(spec: ModelSpec, options: CompatOptions | PathOptions) -> None:
    if isinstance(options, PathOptions):
        from slime_compat import model

        model.change(options, spec)


@hookimpl
def slime_loss_parts(options: CompatOptions | PathOptions) -> LossParts | None:
    if isinstance(options, CompatOptions):
        return None
    from slime_compat import parts

    return parts.loss_parts(options)


@hookimpl
def slime_before_training(
    shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]], options: CompatOptions | PathOptions
) -> None:
    if isinstance(options, PathOptions) and "rollout_data_postprocess_path" in options.sources:
        from slime_compat.columns import Postprocess

        Postprocess(options)(shard, steps)


@hookimpl
def slime_before_log_probs(role: str, learner: LearnerInfo, options: CompatOptions | PathOptions) -> None:
    if isinstance(options, PathOptions):
        from slime_compat import megatron

        megatron.before_log_probs(options, learner, role)


@hookimpl
def slime_before_train_step(step: TrainStep, options: CompatOptions | PathOptions) -> None:
    if isinstance(options, PathOptions):
        from slime_compat import megatron

        megatron.before_train_step(options, step)
