"""The prompt formats of a run's plugins: a format is made when the first file of it is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slime_core.plugins.component import Kind
from slime_core.plugins.construction import construct
from slime_core.plugins.contracts import PromptFormat, RunView
from slime_core.plugins.registration import Registry

__all__ = ["PromptFormats"]


class PromptFormats(Mapping[str, PromptFormat]):
    """Name -> prompt format, of every active plugin.

    Arguments:
        options: plugin -> its options object.
        run: what every component is made with.

    Raises:
        PluginError: from a lookup; the format cannot be imported, does not fit its contract, or its constructor failed.
    """

    def __init__(self, registry: Registry, options: Mapping[str, object], run: RunView) -> None:
        self._registry = registry
        self._options = options
        self._run = run
        self._made: dict[str, PromptFormat] = {}

    def __getitem__(self, name: str) -> PromptFormat:
        if name not in self._made:
            if name not in self._registry.names(Kind.PROMPT_FORMAT):
                raise KeyError(name)
            self._made[name] = construct(self._registry, Kind.PROMPT_FORMAT, name, self._options, self._run)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.names(Kind.PROMPT_FORMAT))

    def __len__(self) -> int:
        return len(self._registry.names(Kind.PROMPT_FORMAT))
