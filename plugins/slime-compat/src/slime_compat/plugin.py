"""The hooks of plugin ``compat``: one component for each path setting that stands in for one; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slime_core import (
    AdvantageTraits,
    Component,
    DataTraits,
    GenerateTraits,
    LearnerInfo,
    LossParts,
    MicroBatch,
    ModelSpec,
    RewardTraits,
    TrainStep,
    TransformTraits,
    hookimpl,
)
from slime_core.types import TrainBatch

__all__: list[str] = []


@hookimpl
def slime_register_advantage_estimators() -> Iterator[Component]:
    yield Component(
        "custom_advantage_function_path",
        target="slime_compat.advantage:CustomAdvantage",
        traits=AdvantageTraits(
            scope="token",
            reads={"rewards", "lengths", "mask", "tokens", "log_probs", "rollout_log_probs"},
            kl_reads={"ref_log_probs"},
            uses={"gamma", "lambd"},
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


# --- In the learner: the functions around Megatron. `options` is None where the plugin is named and no function is. ---


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
