"""Which component a sample asks for: the one that its row names, else the run's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime_core.config.reward_sum import reward_names
from slime_core.plugins.component import Kind
from slime_core.plugins.discovery import CORE, PluginIdentity
from slime_core.plugins.registry import Registry
from slime_core.prompts.named import Offered, name_of
from slime_core.types import Sample

__all__ = ["ComponentRouter", "RoutedComponent"]


@dataclass(frozen=True, slots=True)
class RoutedComponent:
    """One component, made; ``takes_groups`` where it wants all samples of a prompt at once; ``plugin``: whose it is;
    ``resumes``: a generate function that goes on with aborted samples."""

    name: str
    component: Any
    takes_groups: bool
    plugin: PluginIdentity = CORE
    resumes: bool = False


class ComponentRouter:
    """All components of one kind that samples of the run ask for, each made once, when it is first asked for.

    Arguments:
        kind: of the components.
        key: of the metadata, under which a row names its own.
        default: the run's; made at once.
        registry: says how each wants to be called.
        offered: what rows may name.
        make: a component by its name, made with its plugin's options.
    """

    def __init__(
        self, kind: Kind, key: str, *, default: str, registry: Registry, offered: Offered, make: Callable[[str], Any]
    ) -> None:
        self._kind, self._key, self._default = kind, key, default
        self._registry, self._offered, self._make = registry, offered, make
        self._made: dict[str, RoutedComponent] = {}
        self._get(default)

    def of(self, sample: Sample) -> RoutedComponent:
        """What ``sample`` asks for.

        Raises:
            DataError: its row names a component that no active plugin offers.
            PluginError: the component cannot be imported.
        """
        return self._get(name_of(sample, self._key, self._offered) or self._default)

    def _get(self, name: str) -> RoutedComponent:
        if name not in self._made:
            parts = reward_names(name) if self._kind is Kind.REWARD_MODEL else (name,)
            traits: list[Any] = [self._registry.find(self._kind, part).traits for part in parts]
            takes_groups = any(one.scope == "group" for one in traits)
            resumes = self._kind is Kind.GENERATE_FUNCTION and traits[0].resumes
            owner = self._registry.owner(self._kind, parts[0])
            self._made[name] = RoutedComponent(name, self._make(name), takes_groups, owner, resumes)
        return self._made[name]
