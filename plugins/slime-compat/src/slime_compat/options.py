"""slime's function paths as settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from slime_compat.names import advice_for
from slime_core import Conflicts, Flag, NamesCode, Needs, PluginOptions, Provides, RunPlan
from slime_core.provisional import DerivedSetting, Once
from slime_core.types import JsonValue

__all__ = ["CompatOptions", "selected", "weight_transport"]

SECTION = "custom"
"""The TOML section that older files use for these settings."""

_SHIPPED: Mapping[str, str | None] = {
    "slime.rollout.sglang_rollout.generate_rollout": None,
    "slime.rollout.sglang_rollout.generate": None,
    "slime.rollout.sglang_rollout.eval_rollout": None,
    "slime.rollout.data_source.RolloutDataSource": None,
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": None,
    "slime.rollout.data_source.pop_first": None,
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": (
        "slime_compat.outputs.check_reward_nonzero_std"
    ),
}
"""Function that slime ships -> ours; None if the core does the same without a function."""

_INSTEAD = {
    "slime.rollout.sft_rollout.generate_rollout": "Write --advantage-estimator sft --generate-function from_messages.",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async": "Write --async-buffer-size N.",
    "slime_plugins.models.glm4": "Leave --spec out: slime-models builds the layers of GLM-4.",
}
"""Function that slime ships -> what to write instead."""


def _not_shipped(path: str) -> str | None:
    """Return ``path`` if it may be a function of the user, and our function for one that slime ships; None if the core
    does what that function does.

    Raises:
        ValueError: slime ships the function, and nothing here does the same; the message has the replacement.
    """
    name = path.replace(":", ".")
    package = name.partition(".")[0]
    if name in _SHIPPED and find_spec(package) is None:
        return _SHIPPED[name]
    instead = _INSTEAD.get(name)
    if instead is None and name.startswith("slime.rollout.rm_hub."):
        instead = f"Leave the flag out. {advice_for(name.rpartition('.')[0])}"
    if instead is None and package in ("slime", "slime_plugins") and find_spec(package) is None:
        instead = "Write a function of your own with the same signature, in a file or an installed package."
    if instead is not None:
        raise ValueError(f"the functions that slime ships are not here. {instead}")
    return path


def _two_words(words: tuple[str, ...]) -> tuple[str, ...]:
    if len(words) not in (0, 2):
        raise ValueError(f"found {' '.join(words)!r}; accepted: a module and a function, --spec MODULE FUNCTION")
    return words


FunctionPath = Annotated[str, Field(min_length=1), AfterValidator(_not_shipped)]
"""``package.module.function``, ``package.module:function``, ``file.py:function``, or ``file.py`` with one function."""

NamedCode = Annotated[FunctionPath | None, NamesCode()]
NamedCodes = Annotated[tuple[FunctionPath, ...], NamesCode()]


WHOLE = "the function takes whole responses, and context parallelism splits them over ranks"
REPLACES = "the function replaces the policy loss"
AVERAGES = "the function averages by itself"
UNSHAPED = "the rewards of the function are trained unchanged"


class CompatOptions(PluginOptions):
    """Functions by path, with slime's signatures; a path is code that the run executes."""

    custom_config_path: Annotated[Path | None, Flag("--custom-config-path", section=SECTION)] = None
    """YAML file whose entries become attributes of args, the argument of functions named by path. None: no file."""
    eval_config: Annotated[Path | None, Flag("--eval-config", section="eval"), Once()] = None
    """YAML or TOML file with evaluation sets and defaults for them; they are recorded as eval_datasets. None: no
    file."""
    sglang_config: Annotated[Path | None, Flag("--sglang-config", section="engine"), Once()] = None
    """YAML file with engine groups and models in slime's format; they are recorded as engine_groups and engine_models.

    None: no file.
    """
    sglang_tp_size: Annotated[Annotated[int, Field(ge=1)] | None, Flag("--sglang-tp-size")] = None
    """Tensor parallel size of an engine: another name of rollout_num_gpus_per_engine. None:
    rollout_num_gpus_per_engine."""
    rollout_function_path: Annotated[
        NamedCode, Flag("--rollout-function-path", section=SECTION), Provides("rollouts")
    ] = None
    """fn(args, rollout_id, data_source, evaluation=False): generates a rollout's samples. None: the core does."""
    eval_function_path: Annotated[
        NamedCode,
        Flag("--eval-function-path", section=SECTION),
        Provides("evaluation"),
        Conflicts("debug_train_only", "load_debug_rollout_data", because="evaluations need engines"),
    ] = None
    """fn(args, rollout_id, data_source, evaluation=True): generates an evaluation's samples. None: the core
    evaluates."""
    custom_generate_function_path: Annotated[NamedCode, Flag("--custom-generate-function-path", section=SECTION)] = None
    """async fn(args, sample, sampling_params): generates a response. None: the component generate_function."""
    rollout_sample_hook_path: Annotated[
        NamedCodes, Flag("--rollout-sample-hook-path", section=SECTION), Provides("rewards")
    ] = ()
    """hook(args, sample): called with each generated sample before it is rewarded. Empty: none."""
    data_source_path: Annotated[NamedCode, Flag("--data-source-path", section=SECTION), Provides("rewards")] = None
    """Class with get_samples(n) and add_samples(samples). None: the component data_source."""
    buffer_filter_path: Annotated[NamedCode, Flag("--buffer-filter-path", section=SECTION), Provides("rewards")] = None
    """fn(args, rollout_id, buffer, n): selects the next groups of the buffer. None: the oldest.

    With data_source_path, its class derives from slime's RolloutDataSourceWithBuffer.
    """
    dynamic_sampling_filter_path: Annotated[NamedCode, Flag("--dynamic-sampling-filter-path", section=SECTION)] = None
    """fn(args, samples) -> bool: True keeps a finished group for training. None: all are kept."""
    rollout_sample_filter_path: Annotated[NamedCode, Flag("--rollout-sample-filter-path", section=SECTION)] = None
    """fn(args, groups): marks samples with remove_sample. None: none."""
    rollout_all_samples_process_path: Annotated[
        NamedCode, Flag("--rollout-all-samples-process-path", section=SECTION)
    ] = None
    """fn(args, all_groups, data_source): called with every group of a rollout, including filtered ones. None: none."""
    custom_rm_path: Annotated[NamedCode, Flag("--custom-rm-path", section=SECTION), Provides("reward_model")] = None
    """async fn(args, sample) -> reward, or a class with compute_reward. None: the component rm_type."""
    group_rm: Annotated[bool, Flag("--group-rm", section=SECTION), Needs("custom_rm_path")] = False
    """Call custom_rm_path once with all samples of a prompt group: async fn(args, samples) -> rewards."""
    rm_model_path: Annotated[Path | None, Flag("--rm-model-path", section=SECTION), Needs("custom_rm_path")] = None
    """Folder of the model that a reward class gets as model_path. None: no model."""
    custom_reward_post_process_path: Annotated[
        NamedCode,
        Flag("--custom-reward-post-process-path", section=SECTION),
        Provides("training_signal"),
    ] = None
    """fn(args, samples) -> (raw rewards, rewards): computes the rewards that are trained. None: the plain rewards."""
    disable_rewards_normalization: Annotated[
        bool,
        Flag("--disable-rewards-normalization"),
        Provides("training_signal"),
        Conflicts("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path", because=UNSHAPED),
    ] = False
    """Train on the rewards as they are, without mean or standard deviation of a group. False: the estimator decides."""
    custom_convert_samples_to_train_data_path: Annotated[
        NamedCode,
        Flag("--custom-convert-samples-to-train-data-path", section=SECTION),
        Provides("training_signal"),
    ] = None
    """fn(args, samples) -> columns: replaces the samples' own columns for training. None: the samples' own
    columns."""
    custom_rollout_log_function_path: Annotated[
        NamedCode, Flag("--custom-rollout-log-function-path", section=SECTION)
    ] = None
    """fn(rollout_id, args, samples, metrics, rollout_time) -> bool: True replaces the core's log. None: no function."""
    custom_eval_rollout_log_function_path: Annotated[
        NamedCode, Flag("--custom-eval-rollout-log-function-path", section=SECTION)
    ] = None
    """fn(rollout_id, args, data, metrics) -> bool: True replaces the core's log. None: no function."""
    log_multi_turn: Annotated[bool, Flag("--log-multi-turn")] = False
    """Log response lengths with and without tool output, and numbers of turns, as multi_turn/... metrics."""
    log_reward_category: Annotated[str | None, Flag("--log-reward-category")] = None
    """Log the share of each value of this named reward, or of this metadata field, as rollout/error_cat/VALUE.

    None: none.
    """
    log_correct_samples: Annotated[bool, Flag("--log-correct-samples")] = False
    """Log lengths and mean negative log-probability of samples with reward 1, as rollout/correct_... metrics."""
    rollout_data_postprocess_path: Annotated[
        NamedCode,
        Flag("--rollout-data-postprocess-path", section=SECTION),
        Provides("training_signal"),
        Conflicts("context_parallel_size", because=WHOLE),
        Conflicts("critic_num_gpus", because="the ranks of a separate critic would not see the change"),
    ] = None
    """fn(args, rollout_id, rollout_data): changes the columns of a rank's shard before it is trained. None: none."""
    custom_advantage_function_path: Annotated[
        NamedCode,
        Flag("--custom-advantage-function-path", section=SECTION),
        Provides("training_signal"),
    ] = None
    """fn(args, rollout_data): fills advantages and returns. None: the component advantage_estimator."""
    custom_loss_function_path: Annotated[
        NamedCode,
        Flag("--custom-loss-function-path", section=SECTION),
        Provides("policy_loss"),
        Conflicts("corrections", "policy_loss", because=REPLACES),
        Conflicts("use_unbiased_kl", "get_mismatch_metrics", because=REPLACES),
        Conflicts("loss_token_divisor", because=AVERAGES),
        Conflicts("rollout_top_p", "rollout_top_k", because="the function gets the logits of the whole vocabulary"),
        Conflicts("context_parallel_size", because=WHOLE),
    ] = None
    """fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics). None: the estimator's policy loss."""
    custom_tis_function_path: Annotated[
        NamedCode,
        Flag("--custom-tis-function-path", section=SECTION),
        Provides("correction"),
        Conflicts("custom_loss_function_path", because="the custom loss replaces the policy loss"),
        Conflicts("use_rollout_logprobs", because="the policy loss then uses the engine's log-probs itself"),
        Conflicts(
            "true_on_policy_mode", because="in that mode learner and engine agree, so there is nothing to correct"
        ),
        Conflicts("context_parallel_size", because=WHOLE),
    ] = None
    """fn(args=, pg_loss=, train_log_probs=, rollout_log_probs=, ...): corrects the policy loss. None: none."""
    custom_pg_loss_reducer_function_path: Annotated[
        NamedCode,
        Flag("--custom-pg-loss-reducer-function-path", section=SECTION),
        Conflicts("custom_loss_function_path", because="the custom loss replaces the policy loss"),
        Conflicts("loss_token_divisor", because=AVERAGES),
        Conflicts("context_parallel_size", because=WHOLE),
    ] = None
    """fn(total_lengths, response_lengths, loss_masks, per_token) -> reducer of the policy loss. None: the core's."""
    custom_model_provider_path: Annotated[NamedCode, Flag("--custom-model-provider-path", section=SECTION)] = None
    """fn(pre_process, post_process) -> Megatron model. None: the model spec builds it."""
    spec: Annotated[
        Annotated[tuple[FunctionPath, ...], AfterValidator(_two_words)],
        Flag("--spec", section=SECTION),
        NamesCode(joined=True),
        Conflicts("custom_model_provider_path", because="the model provider builds the layers"),
    ] = ()
    """MODULE FUNCTION: fn(args, config, vp_stage) -> Megatron layer spec. Empty: the model spec's own."""
    custom_megatron_init_path: Annotated[NamedCode, Flag("--custom-megatron-init-path", section=SECTION)] = None
    """fn(args): called on every rank once Megatron's groups exist. None: none."""
    custom_megatron_before_log_prob_hook_path: Annotated[
        NamedCode, Flag("--custom-megatron-before-log-prob-hook-path", section=SECTION)
    ] = None
    """fn(args, model, store_prefix): called before each pass without gradients. None: none."""
    custom_megatron_before_train_step_hook_path: Annotated[
        NamedCode, Flag("--custom-megatron-before-train-step-hook-path", section=SECTION)
    ] = None
    """fn(args, rollout_id, step_id, model, optimizer, scheduler): called before each optimizer step. None: none."""
    custom_update_weight_post_write_path: Annotated[
        NamedCode, Flag("--custom-update-weight-post-write-path", section=SECTION)
    ] = None
    """fn(args, version_dir, rollout_engines): called on every rank if weights travel as files. None: none."""


