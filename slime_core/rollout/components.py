"""The components that a sampler calls: made by name, chosen by row, called so that errors name their plugin.

component_boundary   turns the exceptions of a component into ``PluginError``
require_samples      checks what a generate function returned
require_metrics      checks metrics that a plugin returned
CheckedDataSource    checks what a data source returns
ComponentRouter      the generate function or reward model that a row names, else the run's
Transform            one sample transform, called and checked
Transforms           all of them, in order
estimate_advantages  calls the advantage estimator, and checks what it returns
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from slime_core.config.sampling import reward_names
from slime_core.config.secrets import refused_key
from slime_core.contracts import DataSource, GroupedRewards, Transformed
from slime_core.errors import PluginError, RunError, SlimeError
from slime_core.plugins.discovery import CORE, Plugin
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.prompts.row_checks import Offered, refuse_unknown
from slime_core.types import GENERATE_FUNCTION, REWARD_MODEL, PromptGroup, Sample
from slime_core.user_code.failures import boundary


def component_boundary(plugin: Plugin, action: str) -> AbstractContextManager[None]:
    """Turns exceptions of the block into a ``PluginError`` that names ``plugin``, file and line; slime's own errors
    pass."""
    return boundary(plugin, action, locate=True, passes=(SlimeError,), next_step=refused_key)


def require_samples(generator: RoutedComponent, returned: Any) -> list[Sample]:
    """Return the samples that ``generator`` returned, as a list.

    Raises:
        PluginError: ``returned`` is neither a sample nor a non-empty list of samples; a generator that takes groups
            must return a list.
    """
    several = isinstance(returned, list | tuple)
    found = list(returned) if several else [returned]
    wrong = [one for one in found if not isinstance(one, Sample)]
    if wrong or not found or (generator.takes_groups and not several):
        shown = f"a {type(returned).__name__}" + (f" with a {type(wrong[0]).__name__}" if several and wrong else "")
        accepted = "a list of at least one Sample" if generator.takes_groups else "a Sample, or a list of at least one"
        raise PluginError(
            f"{generator.plugin}: generate function {generator.name!r} returned {shown if found else 'an empty list'}; "
            f"accepted: {accepted}: those that it was handed, finished.\nCorrect {generator.plugin.distribution}."
        )
    return found


def require_metrics(returned: Any, *, who: str) -> dict[str, float]:
    """Return the metrics that ``who`` returned, by name.

    Raises:
        PluginError: it is not a mapping of names to numbers.
    """
    try:
        return {str(name): float(value) for name, value in returned.items()}
    except (AttributeError, TypeError, ValueError):
        raise PluginError(f"{who} returned {returned!r:.80}; accepted: a dict of metrics, name -> number.") from None


class CheckedDataSource:
    """A data source that a plugin offers.

    Every method raises ``PluginError`` where the plugin's raises anything but an error of slime's.

    Arguments:
        name, plugin: the component and whose it is, for messages.
        source: what its target made.
    """

    def __init__(self, source: DataSource, *, name: str, plugin: Plugin) -> None:
        self._source = source
        self._name = name
        self._plugin = plugin

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` groups; a ``PluginError`` too where it returned something else."""
        with self._guarded("next_groups"):
            found: Any = self._source.next_groups(n)
        groups = list(found) if isinstance(found, list | tuple) else []
        if len(groups) != n or not all(map(_is_group, groups)):
            shown = f"{len(groups)} entries" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise PluginError(
                f"{self._plugin}: data source {self._name!r}: next_groups({n}) returned {shown}; accepted: a list of "
                f"{n} groups, each a list of at least one Sample.\nCorrect {self._plugin.distribution}."
            )
        return groups

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Hand groups back."""
        with self._guarded("put_back"):
            self._source.put_back(groups)

    def state(self) -> dict[str, Any]:
        """The position of the data source, for a checkpoint."""
        with self._guarded("state"):
            return self._source.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from where ``state()`` was taken."""
        with self._guarded("restore"):
            self._source.restore(state)

    def __len__(self) -> int:
        """Prompts of one pass, for functions by path; a ``PluginError`` where the source is endless."""
        with self._guarded("__len__"):
            return len(cast(Sized, self._source))

    def _guarded(self, method: str) -> AbstractContextManager[None]:
        return component_boundary(self._plugin, f"data source {self._name!r}: {method}")


def _is_group(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(one, Sample) for one in found)


@dataclass(frozen=True, slots=True)
class RoutedComponent:
    """One component, made; ``takes_groups`` where it wants all samples of a prompt at once; ``plugin``: whose it is;
    ``resumes``: a generate function that resumes aborted samples."""

    name: str
    component: Any
    takes_groups: bool = False
    plugin: Plugin = CORE
    resumes: bool = False


