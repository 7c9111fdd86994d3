"""Chooses the component that a row names, and calls components so that errors name their plugin."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from slime_core.config.sampling import reward_names
from slime_core.config.secrets import refused_key
from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.discovery import CORE, Plugin
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry
from slime_core.rollout.row_checks import Offered, refuse_unknown
from slime_core.types import GENERATE_FUNCTION, REWARD_MODEL, Sample
from slime_core.user_code.failures import boundary


def component_boundary(plugin: Plugin, action: str) -> AbstractContextManager[None]:
    """Turn exceptions of the block into a ``PluginError`` that names ``plugin``, file and line; slime's errors pass."""
    return boundary(plugin, action, locate=True, passes=(SlimeError,), next_step=refused_key)


def require_metrics(returned: Any, *, source: str) -> dict[str, float]:
    """Return the metrics that ``source`` returned, by name.

    Raises:
        PluginError: ``returned`` is not a mapping of names to numbers.
    """
    try:
        return {str(name): float(value) for name, value in returned.items()}
    except (AttributeError, TypeError, ValueError):
        raise PluginError(f"{source} returned {returned!r:.80}; accepted: a dict of metrics, name -> number.") from None


@dataclass(frozen=True, slots=True)
class RoutedComponent:
    """A component with its name and its plugin.

    Arguments:
        takes_groups: called with all samples of a prompt at once.
        resumes: a generate function that continues aborted samples.
    """

    name: str
    component: Any
    takes_groups: bool = False
    plugin: Plugin = CORE
    resumes: bool = False


def require_samples(generator: RoutedComponent, returned: Any) -> list[Sample]:
    """Return the samples that ``generator`` returned, as a list.

    Raises:
        PluginError: ``returned`` is neither a sample nor a non-empty list of samples; a generator that takes groups
            must return a list.
    """
    is_list = isinstance(returned, list | tuple)
    samples = list(returned) if is_list else [returned]
    accepts = is_list or not generator.takes_groups
    if not accepts or not samples or not all(isinstance(sample, Sample) for sample in samples):
        accepted = "a list of at least one Sample" if generator.takes_groups else "a Sample, or a list of at least one"
        raise PluginError(
            f"{generator.plugin}: generate function {generator.name!r} returned {returned!r:.80}; "
            f"accepted: {accepted}.\nCorrect {generator.plugin.distribution}."
        )
    return samples


class ComponentRouter:
    """All components of one kind that rows of the run name, each constructed when a row first needs it.

    Arguments:
        kind: of the components.
        default: name of the component for rows that name none; constructed at once.
        registry: has the traits of each component.
        offered: names that rows may use.
        make: constructs a component by its name, with its plugin's options.
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
        self._components: dict[str, RoutedComponent] = {}
        self._get(default)

    def of(self, sample: Sample) -> RoutedComponent:
        """Return the component for ``sample``.

        Raises:
            DataError: the row names a component that no active plugin offers.
            PluginError: the component cannot be imported.
        """
        return self._get(self._named_by_row(sample) or self._default)

    def _named_by_row(self, sample: Sample) -> str | None:
        """Return the name in the row; ``Sample.generate_function_path`` takes precedence over the metadata."""
        if self._key not in self._offered:
            return None
        path = sample.generate_function_path if self._key == GENERATE_FUNCTION else None
        name = path or sample.metadata.get(self._key)
        if not name:
            return None
        where = f"sample {sample.index} of group {sample.group_index}"
        refuse_unknown({self._key: name}, {self._key: self._offered[self._key]}, where=where)
        return str(name)

    def _get(self, name: str) -> RoutedComponent:
        if name not in self._components:
            parts = reward_names(name) if self._kind is Kind.REWARD_MODEL else (name,)
            traits = [self._registry.traits(self._kind, part) for part in parts]
            takes_groups = any(trait.scope == "group" for trait in traits)
            resumes = self._kind is Kind.GENERATE_FUNCTION and traits[0].resumes
            owner = self._registry.owner(self._kind, parts[0])
            self._components[name] = RoutedComponent(name, self._make(name), takes_groups, owner, resumes)
        return self._components[name]
