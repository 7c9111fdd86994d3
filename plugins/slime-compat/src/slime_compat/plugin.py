"""The hooks of plugin ``compat``: its settings, a component for each path setting that replaces one, and lifecycle
hooks for the other path settings.

Every command imports this module, so it imports neither pydantic nor an HTTP library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl

if TYPE_CHECKING:
    from slime_compat.options import CompatOptions
    from slime_compat.paths import PathOptions
    from slime_core import DataSource, EvalSamples, ModelSpec, RunPlan, TrainStep
    from slime_core.generation import GenerateContext
    from slime_core.provisional import (
        DerivedSetting,
        FunctionSource,
        LearnerInfo,
        LossParts,
        MicroBatch,
        SamplerInfo,
        TrainSamples,
    )
    from slime_core.types import JsonValue, PromptGroup, Sample, TrainBatch

__all__: list[str] = []


NOT_NORMALISED = ("ppo", "reinforce_plus_plus")
"""slime's estimators that do not compare rewards within a group."""


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_compat.options:CompatOptions")
    add.flag_advice("slime_compat.flags:advice")
    add.advantage_estimator(
        "custom_advantage_function_path",
        "slime_compat.advantage:CustomAdvantage",
        scope="token",
        reads={
            *("rewards", "lengths", "mask", "tokens", "log_probs", "rollout_log_probs"),
            *("kl", "gamma", "lambd"),
        },
    )
    add.generate_function(
        "custom_generate_function_path", "slime_compat.generate:PathGenerate", scope="group", rewards=True
    )
    add.reward_model("custom_rm_path", "slime_compat.reward:PathReward", scope="group")
    add.data_source("data_source_path", "slime_compat.data:PathSource")
    add.data_source("buffer_filter_path", "slime_compat.data:BufferedSource")
    add.rollout_source("rollout_function_path", "slime_compat.rollout:PathRollouts")
    add.sample_transform("dynamic_sampling_filter_path", "slime_compat.filters:PathGroupFilter", scope="group")
    add.sample_transform("rollout_sample_filter_path", "slime_compat.filters:PathRolloutFilter", scope="rollout")


# --- The settings of a run, on the driver ----------------------------------------------------------------------------


@hookimpl
def slime_settings(options: CompatOptions, settings: Mapping[str, JsonValue]) -> Iterator[DerivedSetting]:
    from slime_compat.options import selected

    yield from selected(options, settings)
    if options.eval_config is not None:
        from slime_compat.evaluation import derived_sets

        yield from derived_sets(options.eval_config)
    if options.sglang_config is not None:
        from slime_compat.engines import derived_engines

        yield from derived_engines(options.sglang_config, settings)


@hookimpl
def slime_check(plan: RunPlan, options: CompatOptions, code: Mapping[str, Sequence[FunctionSource]]) -> Iterator[str]:
    from slime_compat.check import check_functions
    from slime_compat.options import weight_transport

    check_functions(code, group_rm=options.group_rm, has_model=options.rm_model_path is not None)
    if options.custom_config_path is not None and not code:
        yield f"custom_config_path = {options.custom_config_path} has no effect: no function is named by path"
    if "custom_tis_function_path" in code and plan.settings.get("offpolicy.use_tis") is True:
        yield (
            "use_tis = true and custom_tis_function_path would correct twice: the function replaces tis. "
            "Leave --use-tis out"
        )
    estimator = str(plan.settings.get("advantage_estimator")).rpartition(":")[2]
    if options.disable_rewards_normalization and estimator in NOT_NORMALISED:
        yield (
            f"disable_rewards_normalization = true has no effect: advantage estimator {estimator!r} uses rewards "
            "unchanged. Leave --disable-rewards-normalization out"
        )
    path, transport = options.custom_update_weight_post_write_path, weight_transport(plan)
    if path is not None and transport != "disk":
        yield (
            f"custom_update_weight_post_write_path = {path} has no effect with --update-weight-transport {transport}, "
            "which writes no file; add --update-weight-transport disk, or leave it out"
        )


@hookimpl
def slime_prepare(plan: RunPlan, options: CompatOptions, code: Mapping[str, Sequence[FunctionSource]]) -> PathOptions:
    from slime_compat.paths import PathOptions, read_extra

    sources = {name: tuple(functions) for name, functions in code.items()}
    return PathOptions(plan=plan, sources=sources, extra=read_extra(options.custom_config_path, plan))


# --- In the sampler: the functions that see whole rollouts -----------------------------------------------------------


@hookimpl
def slime_sampler_start(sampler: SamplerInfo, options: PathOptions) -> None:
    from slime_compat import rollout

    rollout.start(options, sampler)


@hookimpl
async def slime_after_generate(sample: Sample, context: GenerateContext, options: PathOptions) -> Sample | None:
    from slime_compat import rollout

    return await rollout.generated(options, sample, context)


@hookimpl
def slime_after_collect(groups: list[PromptGroup], prompts: DataSource, options: PathOptions) -> None:
    from slime_compat import rollout

    rollout.collected(options, groups, prompts)


@hookimpl
def slime_before_shards(samples: list[Sample], options: PathOptions) -> TrainSamples | None:
    from slime_compat import rollout

    return rollout.trained(options, samples)


@hookimpl
def slime_log_rollout(
    rollout: int, samples: list[Sample], metrics: dict[str, float], seconds: float, options: PathOptions
) -> bool:
    from slime_compat.rollout import log

    return log(options, rollout, samples, metrics, seconds)


@hookimpl
async def slime_evaluate(step: int, prompts: DataSource | None, options: PathOptions) -> Mapping[str, float] | None:
    from slime_compat import rollout

    return await rollout.evaluated(options, step, prompts)


@hookimpl
def slime_log_evaluation(
    step: int, sets: Mapping[str, EvalSamples], metrics: dict[str, float], options: PathOptions
) -> bool:
    from slime_compat import rollout

    return rollout.log_evaluation(options, step, sets, metrics)


# --- In the learner: the functions around Megatron, and the one between writing weights and reading them -------------


@hookimpl
def slime_after_weight_write(folder: Path | None, engine_urls: Sequence[str], options: PathOptions) -> None:
    from slime_compat import learner

    learner.after_weight_write(options, folder, engine_urls)


@hookimpl
def slime_learner_start(learner: LearnerInfo, options: PathOptions) -> None:
    from slime_compat.learner import learner_start

    learner_start(options, learner)


@hookimpl
def slime_model_spec(spec: ModelSpec, options: PathOptions) -> None:
    from slime_compat import model

    model.change(options, spec)


@hookimpl
def slime_loss_parts(options: PathOptions) -> LossParts:
    from slime_compat import correction, loss, reducer
    from slime_core.provisional import LossParts

    return LossParts(
        of_logits=loss.CustomLoss(options) if loss.SETTING in options.sources else None,
        correct=correction.CustomCorrection(options) if correction.SETTING in options.sources else None,
        reduce=reducer.CustomReducer(options) if reducer.SETTING in options.sources else None,
    )


@hookimpl
def slime_before_training(shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]], options: PathOptions) -> None:
    from slime_compat import columns

    if columns.SETTING in options.sources:
        columns.Postprocess(options)(shard, steps)


@hookimpl
def slime_before_log_probs(role: str, learner: LearnerInfo, options: PathOptions) -> None:
    from slime_compat.learner import before_log_probs

    before_log_probs(options, learner, role)


@hookimpl
def slime_before_train_step(step: TrainStep, options: PathOptions) -> None:
    from slime_compat.learner import before_train_step

    before_train_step(options, step)