class ComponentRouter:
    """All components of one kind that rows of the run name, each made once, when it is first needed.

    Arguments:
        kind: of the components.
        default: the run's; made at once.
        registry: says how each wants to be called.
        offered: what rows may name.
        make: a component by its name, made with its plugin's options.
    """

    def __init__(
        self, kind: Kind, *, default: str, registry: Registry, offered: Offered, make: Callable[[str], Any]
    ) -> None:
        self._kind = kind
        self._key = REWARD_MODEL if kind is Kind.REWARD_MODEL else GENERATE_FUNCTION  # in the metadata of a row
        self._default = default
        self._registry = registry
        self._offered = offered
        self._make = make
        self._made: dict[str, RoutedComponent] = {}
        self._get(default)

    def of(self, sample: Sample) -> RoutedComponent:
        """The component for ``sample``.

        Raises:
            DataError: its row names a component that no active plugin offers.
            PluginError: the component cannot be imported.
        """
        return self._get(self._named_by_row(sample) or self._default)

    def _named_by_row(self, sample: Sample) -> str | None:
        """``Sample.generate_function_path``, slime's name for it, takes precedence over the metadata."""
        if self._key not in self._offered:
            return None
        own = sample.generate_function_path if self._key == GENERATE_FUNCTION else None
        name = own or sample.metadata.get(self._key)
        if not name:
            return None
        where = f"sample {sample.index} of group {sample.group_index}"
        refuse_unknown({self._key: name}, {self._key: self._offered[self._key]}, where=where)
        return str(name)

    def _get(self, name: str) -> RoutedComponent:
        if name not in self._made:
            parts = reward_names(name) if self._kind is Kind.REWARD_MODEL else (name,)
            traits = [self._registry.traits(self._kind, part) for part in parts]
            takes_groups = any(one.scope == "group" for one in traits)
            resumes = self._kind is Kind.GENERATE_FUNCTION and traits[0].resumes
            owner = self._registry.owner(self._kind, parts[0])
            self._made[name] = RoutedComponent(name, self._make(name), takes_groups, owner, resumes)
        return self._made[name]


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
    plugin: Plugin
    function: Callable[..., Any]
    sees_rollout: bool
    reward_key: str | None

    def __call__(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        """The result for each of ``groups``, in order.

        Raises:
            PluginError: it failed, or broke its contract; names plugin and component.
        """
        # A transform may change its groups in place; the check of its result needs their numbers from before.
        before = [Counter(map(_number, group)) for group in groups]
        found = self._all(groups) if self.sees_rollout else [self._call(group) for group in groups]
        for numbers, one in zip(before, found, strict=True):
            self._check(numbers, one)
        return found

    def _all(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        returned = self._call(list(groups))
        if not isinstance(returned, Sequence) or len(returned) != len(groups):
            count = f"{len(returned)} groups" if isinstance(returned, Sequence) else f"a {type(returned).__name__}"
            raise self._breach(f"it returned {count} for {len(groups)} groups; accepted: one Transformed a group")
        return list(returned)

    def _call(self, argument: Any) -> Any:
        with boundary(self.plugin, f"sample transform {self.name!r}", locate=True):
            return self.function(argument)

    def _check(self, before: Counter[Any], found: Any) -> None:
        if not isinstance(found, Transformed):
            raise self._breach(f"it returned a {type(found).__name__}; accepted: a Transformed")
        reasons: list[Any] = [*found.changed, *([] if found.dropped is None else [found.dropped])]
        for reason in reasons:
            if not (isinstance(reason, str) and REASON.fullmatch(reason)):
                raise self._breach(f"the reason {reason!r} is not a part of a metric's name; accepted: 'zero_std'")
        counts: dict[str, Any] = dict(found.changed)
        for reason, count in counts.items():
            if not isinstance(count, int) or count < 0:
                raise self._breach(f"changed[{reason!r}] is {count!r}; accepted: a number of samples")
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
        self._early = early
        self._late = list(transforms)[len(early) :]

    def __bool__(self) -> bool:
        return bool(self._early or self._late)

    def early(self, group: PromptGroup) -> Transformed:
        """The result for one group of the transforms before the first that sees the rollout."""
        return _through(self._early, [group])[0]

    def late(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        """The results of the other transforms for all groups, in order; they get copies, so that they can run again."""
        if not self._late:
            return [Transformed(group) for group in groups]
        return _through(self._late, [[_copied(sample) for sample in group] for group in groups])


def refuse_unusable(sample: Sample, key: str | None, *, who: str) -> None:
    """Raise PluginError if ``sample`` cannot be trained on.

    Raises:
        PluginError: ``sample`` has no finite reward under the key of its row, or else under ``key``; names ``who`` as
            the cause.
    """
    own = sample.reward_key(key)
    reward = sample.reward.get(own or "") if isinstance(sample.reward, dict) else sample.reward
    if reward is None or not math.isfinite(reward):
        raise PluginError(
            f"{who} left sample {sample.index} of group {sample.group_index} with the reward {sample.reward!r}; "
            "accepted: a finite number, or a dict of them with --reward-key or reward_key in the row's metadata."
        )


def _copied(sample: Sample) -> Sample:
    """A sample of its own, with what transforms change; tokens and log-probabilities are shared."""
    copied = copy.copy(sample)  # with attributes that user code has set
    copied.metadata = dict(sample.metadata)
    copied.loss_mask, copied.reward = copy.copy(sample.loss_mask), copy.copy(sample.reward)
    return copied


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


def estimate_advantages(
    estimator: RoutedComponent, rewards: GroupedRewards, *, are_given: bool = False
) -> NDArray[np.float32]:
    """The advantages by ``estimator``, float32 [B].

    Arguments:
        are_given: the rewards are the advantages; see :class:`~slime_core.TrainSamples`.

    Raises:
        RunError: it failed, or did not return one finite number per sample.
    """
    who = f"advantage estimator {estimator.name!r} of {estimator.plugin}"
    with boundary(who, "estimating advantages", error=RunError, locate=True):
        found = rewards.rewards_B if are_given else estimator.component.estimate(rewards)
    with boundary(who, "reading what it returned as one number per sample", error=RunError):
        advantages_B = np.asarray(found, np.float32)
    if advantages_B.shape != (len(rewards),) or not np.isfinite(advantages_B).all():
        raise RunError(
            f"{who} returned shape {advantages_B.shape} for {len(rewards)} samples, or NaN or infinity; accepted: "
            "one finite number per sample"
        )
    return advantages_B
