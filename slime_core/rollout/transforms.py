"""Runs the sample transforms of a run, in the order in which they are named, and holds them to their contract.

    Transform     one component, called and checked
    Transforms    all of them: first those that see one group, up to the one that sees the whole rollout; then the rest

The two halves differ in when they run: the first as groups finish, each group once; the second over all groups that the
first has left, and again from the same start where groups had to be replaced.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import construct
from slime_core.plugins.contracts import RunView, Transformed
from slime_core.plugins.discovery import PluginIdentity
from slime_core.plugins.registry import Registry
from slime_core.types import PromptGroup, Sample

__all__ = ["Transform", "Transforms", "load_transforms", "refuse_unusable"]

REASON = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""A reason is part of a metric's name."""


@dataclass(frozen=True, slots=True)
class Transform:
    """One sample transform of the run.

    Arguments:
        name, plugin: the component and whose it is, for messages.
        function: what its target made.
        sees_rollout: it is called with all groups at once; else with one.
        reward_key: which of several rewards trains.
    """

    name: str
    plugin: PluginIdentity
    function: Callable[..., Any]
    sees_rollout: bool
    reward_key: str | None

    def __call__(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        """What becomes of each of ``groups``, in order.

        Raises:
            PluginError: it failed, or broke its contract; names plugin and component.
        """
        # What it is handed, it may change in place; what came in is needed to check what comes out.
        before = [Counter(map(_number, group)) for group in groups]
        found = self._all(groups) if self.sees_rollout else [self._call(group) for group in groups]
        for numbers, one in zip(before, found, strict=True):
            self._check(numbers, one)
        return found

    def _all(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        returned = self._call(list(groups))
        if not isinstance(returned, Sequence) or len(returned) != len(groups):
            count = f"{len(returned)} groups" if isinstance(returned, Sequence) else f"a {type(returned).__name__}"
            raise self._breach(f"it returned {count} for {len(groups)} groups; accepted is one Transformed a group")
        return list(returned)

    def _call(self, argument: Any) -> Any:
        with boundary(self.plugin, f"sample transform {self.name!r}", locate=True):
            return self.function(argument)

    def _check(self, before: Counter[Any], found: Any) -> None:
        if not isinstance(found, Transformed):
            raise self._breach(f"it returned a {type(found).__name__}; accepted is a Transformed")
        reasons: list[Any] = [*found.changed, *([] if found.dropped is None else [found.dropped])]
        for reason in reasons:
            if not (isinstance(reason, str) and REASON.fullmatch(reason)):
                raise self._breach(f"the reason {reason!r} is no part of a metric's name; accepted: 'zero_std'")
        counts: dict[str, Any] = dict(found.changed)
        for reason, count in counts.items():
            if not isinstance(count, int) or count < 0:
                raise self._breach(f"changed[{reason!r}] is {count!r}; accepted is a number of samples")
        if found.dropped is None:
            self._check_kept(before, found.samples)

    def _check_kept(self, before: Counter[Any], samples: Any) -> None:
        if not isinstance(samples, list) or not samples or not all(isinstance(one, Sample) for one in samples):
            raise self._breach(
                "a group that goes on is a list of at least one Sample; to leave it out, give dropped='REASON'"
            )
        unknown = Counter(map(_number, samples)) - before
        if unknown:
            (group, index), _ = next(iter(unknown.items()))
            raise self._breach(f"it returned sample {index} of group {group}, which it was not handed in that group")
        for sample in samples:
            refuse_unusable(sample, self.reward_key, who=self._who)

    @property
    def _who(self) -> str:
        return f"{self.plugin}: sample transform {self.name!r}"

    def _breach(self, what: str) -> PluginError:
        return PluginError(f"{self._who} broke its contract: {what}.\nCorrect {self.plugin.distribution}.")


class Transforms:
    """All transforms of a run, in order; with none, every group is kept as it is."""

    def __init__(self, transforms: Sequence[Transform] = ()) -> None:
        early = list(takewhile(lambda one: not one.sees_rollout, transforms))
        self._early, self._late = early, list(transforms)[len(early) :]

    def __bool__(self) -> bool:
        return bool(self._early or self._late)

    def early(self, group: PromptGroup) -> Transformed:
        """What those before the first that sees the rollout make of one group."""
        return _through(self._early, [group])[0]

    def late(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        """What the others make of all groups, in order; works on copies, so that it can be asked again."""
        if not self._late:
            return [Transformed(group) for group in groups]
        return _through(self._late, [[_copied(sample) for sample in group] for group in groups])


def load_transforms(
    names: Sequence[str], registry: Registry, *, options: Mapping[str, Any], run: RunView
) -> Transforms:
    """The transforms of these names, made, in this order.

    Arguments:
        options: plugin name -> its options object.

    Raises:
        PluginError: a component cannot be made.
    """
    return Transforms([_made(name, registry, options, run) for name in names])


def refuse_unusable(sample: Sample, key: str | None, *, who: str) -> None:
    """Returns if ``sample`` can be trained on.

    Raises:
        PluginError: it has no finite reward under the key of its row, or else under ``key``; says who left it so.
    """
    own = sample.reward_key(key)
    reward = sample.reward.get(own or "") if isinstance(sample.reward, dict) else sample.reward
    if reward is None or not math.isfinite(reward):
        raise PluginError(
            f"{who} left sample {sample.index} of group {sample.group_index} with the reward {sample.reward!r}; "
            "accepted is a finite number, or a dict of them with --reward-key or reward_key in the row's metadata."
        )


def _copied(sample: Sample) -> Sample:
    """A sample of its own, with what transforms change; tokens and log-probabilities are shared."""
    mask, reward = copy.copy(sample.loss_mask), copy.copy(sample.reward)
    return replace(sample, metadata=dict(sample.metadata), reward=reward, loss_mask=mask)


def _made(name: str, registry: Registry, options: Mapping[str, Any], run: RunView) -> Transform:
    traits: Any = registry.find(Kind.SAMPLE_TRANSFORM, name).traits
    plugin = registry.owner(Kind.SAMPLE_TRANSFORM, name)
    function = construct(registry, Kind.SAMPLE_TRANSFORM, name, options, run)
    return Transform(name, plugin, function, traits.scope == "rollout", run.reward_key)


def _through(transforms: Sequence[Transform], groups: Sequence[PromptGroup]) -> list[Transformed]:
    """Every group as the last transform that saw it left it, with all changes that were counted on the way."""
    done = [Transformed(group) for group in groups]
    for transform in transforms:
        open_at = [position for position, one in enumerate(done) if one.dropped is None]
        if open_at:
            results = transform([done[position].samples for position in open_at])
            for position, result in zip(open_at, results, strict=True):
                done[position] = replace(result, changed=Counter(done[position].changed) + Counter(result.changed))
    return done


def _number(sample: Sample) -> tuple[int | None, int | None]:
    return sample.group_index, sample.index
