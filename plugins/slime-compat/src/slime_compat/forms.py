"""Accepted signatures of the functions of each rollout-side setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from slime_compat.check import check_texts, chosen_text
from slime_compat.reward_uses import check_reward_uses
from slime_compat.signatures import Definition, Form, definitions
from slime_core.errors import PluginError
from slime_core.provisional import FunctionSource

__all__ = ["check_rollout_functions", "rollout_forms", "unbuffered"]

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

_ONE_REWARD = Form("fn(args, sample, **kwargs)", passed=("args", "sample"), foreign=frozenset({"samples"}))
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

_ROLLOUT = Form(
    "fn(args, rollout_id, data_source[, evaluation])",
    ("args", "rollout_id", "data_source"),
    ("evaluation",),
)

_FORMS: Mapping[str, tuple[Form, ...]] = {
    "rollout_function_path": (_ROLLOUT,),
    "eval_function_path": (_ROLLOUT,),
    "custom_generate_function_path": _GENERATE,
    "rollout_sample_hook_path": (
        Form("fn(args, sample[, rollout_id][, evaluation])", ("args", "sample"), ("rollout_id", "evaluation")),
    ),
    "data_source_path": _SOURCE,
    "buffer_filter_path": (
        Form(
            "fn(args, rollout_id, buffer, num_samples)", ("args", "rollout_id", "buffer", "num_samples"), is_async=False
        ),
    ),
    "dynamic_sampling_filter_path": (Form("fn(args, samples)", ("args", "samples"), is_async=False),),
    "rollout_sample_filter_path": (Form("fn(args, groups)", ("args", "groups"), is_async=False),),
    "rollout_all_samples_process_path": (
        Form("fn(args, all_groups, data_source)", ("args", "all_groups", "data_source"), is_async=False),
    ),
    "custom_reward_post_process_path": (Form("fn(args, samples)", ("args", "samples"), is_async=False),),
    "custom_convert_samples_to_train_data_path": (Form("fn(args, samples)", ("args", "samples"), is_async=False),),
    "custom_rollout_log_function_path": (
        Form(
            "fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time)",
            ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
            is_async=False,
        ),
    ),
    "custom_eval_rollout_log_function_path": (
        Form(
            "fn(rollout_id, args, data, extra_metrics)", ("rollout_id", "args", "data", "extra_metrics"), is_async=False
        ),
    ),
}


def check_rollout_functions(
    functions: Mapping[str, Sequence[FunctionSource]], *, group_rm: bool, has_model: bool
) -> None:
    """Check from the text of the functions, without running it, that the rollout can call them.

    Arguments:
        has_model: True: the run gives ``rm_model_path``.

    Raises:
        PluginError: see :func:`slime_compat.check.check_texts` and
            :func:`slime_compat.reward_uses.check_reward_uses`; or a reward class needs a model, and none is given.
    """
    forms = rollout_forms(group_rm=group_rm)
    check_texts(functions, forms)
    rewards = functions.get("custom_rm_path", ())
    check_reward_uses(rewards, forms["custom_rm_path"], group_rm=group_rm)
    for source in rewards if not has_model else ():
        _refuse_missing_model(source, forms["custom_rm_path"])
    for chooser in functions.get("buffer_filter_path", ()):
        for source in functions.get("data_source_path", ()):
            definition = _definition(source, forms["data_source_path"])
            if definition is not None and definition.is_whole:
                raise unbuffered(chooser, source, f"{definition.name} has no buffer to choose from")


def unbuffered(chooser: FunctionSource, source: FunctionSource, why: str) -> PluginError:
    """The error for a data source that never calls the function of ``buffer_filter_path``."""
    return PluginError(
        f"{chooser} has no effect with {source}: {why}. Leave one of the two out, or derive the class from "
        "slime.rollout.data_source.RolloutDataSourceWithBuffer, without a buffer_filter."
    )


def _definition(source: FunctionSource, forms: Sequence[Form]) -> Definition | None:
    """Return the function or class that ``source`` names, read from its text; None: the text does not show it."""
    text, name = chosen_text(source, forms)
    return None if text is None or name is None else definitions(text, source.path).get(name)


def _refuse_missing_model(source: FunctionSource, forms: Sequence[Form]) -> None:
    found = _definition(source, forms)
    parameter = None if found is None or found.methods is None else found.signature.parameters.get("model_path")
    if found is not None and parameter is not None and parameter.default is parameter.empty:
        raise PluginError(
            f"{source}: {found.name} is built with model_path, and the run gives no model. Add --rm-model-path FOLDER, "
            "or give the parameter a default."
        )


def rollout_forms(*, group_rm: bool) -> dict[str, Sequence[Form]]:
    """Return setting -> the forms that its function may have in this run, the preferred one first."""
    first, *others = (_REWARDS, _REWARDS_AS_SAMPLE) if group_rm else (_ONE_REWARD, _REWARDS)
    return {**_FORMS, "custom_rm_path": (replace(first, is_preferred=True), *others, _REWARD_CLASS)}
