"""Sample transforms: calls them, checks their results, and combines what they drop and change."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from slime_core.contracts import Transformed
from slime_core.errors import PluginError
from slime_core.plugins.discovery import Plugin
from slime_core.types import PromptGroup, Sample
from slime_core.user_code.failures import boundary

REASON = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""A reason is part of a metric's name."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One sample transform of the run.

    Arguments:
        name, plugin: the component and its plugin, for messages.
        function: called with a group, or with all groups if ``sees_rollout``.
        reward_key: which of several rewards trains.
    """

    name: str
    plugin: Plugin
    function: Callable[..., Any]
    sees_rollout: bool
    reward_key: str | None

    def __call__(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        """Return the result for each of ``groups``, in order.

        Raises:
            PluginError: the transform failed, or broke its contract; names plugin and component.
        """
        # A transform may change its groups in place; the check of its result needs the numbers before.
        before = [Counter(map(_number, group)) for group in groups]
        results = self._all(groups) if self.sees_rollout else [self._call(group) for group in groups]
        for numbers, result in zip(before, results, strict=True):
            self._check(numbers, result)
        return results

    def _all(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        returned = self._call(list(groups))
        if not isinstance(returned, Sequence) or len(returned) != len(groups):
            raise self._breach(f"it returned {returned!r:.80} for {len(groups)} groups, not one Transformed a group")
        return list(returned)

    def _call(self, argument: Any) -> Any:
        with boundary(self.plugin, f"sample transform {self.name!r}", locate=True):
            return self.function(argument)

    def _check(self, before: Counter[Any], result: Any) -> None:
        if not isinstance(result, Transformed):
            raise self._breach(f"it returned a {type(result).__name__}, not a Transformed")
        for reason in (*result.changed, *([] if result.dropped is None else [result.dropped])):
            if not REASON.fullmatch(f"{reason}"):
                raise self._breach(f"the reason {reason!r} cannot be part of a metric's name; accepted: 'zero_std'")
        if result.dropped is None:
            self._check_samples(before, result.samples)

    def _check_samples(self, before: Counter[Any], samples: Any) -> None:
        if not isinstance(samples, list) or not samples or not all(isinstance(sample, Sample) for sample in samples):
            raise self._breach("it kept a group without samples; to drop a group, set dropped='REASON'")
        unknown = Counter(map(_number, samples)) - before
        if unknown:
            (group, index), _ = next(iter(unknown.items()))
            raise self._breach(f"it returned sample {index} of group {group}, which is not in the group it received")
        for sample in samples:
            refuse_unusable(sample, self.reward_key, source=self._source)

    @property
    def _source(self) -> str:
        return f"{self.plugin}: sample transform {self.name!r}"

    def _breach(self, problem: str) -> PluginError:
        return PluginError(f"{self._source} broke its contract: {problem}.\nCorrect {self.plugin.distribution}.")


class Transforms:
    """All transforms of a run, in order; without any, every group passes unchanged."""

    def __init__(self, transforms: Sequence[Transform] = ()) -> None:
        self._early = list(takewhile(lambda transform: not transform.sees_rollout, transforms))
        self._late = list(transforms)[len(self._early) :]

    def __bool__(self) -> bool:
        return bool(self._early or self._late)

    def early(self, group: PromptGroup) -> Transformed:
        """Return the result for one group of the transforms before the first that sees the rollout."""
        return _apply(self._early, [group])[0]

    def late(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        """Return the results of the other transforms for all groups, in order.

        The transforms get copies, so that they can run again.
        """
        if not self._late:
            return [Transformed(group) for group in groups]
        return _apply(self._late, [[_copy(sample) for sample in group] for group in groups])


def refuse_unusable(sample: Sample, key: str | None, *, source: str) -> None:
    """Check that ``sample`` has a finite reward under the key of its row, or else under ``key``.

    Raises:
        PluginError: it has none; names ``source`` as the cause.
    """
    row_key = sample.reward_key(key)
    reward = sample.reward.get(row_key or "") if isinstance(sample.reward, dict) else sample.reward
    if reward is None or not math.isfinite(reward):
        raise PluginError(
            f"{source} left sample {sample.index} of group {sample.group_index} with the reward {sample.reward!r}; "
            "accepted: a finite number, or a dict of them with --reward-key or reward_key in the row's metadata."
        )


def _copy(sample: Sample) -> Sample:
    """Return a copy with separate metadata, mask and reward; tokens and log-probabilities are shared."""
    copied = copy.copy(sample)  # with attributes that user code has set
    copied.metadata = dict(sample.metadata)
    copied.loss_mask, copied.reward = copy.copy(sample.loss_mask), copy.copy(sample.reward)
    return copied


def _apply(transforms: Sequence[Transform], groups: Sequence[PromptGroup]) -> list[Transformed]:
    """Return the last result for each group, with the sum of all changes that were counted on the way."""
    results = [Transformed(group) for group in groups]
    for transform in transforms:
        places = [place for place, result in enumerate(results) if result.dropped is None]
        if places:
            for place, result in zip(places, transform([results[place].samples for place in places]), strict=True):
                results[place] = replace(result, changed=Counter(results[place].changed) + Counter(result.changed))
    return results


def _number(sample: Sample) -> tuple[int | None, int | None]:
    return sample.group_index, sample.index
