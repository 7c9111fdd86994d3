"""``slime plugins trace``: which code a run calls, hook by hook and in order, and which component it uses for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime_core.cli.describe import place_of, where_called
from slime_core.config.load import DEFAULT
from slime_core.plugins.registry import Implementation
from slime_core.plugins.selection import Selected, selected

if TYPE_CHECKING:
    from slime_core.config.load import Resolved
    from slime_core.plugins.activation import ActivePlugins
    from slime_core.plugins.loading import FunctionSource

__all__ = ["USAGE", "because", "trace"]

USAGE = """\
slime plugins trace CONFIG.toml [flags of slime run]
slime plugins trace [flags of slime run]

Says which functions the run would call for each hook, in order, and which components it would use, and why."""


def trace(resolved: Resolved, active: ActivePlugins, *, architecture: str) -> Iterator[str]:
    """What the run calls, line by line; nothing of it is started.

    Arguments:
        architecture: of the start weights.
    """
    registry = active.registry
    yield "once, at start"
    for hook, found in registry.declarations.items():
        yield from _hook(hook, "", found)
    yield ""
    yield "while it runs"
    for hook, found in registry.lifecycle.items():
        yield from _hook(hook, where_called(hook), found)
    yield ""
    yield "components"
    used = list(selected(resolved.config, registry, trains=True, architecture=architecture))
    for one in used:
        yield f"  {one.kind.words} {one.component.name}, {because(one, resolved)}"
        yield f"    {_who(one)}: {one.component.target}"
        yield from _functions(active.functions.get(one.plugin.name, {}).get(one.component.name, ()))
    named = {(one.plugin.name, one.component.name) for one in used}
    options = [(plugin, option, found) for plugin, own in active.functions.items() for option, found in own.items()]
    others = [function for plugin, option, found in options if (plugin, option) not in named for function in found]
    yield from ["", "functions that other settings name by path", *_functions(others)] if others else []


def because(one: Selected, resolved: Resolved) -> str:
    """What selected the component: a flag, a line of a file, a preset, a default, or another component."""
    source = resolved.provenance.get(one.by)
    if source is None:
        return f"by {one.by}"
    return f"by {one.by} ({source})" if source != DEFAULT else f"by default of {one.by}"


def _hook(hook: str, told: str, found: Sequence[Implementation]) -> Iterator[str]:
    yield f"  {hook:<40} {told}{'' if found else '  (nobody)'}".rstrip()
    for number, one in enumerate(found, start=1):
        plugin = one.plugin
        yield f"    {number}. {plugin.name} ({plugin.distribution} {plugin.version})  {place_of(one.function)}"


def _functions(found: Sequence[FunctionSource]) -> Iterator[str]:
    for function in found:
        code = function.code.plugin
        yield f"    {function}  ({code.distribution} {code.version})"


def _who(one: Selected) -> str:
    return f"{one.plugin.name} ({one.plugin.distribution} {one.plugin.version})"
