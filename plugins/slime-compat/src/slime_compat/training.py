"""Accepted signatures of the functions of each training-side setting.

The driver checks functions from their text, before the run starts anything; every learner rank checks them again after
the import, before it builds a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_compat.check import check_texts, load_checked
from slime_compat.options import PathOptions
from slime_compat.signatures import Form
from slime_core.provisional import FunctionSource

__all__ = ["TRAINING_FORMS", "check", "check_training_functions"]


def _plain(*names: str) -> tuple[Form, ...]:
    return (Form(f"fn({', '.join(names)})", passed=names, is_async=False),)


_TIS = (
    "args",
    "pg_loss",
    "train_log_probs",
    "rollout_log_probs",
    "loss_masks",
    "total_lengths",
    "response_lengths",
)

TRAINING_FORMS: Mapping[str, Sequence[Form]] = {
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
"""Path setting -> the accepted forms of its function."""


def check_training_functions(sources: Mapping[str, Sequence[FunctionSource]]) -> None:
    """Check from the text of every training-side function, without running it, that it can be called.

    Raises:
        PluginError: see :func:`slime_compat.check.check_texts`.
    """
    check_texts(sources, TRAINING_FORMS)


def check(options: PathOptions) -> None:
    """Import every training-side function that the run names, and check its signature.

    Raises:
        PluginError: a function cannot be imported, or its signature is not accepted.
    """
    for setting in sorted(TRAINING_FORMS.keys() & options.sources.keys()):
        load_checked(options, setting, TRAINING_FORMS)