STANDS_IN_FOR = {
    "rollout_function_path": "rollout_source",
    "custom_generate_function_path": "generate_function",
    "custom_rm_path": "rm_type",
    "buffer_filter_path": "data_source",
    "data_source_path": "data_source",
    "custom_advantage_function_path": "advantage_estimator",
}
"""Path setting -> the core's setting that selects a component. Each path setting has a component of the same name, and
a run that gives the path selects it."""

TRANSFORMS = ("dynamic_sampling_filter_path", "rollout_sample_filter_path")
"""Path settings whose components come last in ``sample_transforms``."""


def selected(options: CompatOptions, settings: Mapping[str, JsonValue]) -> Iterator[DerivedSetting]:
    """Yield the core's settings that select the components of the functions in ``options``."""
    values = dict(options)
    for option, setting in STANDS_IN_FOR.items():
        # A class of --data-source-path that derives from slime's calls the function of --buffer-filter-path itself.
        if values[option] and not (option == "buffer_filter_path" and options.data_source_path):
            yield DerivedSetting(setting, option, option=option)
    if options.sglang_tp_size is not None:
        yield DerivedSetting("rollout_num_gpus_per_engine", options.sglang_tp_size, option="sglang_tp_size")
    transforms = settings.get("sample_transforms")
    names = list(transforms) if isinstance(transforms, list) else []
    for option in TRANSFORMS:
        if values[option]:
            names = [*(name for name in names if name != option), option]
            yield DerivedSetting("sample_transforms", names, option=option, given="replace")


def weight_transport(plan: RunPlan) -> JsonValue:
    """Return the transport of weights to the engines, with ``auto`` resolved."""
    chosen = plan.settings["update_weight_transport"]
    if chosen != "auto":
        return chosen
    if plan.settings["colocate"] is not True:
        return "distributed"
    return "tensor" if plan.settings["actor_num_nodes"] == 1 else "disk"
