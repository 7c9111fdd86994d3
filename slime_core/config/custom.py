"""``[custom]``: functions of slime's users, named by path, which run as adapters around components."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from slime_core.config.section import Section

__all__ = ["NO_CODE", "STANDS_IN_FOR", "CustomConfig", "function_paths"]

FunctionPath = Annotated[str, Field(min_length=1)]
"""``package.module.function``, ``package.module:function``, ``file.py:function``, or ``file.py`` that holds one."""


class CustomConfig(Section):
    """Functions by path, with slime's signatures; a path is code that the run executes."""

    custom_config_path: Path | None = None
    """YAML file whose entries the functions below find on their first argument, args. None: none."""
    rollout_function_path: FunctionPath | None = None
    """fn(args, rollout_id, data_source, evaluation=False): makes the samples of a rollout. None: the core does."""
    eval_function_path: FunctionPath | None = None
    """The same for evaluations. None: the core evaluates."""
    custom_generate_function_path: FunctionPath | None = None
    """async fn(args, sample, sampling_params): makes a response. None: the component generate_function."""
    max_turns: Annotated[int, Field(ge=1)] | None = None
    """Turns of a conversation, for a generate function that reads args.max_turns. None: it decides."""
    rollout_sample_hook_path: tuple[FunctionPath, ...] = ()
    """hook(args, sample): called with each generated sample before it is rewarded. Empty: none."""
    data_source_path: FunctionPath | None = None
    """Class with get_samples(n) and add_samples(samples). None: the component data_source."""
    buffer_filter_path: FunctionPath | None = None
    """fn(args, rollout_id, buffer, n): which groups of the buffer come next. None: the oldest."""
    dynamic_sampling_filter_path: FunctionPath | None = None
    """fn(args, samples): whether a finished group is trained on. None: all are."""
    rollout_sample_filter_path: FunctionPath | None = None
    """fn(args, groups): marks samples with remove_sample. None: none."""
    rollout_all_samples_process_path: FunctionPath | None = None
    """fn(args, all_groups, data_source): sees every group of a rollout, filtered ones too. None: none."""
    custom_rm_path: FunctionPath | None = None
    """async fn(args, sample) -> reward, or a class with compute_reward. None: the component rm_type."""
    group_rm: bool = False
    """Call custom_rm_path with all samples of a group at once: async fn(args, samples) -> rewards."""
    rm_model_path: Path | None = None
    """Folder of the model that a reward class is built with. None: it needs none."""
    custom_reward_post_process_path: FunctionPath | None = None
    """fn(args, samples) -> (raw rewards, rewards): what trains instead of the plain rewards. None: those."""
    custom_convert_samples_to_train_data_path: FunctionPath | None = None
    """fn(args, samples) -> columns: what is trained instead of the samples' own. None: those."""
    custom_rollout_log_function_path: FunctionPath | None = None
    """fn(rollout_id, args, samples, metrics, rollout_time) -> bool: True replaces the core's. None: nobody is asked."""
    custom_eval_rollout_log_function_path: FunctionPath | None = None
    """fn(rollout_id, args, data, metrics) -> bool: True replaces the core's. None: nobody is asked."""
    rollout_data_postprocess_path: FunctionPath | None = None
    """fn(args, rollout_id, rollout_data): changes the columns of a rank's shard before it is trained. None: none."""
    custom_advantage_function_path: FunctionPath | None = None
    """fn(args, rollout_data): fills advantages and returns. None: the component advantage_estimator."""
    custom_loss_function_path: FunctionPath | None = None
    """fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics). None: the estimator's policy loss."""
    custom_tis_function_path: FunctionPath | None = None
    """fn(args=, pg_loss=, train_log_probs=, rollout_log_probs=, ...): corrects the policy loss. None: none."""
    custom_pg_loss_reducer_function_path: FunctionPath | None = None
    """fn(total_lengths, response_lengths, loss_masks, per_token) -> reducer of the policy loss. None: the core's."""
    custom_model_provider_path: FunctionPath | None = None
    """fn(pre_process, post_process) -> Megatron model. None: the model spec builds it."""
    spec: tuple[FunctionPath, ...] = ()
    """MODULE FUNCTION: fn(args, config, vp_stage) -> Megatron layer spec. Empty: the model spec's own."""
    custom_megatron_init_path: FunctionPath | None = None
    """fn(args): called on every rank when Megatron's groups are up. None: none."""
    custom_megatron_before_log_prob_hook_path: FunctionPath | None = None
    """fn(args, model, store_prefix): called before each pass without gradients. None: none."""
    custom_megatron_before_train_step_hook_path: FunctionPath | None = None
    """fn(args, rollout_id, step_id, model, optimizer, scheduler): called before each optimizer step. None: none."""
    custom_update_weight_post_write_path: FunctionPath | None = None
    """fn(args, version_dir, rollout_engines): called on every rank when weights travel as files. None: none."""


NO_CODE = frozenset({"custom_config_path", "max_turns", "group_rm", "rm_model_path"})
"""Settings of the section that name no code."""

STANDS_IN_FOR = {
    "rollout_function_path": "rollout_source",
    "custom_generate_function_path": "generate_function",
    "custom_rm_path": "rm_type",
    "data_source_path": "data_source",
    "buffer_filter_path": "data_source",
    "dynamic_sampling_filter_path": "sample_transforms",
    "rollout_sample_filter_path": "sample_transforms",
    "custom_advantage_function_path": "advantage_estimator",
}
"""Path setting -> the setting that selects a component. The component of a path is called like its setting, and a run
that gives the path selects it; where the selecting setting takes several names, it comes last."""


def function_paths(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Path setting -> the paths it names, of those among ``values`` (setting -> value) that name any."""
    named = {name: values[name] for name in CustomConfig.model_fields if name not in NO_CODE and values.get(name)}
    paths = {name: value if isinstance(value, tuple) else (value,) for name, value in named.items()}
    if "spec" in paths:
        paths["spec"] = (":".join(paths["spec"]),)
    return paths
