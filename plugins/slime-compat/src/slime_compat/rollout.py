"""Functions by path that handle whole rollouts: hooks, rollout and evaluation functions, training data, logging."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from slime_compat.calling import PathFunction, call_async, scalar
from slime_compat.data import SourceView
from slime_compat.metrics import rollout_metrics
from slime_compat.paths import PathOptions
from slime_compat.train_data import converted, post_processed
from slime_compat.views import as_in_slime, flattened, originals, render, restore
from slime_core import DataSource, EvalSamples, RolloutBatch
from slime_core.errors import PluginError, RunError
from slime_core.generation import GenerateContext
from slime_core.provisional import SamplerInfo, TrainSamples
from slime_core.types import JsonValue, PromptGroup, Sample

__all__ = ["PathRollouts", "collected", "evaluated", "generated", "log", "log_evaluation", "start", "trained"]

EvalData = Mapping[str, Mapping[str, Any]]
"""Name of an evaluation set -> its columns: ``rewards``, ``truncated``, ``samples``, each a list."""

IN_SAMPLER = (
    "eval_function_path",
    "rollout_sample_hook_path",
    "rollout_all_samples_process_path",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
)
"""Path settings whose functions the hooks of the sampler call."""


def start(options: PathOptions, sampler: SamplerInfo) -> None:
    """Import the functions that the sampler's hooks call, and set the encoder of prompts. Set the engines' addresses
    in ``args``, here and in the processes that the sampler starts: ``args.sglang_router_ip``,
    ``args.sglang_router_port``, and ``args.sglang_model_routers``, name -> (host, port) of the auxiliary models.

    Raises:
        PluginError: a function cannot be imported, or its signature is not accepted.
    """
    router = urlsplit(sampler.router_url)
    options.derived.update(sglang_router_ip=router.hostname, sglang_router_port=router.port)
    options.derived.update(sglang_model_routers=_addresses(sampler.model_urls))
    object.__setattr__(options, "encoder", sampler.encoder)
    for setting in IN_SAMPLER:
        options.functions(setting)


class PathRollouts:
    """The function of --rollout-function-path.

    Raises:
        PluginError: the function cannot be imported or called.
    """

    def __init__(self, options: PathOptions) -> None:
        self._args = options.arguments
        self._encoder = options.encoder
        self._function = options.function("rollout_function_path")

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add all groups that the function returns; return its metrics.

        Raises:
            PluginError: the function failed, or returned something else than groups of samples.
        """
        function, view = self._function, SourceView(batch.prompts, self._encoder)
        with view:
            optional = function.named(evaluation=False)
            returned = await call_async(function, self._args, batch.rollout, view, **optional)
        listed = returned if isinstance(returned, list) else getattr(returned, "samples", None)
        groups = [flattened(group) for group in listed] if isinstance(listed, list) else []
        if not groups or not all(isinstance(sample, Sample) for group in groups for sample in group):
            raise function.refused(
                returned,
                "a list of groups, each a list of slime_core.Sample; or an object with samples (such a list) and "
                "metrics",
            )
        if any(sample.group_index is None or sample.index is None for group in groups for sample in group):
            raise PluginError(
                f"{function}: a sample has no group_index or no index; accepted: those of the samples that "
                "data_source.get_samples returned. Copy them to samples that the function creates."
            )
        view.restore(groups)
        batch.wanted = len(groups)
        await batch.add(groups)
        return _numbers(getattr(returned, "metrics", None))

    def state(self) -> Mapping[str, JsonValue]:
        """Return an empty state: the function manages any state."""
        return {}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Do nothing."""


# --- Evaluations -----------------------------------------------------------------------------------------------------


async def evaluated(options: PathOptions, number: int, source: DataSource | None) -> dict[str, float] | None:
    """Return the mean reward of each evaluation set, or None without a function.

    Raises:
        PluginError: the function failed, or returned something else than named lists of rewards.
    """
    function = options.find("eval_function_path")
    if function is None:
        return None
    view = None if source is None else SourceView(source, options.encoder)
    with view or nullcontext():
        optional = function.named(evaluation=True)
        returned = await call_async(function, options.arguments, number, view, **optional)
    data = returned if isinstance(returned, dict) else getattr(returned, "data", None)
    if not isinstance(data, dict) or not all(_has_rewards(columns) for columns in data.values()):
        raise function.refused(
            returned, 'a dict {name: {"rewards": list, ...}}, or an object with data (such a dict) and metrics'
        )
    metrics = _numbers(getattr(returned, "metrics", None))
    for name, columns in data.items():
        metrics[f"eval/{name}"] = statistics.fmean(_values(options, function, name, columns["rewards"]))
        if columns.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(map(float, columns["truncated"]))
    return {} if _logs_evaluation(options, number, data, metrics) else metrics


def _values(options: PathOptions, function: PathFunction, name: str, rewards: Sequence[Any]) -> list[float]:
    """Return the rewards of one evaluation set as numbers; named rewards are selected by the reward key."""
    key = options.plan.settings.get("eval_reward_key") or options.plan.reward_key
    values = [scalar(reward.get(key) if isinstance(reward, Mapping) else reward) for reward in rewards]
    for place, value in enumerate(values):
        if not isinstance(value, int | float):
            raise PluginError(
                f"{function}: rewards of {name!r} has {rewards[place]!r:.80} at place {place}; accepted: "
                f"numbers, or dicts with a number under --eval-reward-key or --reward-key, which is {key!r}."
            )
    return [float(value) for value in values]


def log_evaluation(
    options: PathOptions, number: int, sets: Mapping[str, EvalSamples], metrics: dict[str, float]
) -> bool:
    """Call the function for evaluations, if any; return True if it logs instead of the core."""
    columns = {
        name: {"rewards": result.rewards, "truncated": result.truncated, "samples": result.samples}
        for name, result in sets.items()
    }
    with _shown(options, [sample for result in sets.values() for sample in result.samples]):
        return _logs_evaluation(options, number, columns, metrics)


def _logs_evaluation(options: PathOptions, number: int, data: EvalData, metrics: dict[str, float]) -> bool:
    log = options.find("custom_eval_rollout_log_function_path")
    return log is not None and bool(log(number, options.arguments, data, metrics))


# --- Samples of a rollout --------------------------------------------------------------------------------------------


async def generated(options: PathOptions, sample: Sample, context: GenerateContext) -> Sample | None:
    """Call every hook on ``sample``, in the order in which the run names them; return the sample that replaces it, or
    None if none does.

    Raises:
        PluginError: a hook failed, or returned neither a sample nor None.
    """
    if not options.sources:
        return None
    # Even if no hook is named: a reward function reads the rendered prompt in another process.
    render([sample], context.encoder)
    current = sample
    for hook in options.functions("rollout_sample_hook_path"):
        named = hook.named(rollout_id=context.rollout, evaluation=context.evaluation)
        with as_in_slime([current]):
            returned = await call_async(hook, options.arguments, current, **named)
        if returned is not None:
            if not isinstance(returned, Sample):
                raise hook.refused(returned, "a slime_core.Sample, or None")
            restore([returned], [current], originals([current]))
            current = returned
    return None if current is sample else current


def collected(options: PathOptions, groups: list[PromptGroup], source: DataSource) -> None:
    """Call the function with every group of a rollout, if there is one."""
    for function in options.functions("rollout_all_samples_process_path"):
        samples = [sample for group in groups for sample in group]
        with _shown(options, samples), SourceView(source, options.encoder) as view:
            function(options.arguments, groups, view)


def trained(options: PathOptions, samples: list[Sample]) -> TrainSamples | None:
    """Return samples with the rewards, or all columns, from the functions; None without a function. As in slime, these
    rewards are used as advantages; with ``disable_rewards_normalization`` also those of ``samples``.

    Raises:
        PluginError: a function failed, or its columns are invalid.
        RunError: there are too few rows for every optimizer step and learner rank.
    """
    convert = options.find("custom_convert_samples_to_train_data_path")
    post_process = options.find("custom_reward_post_process_path")
    if convert is not None:
        with _shown(options, samples):
            columns = convert(options.arguments, samples)
        samples = _enough(options, converted(convert, columns, samples), samples, convert)
    elif post_process is not None:
        with _shown(options, samples):
            rewards = post_process(options.arguments, samples)
        samples = post_processed(post_process, rewards, samples)
    elif not options.disable_rewards_normalization:
        return None
    return TrainSamples(samples, rewards_are_advantages=True)


def _enough(options: PathOptions, rows: list[Sample], samples: Sequence[Sample], convert: PathFunction) -> list[Sample]:
    """Return ``rows``; raise RunError if there are too few of them."""
    required = options.plan.steps_per_rollout * options.plan.num_data_ranks
    if len(rows) < required:
        raise RunError(
            f"{convert}: it returned {len(rows)} rows for {len(samples)} samples; {required} are needed, one for each "
            "optimizer step and learner rank. Return more rows, or make --num-steps-per-rollout smaller."
        )
    return rows


def log(options: PathOptions, number: int, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool:
    """Add slime's metrics and call the function, if any; return True if it logs instead of the core."""
    metrics |= rollout_metrics(samples, options.plan.settings)
    function = options.find("custom_rollout_log_function_path")
    if function is None:
        return False
    with _shown(options, samples):
        return bool(function(number, options.arguments, samples, metrics, seconds))


def _shown(options: PathOptions, samples: Sequence[Sample]) -> AbstractContextManager[None]:
    return as_in_slime(samples, options.encoder)


def _has_rewards(columns: Any) -> bool:
    return isinstance(columns, Mapping) and isinstance(columns.get("rewards"), list) and bool(columns["rewards"])


def _numbers(metrics: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}


def _addresses(urls: Mapping[str, str]) -> dict[str, tuple[str | None, int | None]]:
    parts = {name: urlsplit(url) for name, url in urls.items()}
    return {name: (part.hostname, part.port) for name, part in parts.items()}
