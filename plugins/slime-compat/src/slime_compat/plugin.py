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
    from slime_compat.options import CompatOptions, PathOptions
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
    from slime_compat.forms import check_rollout_functions
    from slime_compat.options import weight_transport
    from slime_compat.training import check_training_functions

    check_rollout_functions(code, group_rm=options.group_rm, has_model=options.rm_model_path is not None)
    check_training_functions(code)
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
def slime_prepare(
    plan: RunPlan, options: CompatOptions, code: Mapping[str, Sequence[FunctionSource]]
) -> CompatOptions | PathOptions:
    from slime_compat.options import LOG_FLAGS, PathOptions, read_extra

    if not code and not any(getattr(options, name) for name in LOG_FLAGS):
        return options
    extra = read_extra(options.custom_config_path, plan)
    return PathOptions(plan=plan, sources={name: tuple(functions) for name, functions in code.items()}, extra=extra)


# --- In the sampler: the functions that see whole rollouts -----------------------------------------------------------


def _with_functions(options: CompatOptions | PathOptions) -> PathOptions | None:
    """Return the options of a run that names functions or selects slime's metrics; None for other runs."""
    from slime_compat.options import PathOptions

    return options if isinstance(options, PathOptions) else None


@hookimpl
def slime_sampler_start(sampler: SamplerInfo, options: CompatOptions | PathOptions) -> None:
    if (paths := _with_functions(options)) is not None:
        from slime_compat.rollout import reach

        reach(paths, sampler)
        _ = paths.rollout_functions  # refuses functions that cannot be called, before anything is loaded


@hookimpl
async def slime_after_generate(
    sample: Sample, context: GenerateContext, options: CompatOptions | PathOptions
) -> Sample | None:
    # Even if no hook is named: a reward function reads the rendered prompt in another process.
    paths = _with_functions(options)
    return None if paths is None else await paths.rollout_functions.generated(sample, context)


@hookimpl
def slime_after_collect(groups: list[PromptGroup], prompts: DataSource, options: CompatOptions | PathOptions) -> None:
    if (paths := _with_functions(options)) is not None:
        paths.rollout_functions.collected(groups, prompts)


@hookimpl
def slime_before_shards(samples: list[Sample], options: CompatOptions | PathOptions) -> TrainSamples | None:
    paths = _with_functions(options)
    replaced = None if paths is None else paths.rollout_functions.trained(samples)
    if replaced is None and options.disable_rewards_normalization:
        from slime_core.provisional import TrainSamples

        return TrainSamples(samples, rewards_are_advantages=True)
    return replaced


@hookimpl
def slime_log_rollout(
    rollout: int, samples: list[Sample], metrics: dict[str, float], seconds: float, options: CompatOptions | PathOptions
) -> bool | None:
    if (paths := _with_functions(options)) is None:
        return None
    from slime_compat.metrics import rollout_metrics

    metrics |= rollout_metrics(samples, paths)
    return paths.rollout_functions.log(rollout, samples, metrics, seconds)


@hookimpl
async def slime_evaluate(
    step: int, prompts: DataSource | None, options: CompatOptions | PathOptions
) -> Mapping[str, float] | None:
    paths = _with_functions(options)
    return None if paths is None else await paths.rollout_functions.evaluation(step, prompts)


@hookimpl
def slime_log_evaluation(
    step: int, sets: Mapping[str, EvalSamples], metrics: dict[str, float], options: CompatOptions | PathOptions
) -> bool | None:
    paths = _with_functions(options)
    return None if paths is None else paths.rollout_functions.log_evaluation(step, sets, metrics)


# --- In the learner: the functions around Megatron, and the one between writing weights and reading them -------------


@hookimpl
def slime_after_weight_write(
    folder: Path | None, engine_urls: Sequence[str], options: CompatOptions | PathOptions
) -> None:
    if (paths := _with_functions(options)) is not None and paths.post_write is not None:
        paths.post_write(folder, engine_urls)


@hookimpl
def slime_learner_start(learner: LearnerInfo, options: CompatOptions | PathOptions) -> None:
    if (paths := _with_functions(options)) is not None:
        from slime_compat import megatron, training

        training.check(paths)
        megatron.learner_start(paths, learner)


@hookimpl
def slime_model_spec(spec: ModelSpec, options: CompatOptions | PathOptions) -> None:
    if (paths := _with_functions(options)) is not None:
        from slime_compat import model

        model.change(paths, spec)


@hookimpl
def slime_loss_parts(options: CompatOptions | PathOptions) -> LossParts | None:
    if (paths := _with_functions(options)) is None:
        return None
    from slime_compat import parts

    return parts.loss_parts(paths)


@hookimpl
def slime_before_training(
    shard: TrainBatch, steps: Sequence[Sequence[MicroBatch]], options: CompatOptions | PathOptions
) -> None:
    paths = _with_functions(options)
    if paths is not None and "rollout_data_postprocess_path" in paths.sources:
        from slime_compat.columns import Postprocess

        Postprocess(paths)(shard, steps)


@hookimpl
def slime_before_log_probs(role: str, learner: LearnerInfo, options: CompatOptions | PathOptions) -> None:
    if (paths := _with_functions(options)) is not None:
        from slime_compat import megatron

        megatron.before_log_probs(paths, learner, role)


@hookimpl
def slime_before_train_step(step: TrainStep, options: CompatOptions | PathOptions) -> None:
    if (paths := _with_functions(options)) is not None:
        from slime_compat import megatron

        megatron.before_train_step(paths, step)
