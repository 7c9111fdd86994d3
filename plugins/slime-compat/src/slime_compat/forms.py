"""Accepted signatures of the functions of each path setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slime_compat.signatures import Form

__all__ = ["TRAINING", "forms_of"]


def _plain(*names: str) -> tuple[Form, ...]:
    return (Form(f"fn({', '.join(names)})", passed=names, is_async=False),)


_GENERATE = (
    Form(
        "async fn(args, sample, sampling_params[, evaluation])",
        passed=("args", "sample", "sampling_params"),
        offered=("evaluation",),
        foreign=frozenset({"samples"}),
        is_async=True,
    ),
    Form(
        "async fn(args, samples[, evaluation])",
        passed=("args", "samples"),
        offered=("evaluation",),
        foreign=frozenset({"sample", "sampling_params"}),
        is_async=True,
    ),
)

_SAMPLE_REWARD = Form("fn(args, sample, **kwargs)", passed=("args", "sample"), foreign=frozenset({"samples"}))
_REWARDS = Form("fn(args, samples, **kwargs)", passed=("args", "samples"), foreign=frozenset({"sample"}))
_REWARDS_AS_SAMPLE = Form("fn(args, sample, **kwargs)", passed=("args", "sample"))
_COMPUTES = {
    "compute_reward": Form("compute_reward(prompts, responses[, labels])", ("prompts", "responses"), ("labels",))
}
_REWARD_CLASS = Form(
    "a class C([args][, model_path]) with compute_reward(prompts, responses[, labels])",
    offered=("args", "model_path"),
    methods=_COMPUTES,
)

_SOURCE_METHODS = {
    "get_samples": Form("get_samples(num_samples)", ("num_samples",), is_async=False),
    "add_samples": Form("add_samples(samples)", ("samples",), is_async=False),
}
_SOURCE = (
    Form("a class C(args) with get_samples(n) and add_samples(samples)", ("args",), methods=_SOURCE_METHODS),
    Form("a class C(dataset, args) with the same", ("dataset", "args"), methods=_SOURCE_METHODS),
    Form("a class C() with the same", methods=_SOURCE_METHODS),
)

_ROLLOUT = (
    Form(
        "fn(args, rollout_id, data_source[, evaluation])",
        ("args", "rollout_id", "data_source"),
        ("evaluation",),
    ),
)

_SAMPLING: Mapping[str, tuple[Form, ...]] = {
    "rollout_function_path": _ROLLOUT,
    "eval_function_path": _ROLLOUT,
    "custom_generate_function_path": _GENERATE,
    "rollout_sample_hook_path": (
        Form("fn(args, sample[, rollout_id][, evaluation])", ("args", "sample"), ("rollout_id", "evaluation")),
    ),
    "data_source_path": _SOURCE,
    "buffer_filter_path": _plain("args", "rollout_id", "buffer", "num_samples"),
    "dynamic_sampling_filter_path": _plain("args", "samples"),
    "rollout_sample_filter_path": _plain("args", "groups"),
    "rollout_all_samples_process_path": _plain("args", "all_groups", "data_source"),
    "custom_reward_post_process_path": _plain("args", "samples"),
    "custom_convert_samples_to_train_data_path": _plain("args", "samples"),
    "custom_rollout_log_function_path": _plain(
        "rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"
    ),
    "custom_eval_rollout_log_function_path": _plain("rollout_id", "args", "data", "extra_metrics"),
}

_TIS = (
    "args",
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
)

TRAINING: Mapping[str, tuple[Form, ...]] = {
    "rollout_data_postprocess_path": _plain("args", "rollout_id", "rollout_data"),
    "custom_advantage_function_path": _plain("args", "rollout_data"),
    "custom_loss_function_path": _plain("args", "batch", "logits", "sum_of_sample_mean"),
    "custom_tis_function_path": (Form(f"fn(*, {', '.join(_TIS)})", keywords=_TIS, is_async=False),),
    "custom_pg_loss_reducer_function_path": _plain(
        "total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"
    ),
    "custom_model_provider_path": (
        Form(
            "fn(pre_process, post_process[, vp_stage][, config][, args])",
            keywords=("pre_process", "post_process"),
            offered=("vp_stage", "config", "args"),
            is_async=False,
        ),
    ),
    "spec": _plain("args", "config", "vp_stage"),
    "custom_megatron_init_path": _plain("args"),
    "custom_megatron_before_log_prob_hook_path": _plain("args", "model", "store_prefix"),
    "custom_megatron_before_train_step_hook_path": _plain(
        "args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"
    ),
    "custom_update_weight_post_write_path": _plain("args", "version_dir", "rollout_engines"),
}
"""Forms of the functions that the learner calls. Every learner rank imports them before it builds a model."""


def forms_of(*, group_rm: bool) -> dict[str, Sequence[Form]]:
    """Return path setting -> the accepted forms of its function, the preferred one first."""
    first, *others = (_REWARDS, _REWARDS_AS_SAMPLE) if group_rm else (_SAMPLE_REWARD, _REWARDS)
    rewards = (replace(first, is_preferred=True), *others, _REWARD_CLASS)
    return {**_SAMPLING, **TRAINING, "custom_rm_path": rewards}
