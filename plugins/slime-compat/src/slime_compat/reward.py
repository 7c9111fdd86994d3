"""``custom_rm_path``: a reward function or class, as a reward model."""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from slime_compat.calling import PathFunction, call_async, scalar
from slime_compat.paths import PathOptions
from slime_compat.views import as_in_slime
from slime_core.errors import SlimeError
from slime_core.types import Sample

__all__ = ["PathReward"]

Reward = float | dict[str, float]


class PathReward:
    """The function or class of --custom-rm-path.

    ``(args, sample)``: once for each sample, concurrently, and a failure affects that sample only; with ``group_rm``,
    once with the list. ``(args, samples)``: once with the list of samples that are scored together, a whole group. A
    class is created once, and its ``compute_reward(prompts, responses)`` is called, one call at a time.

    Attributes:
        scores_each: True: the function is called once for each sample, so reward workers retry a call that hung or
            killed its process sample by sample.

    Raises:
        PluginError: the function cannot be imported or called, or the class cannot be created.
    """

    def __init__(self, options: PathOptions) -> None:
        self._function = options.function("custom_rm_path")
        self._args = options.arguments
        self.scores_each = self._function.form.passed == ("args", "sample") and not options.group_rm
        self._scorer = _scorer(self._function, options) if self._function.form.methods else None
        self._turn = asyncio.Lock()

    async def score(self, samples: Sequence[Sample]) -> Sequence[Reward | str]:
        """Return one reward per sample, in order; a text with the reason if the function failed for this sample only.

        Raises:
            PluginError: the function failed for all samples, or returned something else than rewards, one per sample.
        """
        if not samples:
            return []
        with as_in_slime(samples):
            if self.scores_each:
                return await self._each(samples)
            rewards = _as_list(await self._rewards(list(samples)), len(samples), self._function)
        return [_reward(value, sample, self._function) for value, sample in zip(rewards, samples, strict=True)]

    async def _each(self, samples: Sequence[Sample]) -> list[Reward | str]:
        scored = await asyncio.gather(*map(self._reward, samples), return_exceptions=True)
        failures = [reward for reward in scored if isinstance(reward, BaseException)]
        fatal = [failure for failure in failures if not isinstance(failure, SlimeError)]
        if fatal or len(failures) == len(samples):
            raise [*fatal, *failures][0]
        # Rewards leave the process as JSON; the core recognises a text as a failure and shows it.
        return [str(reward) if isinstance(reward, BaseException) else reward for reward in scored]

    async def _reward(self, sample: Sample) -> Reward:
        return _reward(await call_async(self._function, self._args, sample), sample, self._function)

    async def _rewards(self, samples: list[Sample]) -> Any:
        if self._scorer is None:
            return await call_async(self._function, self._args, samples)
        compute = self._scorer.compute_reward
        takes_labels = "labels" in inspect.signature(compute).parameters
        labels = {"labels": [sample.label for sample in samples]} if takes_labels else {}
        prompts, responses = [sample.prompt for sample in samples], [sample.response for sample in samples]
        async with self._turn:
            return await call_async(self._function, prompts, responses, function=compute, **labels)


def _scorer(function: PathFunction, options: PathOptions) -> Any:
    path = options.plan.settings.get("compat.rm_model_path")
    with function.blamed("creating the class"):
        return function.function(**function.named(args=options.arguments, model_path=path))


def _as_list(returned: Any, count: int, function: PathFunction) -> list[Any]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        raise function.refused(returned, f"a list of {count} rewards, one per sample")
    return list(values)


def _reward(value: Any, sample: Sample, function: PathFunction) -> Reward:
    """Convert ``value`` to Python numbers; functions may return those of numpy and torch."""
    if isinstance(value, Mapping):
        return {str(name): entry for name, entry in ((n, _number(v)) for n, v in value.items()) if entry is not None}
    number = _number(value)
    if number is None:
        raise function.refused(value, f"a number for sample {sample.index}, or a dict of numbers with --reward-key")
    return number


def _number(value: Any) -> float | None:
    """Return ``value`` as a float, or None: named rewards may include texts."""
    plain = scalar(value)
    return float(plain) if isinstance(plain, numbers.Real) else None
