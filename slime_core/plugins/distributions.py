"""Which of our own distributions has what, for messages where one is not installed; a test compares it with claims.

Commands of our distributions are listed with what they do in :mod:`slime_core.cli.commands`.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OUR_DISTRIBUTIONS", "distribution_of"]

OUR_DISTRIBUTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "slime-compat": {
        "slime": ("compat",),
        "slime.advantage_estimators": ("custom_advantage_function_path",),
        "slime.data_sources": ("buffer_filter_path", "data_source_path"),
        "slime.generate_functions": ("custom_generate_function_path",),
        "slime.reward_models": ("custom_rm_path",),
        "slime.rollout_sources": ("rollout_function_path",),
        "slime.sample_transforms": ("dynamic_sampling_filter_path", "rollout_sample_filter_path"),
        "slime.flags": (
            "buffer-filter-path",
            "custom-advantage-function-path",
            "custom-config-path",
            "custom-convert-samples-to-train-data-path",
            "custom-eval-rollout-log-function-path",
            "custom-generate-function-path",
            "custom-loss-function-path",
            "custom-megatron-before-log-prob-hook-path",
            "custom-megatron-before-train-step-hook-path",
            "custom-megatron-init-path",
            "custom-model-provider-path",
            "custom-pg-loss-reducer-function-path",
            "custom-reward-post-process-path",
            "custom-rm-path",
            "custom-rollout-log-function-path",
            "custom-tis-function-path",
            "custom-update-weight-post-write-path",
            "data-source-path",
            "dynamic-sampling-filter-path",
            "eval-function-path",
            "group-rm",
            "max-turns",
            "rm-model-path",
            "rollout-all-samples-process-path",
            "rollout-data-postprocess-path",
            "rollout-function-path",
            "rollout-sample-filter-path",
            "rollout-sample-hook-path",
            "sglang-config",
            "spec",
        ),
    },
    "slime-datasets": {
        "slime": ("datasets",),
        "slime.data_sources": ("buffered", "streams"),
        "slime.flags": (
            "buffer-data",
            "buffer-filter",
            "buffer-key",
            "loss-mask-type",
            "prompt-mix",
            "shuffle-window",
            "streaming-data",
        ),
        "slime.generate_functions": ("from_buffer", "from_messages"),
        "slime.prompt_formats": ("dataset_dict.json", "parquet", "state.json"),
    },
    "slime-grpo": {
        "slime": ("grpo",),
        "slime.advantage_estimators": ("cispo", "dr_grpo", "grpo", "gspo", "rloo"),
        "slime.flags": ("overlong-buffer-len", "overlong-penalty-factor"),
        "slime.policy_losses": ("cispo", "gspo"),
        "slime.sample_transforms": ("drop_zero_std", "mask_truncated", "punish_overlong"),
    },
    "slime-models": {
        "slime": ("models",),
        "slime.models": ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    },
    "slime-offpolicy": {
        "slime": ("offpolicy",),
        "slime.corrections": ("icepop", "mis", "opsm", "tis", "veto"),
        "slime.flags": (
            "mis-clip",
            "mis-clip-low",
            "mis-level",
            "mis-mode",
            "opsm-delta",
            "tis-clip",
            "tis-clip-low",
            "veto-threshold",
        ),
    },
    "slime-ppo": {
        "slime": ("ppo",),
        "slime.advantage_estimators": ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    },
    "slime-rewards": {
        "slime": ("rewards",),
        "slime.flags": (
            "rm-batch-size",
            "rm-concurrency",
            "rm-judge-max-tokens",
            "rm-judge-pattern",
            "rm-judge-prompt",
            "rm-retry-statuses",
            "rm-row-urls",
            "rm-token-env",
            "rm-tokenizer",
            "rm-url",
        ),
        "slime.reward_models": (
            "boxed_math",
            "dapo",
            "deepscaler",
            "f1",
            "gpqa",
            "ifbench",
            "ifeval",
            "instructions",
            "judge",
            "math",
            "remote_rm",
            "served_rm",
        ),
    },
    "slime-searchr1": {"slime": ("searchr1",), "slime.reward_models": ("search_r1",)},
}
"""Distribution -> group of its entry points -> their names."""


def distribution_of(group: str, name: str) -> str | None:
    """Our distribution that has ``name``; None: none has.

    Example: ``distribution_of("slime.models", "LlamaForCausalLM")`` is ``"slime-models"``.

    Arguments:
        group: of entry points; see :mod:`slime_core.plugins.declared`.
    """
    return next((one for one, groups in OUR_DISTRIBUTIONS.items() if name in groups.get(group, ())), None)
