"""Functions by path that handle whole rollouts: hooks, rollout and evaluation functions, training data, logging."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

from slime_compat.calling import call, call_here
from slime_compat.check import Loaded, load_all_checked, load_checked
from slime_compat.data import SourceView
from slime_compat.forms import rollout_forms
from slime_compat.options import PathOptions
from slime_compat.train_data import converted, post_processed
from slime_compat.views import as_in_slime, originals, render, restore
from slime_core import DataSource, EvalSamples, RolloutBatch
from slime_core.errors import PluginError, RunError
from slime_core.generation import GenerateContext
from slime_core.provisional import SamplerInfo, TrainSamples
from slime_core.types import JsonValue, PromptGroup, Sample

__all__ = ["PathFunctions", "PathRollouts", "reach"]

EvalData = Mapping[str, Mapping[str, Any]]
"""Name of an evaluation set -> its columns: ``rewards``, ``truncated``, ``samples``, each a list."""

MADE = "a list of groups, each a list of slime_core.Sample; or an object with samples (such a list) and metrics"
MEASURED = 'a dict {name: {"rewards": list, ...}}, or an object with data (such a dict) and metrics'


def reach(options: PathOptions, sampler: SamplerInfo) -> None:
    """Set the engines' addresses in ``args``, here and in the processes that the sampler starts:
    ``args.sglang_router_ip`` and ``args.sglang_router_port``; and ``args.sglang_model_routers``, name -> (host, port)
    of the auxiliary models. Set the encoder of prompts."""
    router = urlsplit(sampler.router_url)
    options.derived.update(sglang_router_ip=router.hostname, sglang_router_port=router.port)
    options.derived.update(sglang_model_routers=_addresses(sampler.model_urls))
    object.__setattr__(options, "encoder", sampler.encoder)


class PathRollouts:
    """The function of --rollout-function-path.

    Raises:
        PluginError: the function cannot be imported or called.
    """

    def __init__(self, options: PathOptions) -> None:
        self._args = options.arguments
        self._encoder = options.encoder
        self._loaded = load_checked(options, "rollout_function_path", rollout_forms(group_rm=options.group_rm))

    async def fill(self, batch: RolloutBatch) -> Mapping[str, float]:
        """Add all groups that the function returns; return its metrics.

        Raises:
            PluginError: the function failed, or returned something else than groups of samples.
        """
        loaded, view = self._loaded, SourceView(batch.prompts, self._encoder)
        with view:
            found = await call(loaded, self._args, batch.rollout, view, **loaded.named(evaluation=False))
        listed = found if isinstance(found, list) else getattr(found, "samples", None)
        groups = [_flat(group) for group in listed] if isinstance(listed, list) else []
        if not groups or not all(isinstance(one, Sample) for group in groups for one in group):
            raise PluginError(f"{loaded.source}: it returned {_shown(found)}; accepted: {MADE}.")
        for group in groups:
            if any(sample.group_index is None or sample.index is None for sample in group):
                raise PluginError(
                    f"{loaded.source}: a sample has no group_index or no index; accepted: those of the samples that "
                    "data_source.get_samples returned. Keep them on samples of your own."
                )
        view.restore(groups)
        batch.wanted = len(groups)
        await batch.add(groups)
        return _numbers(getattr(found, "metrics", None))

    def state(self) -> Mapping[str, JsonValue]:
        """Return an empty state: a function manages its own state."""
        return {}

    def restore(self, state: Mapping[str, JsonValue]) -> None:
        """Do nothing."""


class PathFunctions:
    """The functions that the sampler's hooks call; a hook without a function changes nothing.

    Raises:
        PluginError: a function cannot be imported or called.
    """

    def __init__(self, options: PathOptions) -> None:
        self._forms = rollout_forms(group_rm=options.group_rm)
        self._options = options
        self._args = options.arguments
        self._encoder = options.encoder
        self._evaluation = self._loaded("eval_function_path")
        self._hooks = load_all_checked(options, "rollout_sample_hook_path", self._forms)
        self._finished = self._loaded("rollout_all_samples_process_path")
        self._post_process = self._loaded("custom_reward_post_process_path")
        self._convert = self._loaded("custom_convert_samples_to_train_data_path")
        self._log = self._loaded("custom_rollout_log_function_path")
        self._log_evaluation = self._loaded("custom_eval_rollout_log_function_path")

    def _loaded(self, setting: str) -> Loaded | None:
        return load_checked(self._options, setting, self._forms) if setting in self._options.sources else None

    # --- Evaluations -------------------------------------------------------------------------------------------------

    async def evaluation(self, number: int, source: DataSource | None) -> dict[str, float] | None:
        """Return the mean reward of each evaluation set, or None without a function.

        Raises:
            PluginError: the function failed, or returned something else than named lists of rewards.
        """
        if self._evaluation is None:
            return None
        loaded, view = self._evaluation, None if source is None else SourceView(source, self._encoder)
        with view or nullcontext():
            found = await call(loaded, self._args, number, view, **loaded.named(evaluation=True))
        data = found if isinstance(found, dict) else getattr(found, "data", None)
        if not isinstance(data, dict) or not all(_is_measured(columns) for columns in data.values()):
            raise PluginError(f"{self._evaluation.source}: it returned {_shown(found)}; accepted: {MEASURED}.")
        metrics = _numbers(getattr(found, "metrics", None))
        for name, columns in data.items():
            metrics[f"eval/{name}"] = statistics.fmean(self._values(self._evaluation, name, columns["rewards"]))
            if columns.get("truncated"):
                metrics[f"eval/{name}-truncated_ratio"] = statistics.fmean(map(float, columns["truncated"]))
        return {} if self._logs_evaluation(number, data, metrics) else metrics

    def _values(self, loaded: Loaded, name: str, rewards: Sequence[Any]) -> list[float]:
        """Return the rewards of one evaluation set as numbers; named rewards are selected by the reward key."""
        plan = self._options.plan
        key = plan.settings.get("eval_reward_key") or plan.reward_key
        found: list[Any] = [reward.get(key) if isinstance(reward, Mapping) else reward for reward in rewards]
        values: list[Any] = [
            one.item() if hasattr(one, "item") and getattr(one, "ndim", 0) == 0 else one for one in found
        ]
        wrong = [place for place, value in enumerate(values) if not isinstance(value, int | float)]
        if wrong:
            raise PluginError(
                f"{loaded.source}: rewards of {name!r} has {_shown(rewards[wrong[0]])} at place {wrong[0]}; accepted: "
                f"numbers, or dicts with a number under --eval-reward-key or --reward-key, which is {key!r}."
            )
        return [float(value) for value in values]

    # --- Samples on their way ----------------------------------------------------------------------------------------

    async def generated(self, sample: Sample, context: GenerateContext) -> Sample | None:
        """Call every hook on ``sample``, in the order in which the run names them; return the sample that replaces it,
        or None if none does.

        Raises:
            PluginError: a hook failed, or returned something else than a sample or None.
        """
        render([sample], context.encoder)
        current = sample
        for hook in self._hooks:
            named = hook.named(rollout_id=context.rollout, evaluation=context.evaluation)
            with as_in_slime([current]):
                returned = await call(hook, self._args, current, **named)
            if returned is not None and not isinstance(returned, Sample):
                raise PluginError(
                    f"{hook.source}: it returned {_shown(returned)}; accepted: a slime_core.Sample, or None."
                )
            if returned is not None:
                restore([returned], [current], originals([current]))
                current = returned
        return None if current is sample else current

    def collected(self, groups: list[PromptGroup], source: DataSource) -> None:
        """Call the function with every group of a rollout, if there is one."""
        if self._finished is not None:
            with (
                self._shown([sample for group in groups for sample in group]),
                SourceView(source, self._encoder) as view,
            ):
                call_here(self._finished, self._args, groups, view)

    def trained(self, samples: list[Sample]) -> TrainSamples | None:
        """Return samples with the rewards, or all columns, from the functions; None without a function. As in slime,
        these rewards are used as advantages.

        Raises:
            PluginError: a function failed, or its columns are invalid.
            RunError: there are too few rows for every optimizer step and learner rank.
        """
        if self._convert is not None:
            with self._shown(samples):
                columns = call_here(self._convert, self._args, samples)
            rows = converted(self._convert, columns, samples)
            self._require_enough(rows, samples, self._convert)
            return TrainSamples(rows, rewards_are_advantages=True)
        if self._post_process is not None:
            with self._shown(samples):
                rewards = call_here(self._post_process, self._args, samples)
            rows = post_processed(self._post_process, rewards, samples)
            return TrainSamples(rows, rewards_are_advantages=True)
        return None

    def _require_enough(self, rows: list[Sample], samples: list[Sample], convert: Loaded) -> None:
        plan = self._options.plan
        needed = plan.steps_per_rollout * plan.num_data_ranks
        if len(rows) < needed:
            raise RunError(
                f"{convert.source}: it returned {len(rows)} rows for {len(samples)} samples; {needed} are needed, one "
                "for each optimizer step and learner rank. Return more rows, or make --num-steps-per-rollout smaller."
            )

    # --- Logging -----------------------------------------------------------------------------------------------------

    def log(self, number: int, samples: list[Sample], metrics: dict[str, float], seconds: float) -> bool:
        """Call the function, if any; return True if it logs instead of the core."""
        if self._log is None:
            return False
        with self._shown(samples):
            return bool(call_here(self._log, number, self._args, samples, metrics, seconds))

    def log_evaluation(self, number: int, sets: Mapping[str, EvalSamples], metrics: dict[str, float]) -> bool:
        """Call the function for evaluations, if any; return True if it logs instead of the core."""
        columns = {
            name: {"rewards": one.rewards, "truncated": one.truncated, "samples": one.samples}
            for name, one in sets.items()
        }
        with self._shown([sample for one in sets.values() for sample in one.samples]):
            return self._logs_evaluation(number, columns, metrics)

    def _shown(self, samples: Sequence[Sample]) -> AbstractContextManager[None]:
        return as_in_slime(samples, self._encoder)

    def _logs_evaluation(self, number: int, data: EvalData, metrics: dict[str, float]) -> bool:
        found = self._log_evaluation
        return found is not None and bool(call_here(found, number, self._args, data, metrics))


def _flat(group: Any) -> list[Any]:
    """Return the samples of a group; a generation that fanned out may be a nested list."""
    entries = group if isinstance(group, list) else [group]
    return [one for entry in entries for one in (entry if isinstance(entry, list) else [entry])]


def _is_measured(columns: Any) -> bool:
    return isinstance(columns, Mapping) and isinstance(columns.get("rewards"), list) and bool(columns["rewards"])


def _numbers(metrics: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


def _addresses(urls: Mapping[str, str]) -> dict[str, tuple[str | None, int | None]]:
    parts = {name: urlsplit(url) for name, url in urls.items()}
    return {name: (part.hostname, part.port) for name, part in parts.items()}
