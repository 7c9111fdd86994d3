"""Calls of components in the sampler: what they raise names whose they are, and what they return is looked at.

guarded         around one call
CheckedDataSource   a data source, every method guarded
made_by         what a generate function returned, as a list of samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import Any, cast

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.contracts import DataSource
from slime_core.plugins.discovery import PluginIdentity
from slime_core.rollout.component_router import RoutedComponent
from slime_core.types import PromptGroup, Sample

__all__ = ["CheckedDataSource", "component_boundary", "require_samples"]


def component_boundary(plugin: PluginIdentity, action: str) -> AbstractContextManager[None]:
    """What the block raises comes out as a ``PluginError`` that names ``plugin``, file and line; slime's own errors
    pass."""
    return boundary(plugin, action, locate=True, passes=(SlimeError,))


def require_samples(generator: RoutedComponent, returned: Any) -> list[Sample]:
    """What ``generator`` returned, as a list.

    Raises:
        PluginError: it is no sample, or no list of at least one; one that takes groups returns a list.
    """
    several = isinstance(returned, list | tuple)
    found = list(returned) if several else [returned]
    wrong = [one for one in found if not isinstance(one, Sample)]
    if wrong or not found or (generator.takes_groups and not several):
        shown = f"a {type(returned).__name__}" + (f" with a {type(wrong[0]).__name__}" if several and wrong else "")
        accepted = "a list of at least one Sample" if generator.takes_groups else "a Sample, or a list of at least one"
        raise PluginError(
            f"{generator.plugin}: generate function {generator.name!r} returned {shown if found else 'an empty list'}; "
            f"accepted is {accepted}: those that it was handed, finished.\nCorrect {generator.plugin.distribution}."
        )
    return found


class CheckedDataSource:
    """A data source that a plugin offers.

    Every method raises ``PluginError`` where the plugin's raises anything but an error of slime's.

    Arguments:
        name, plugin: the component and whose it is, for messages.
        source: what its target made.
    """

    def __init__(self, source: DataSource, *, name: str, plugin: PluginIdentity) -> None:
        self._source, self._name, self._plugin = source, name, plugin

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` groups; a ``PluginError`` too where it returned something else."""
        with self._guarded("next_groups"):
            found: Any = self._source.next_groups(n)
        groups = list(found) if isinstance(found, list | tuple) else []
        if len(groups) != n or not all(map(_is_group, groups)):
            shown = f"{len(groups)} entries" if isinstance(found, list | tuple) else f"a {type(found).__name__}"
            raise PluginError(
                f"{self._plugin}: data source {self._name!r}: next_groups({n}) returned {shown}; accepted is a list of "
                f"{n} groups, each a list of at least one Sample.\nCorrect {self._plugin.distribution}."
            )
        return groups

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Hand groups back."""
        with self._guarded("put_back"):
            self._source.put_back(groups)

    def state(self) -> dict[str, Any]:
        """Where it stands."""
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
