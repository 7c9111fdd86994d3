"""``custom_rm_path``: a reward function or class, as a reward model."""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from slime_compat.calling import blamed, call
from slime_compat.check import Loaded, load_checked
from slime_compat.forms import rollout_forms
from slime_compat.options import PathOptions
from slime_compat.views import as_in_slime
from slime_core.errors import PluginError, SlimeError
from slime_core.types import Sample

__all__ = ["PathReward"]

Reward = float | dict[str, float]


class PathReward:
    """The function or class of --custom-rm-path.

    ``(args, sample)``: once for each sample, concurrently, and a failure concerns its own sample; with ``group_rm``,
    once with the list. ``(args, samples)``: once with the list of samples that are scored together, a whole group. A
    class is created once, and its ``compute_reward(prompts, responses)`` is called, one call at a time.

    Attributes:
        scores_each: True: the function is called once for each sample, so reward workers retry a call that hung or
            killed its process sample by sample.

    Raises:
        PluginError: the function cannot be imported or called, or the class cannot be created.
    """

    def __init__(self, options: PathOptions) -> None:
        self._loaded = load_checked(options, "custom_rm_path", rollout_forms(group_rm=options.group_rm))
        self._args = options.arguments
        self.scores_each = self._loaded.form.passed == ("args", "sample") and not options.group_rm
        self._scorer = _made(self._loaded, options) if self._loaded.form.methods else None
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
                return await self._one_by_one(samples)
            found = _as_list(await self._rewards(list(samples)), len(samples), self._loaded)
        return [_reward(value, sample, self._loaded) for value, sample in zip(found, samples, strict=True)]

    async def _one_by_one(self, samples: Sequence[Sample]) -> list[Reward | str]:
        scored = await asyncio.gather(*map(self._one, samples), return_exceptions=True)
        failures = [one for one in scored if isinstance(one, BaseException)]
        fatal = [one for one in failures if not isinstance(one, SlimeError)]
        if fatal or len(failures) == len(samples):
            raise [*fatal, *failures][0]
        # Rewards leave the process as JSON; the core recognises a text as a failure and shows it.
        return [str(one) if isinstance(one, BaseException) else one for one in scored]

    async def _one(self, sample: Sample) -> Reward:
        return _reward(await call(self._loaded, self._args, sample), sample, self._loaded)

    async def _rewards(self, samples: list[Sample]) -> Any:
        if self._scorer is None:
            return await call(self._loaded, self._args, samples)
        prompts, responses = [one.prompt for one in samples], [one.response for one in samples]
        labels = {"labels": [one.label for one in samples]} if _takes_labels(self._scorer) else {}
        async with self._turn:
            return await call(self._loaded, prompts, responses, function=self._scorer.compute_reward, **labels)


def _made(loaded: Loaded, options: PathOptions) -> Any:
    path = options.plan.settings.get("compat.rm_model_path")
    with blamed(loaded.source, "making the class"):
        return loaded.function(**loaded.named(args=options.arguments, model_path=path))


def _takes_labels(scorer: Any) -> bool:
    return "labels" in inspect.signature(scorer.compute_reward).parameters


def _as_list(found: Any, count: int, loaded: Loaded) -> list[Any]:
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise PluginError(
            f"{loaded.source}: it returned {_shown(found)} for {count} samples; accepted: a list of rewards."
        )
    if len(values) != count:
        raise PluginError(
            f"{loaded.source}: it returned {len(values)} rewards for {count} samples; accepted: one each."
        )
    return list(values)


def _reward(value: Any, sample: Sample, loaded: Loaded) -> Reward:
    """Convert ``value`` to Python numbers; functions may return those of numpy and torch."""
    if isinstance(value, Mapping):
        return {str(name): entry for name, entry in ((n, _number(v)) for n, v in value.items()) if entry is not None}
    number = _number(value)
    if number is None:
        raise PluginError(
            f"{loaded.source}: it returned {_shown(value)} for sample {sample.index}; accepted: a number, or a dict of "
            "them with --reward-key."
        )
    return number


def _number(value: Any) -> float | None:
    """Return ``value`` as a float, or None: named rewards may include texts."""
    plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    return float(plain) if isinstance(plain, numbers.Real) else None


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
