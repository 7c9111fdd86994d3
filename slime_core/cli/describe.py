"""``slime plugins show`` and ``slime plugins trace``: what one plugin declares, and which code a run calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slime_core.config.load import DEFAULT
from slime_core.config.settings import as_words, plugin_settings
from slime_core.plugins.component import Component, Kind
from slime_core.plugins.contracts import Place
from slime_core.plugins.discovery import PluginIdentity
from slime_core.plugins.hooks import LIFECYCLE_HOOKS
from slime_core.plugins.registry import Implementation, Registry
from slime_core.plugins.selection import Selected, selected

if TYPE_CHECKING:
    from slime_core.config.load import Resolved
    from slime_core.plugins.activation import ActivePlugins
    from slime_core.plugins.loading import FunctionSource


def declared(plugin: PluginIdentity, registry: Registry) -> dict[str, Any]:
    """The plugin's declarations, as JSON-ready values.

    Arguments:
        registry: of this plugin alone.
    """
    components = [(kind, registry.find(kind, name)) for kind in Kind for name in registry.names(kind)]
    options = plugin_settings(registry.options).values()
    return {
        "components": [_component(kind, component) for kind, component in components],
        "presets": {key: value for key, (value, _) in registry.presets.items()},
        "options": {
            setting.flag: {
                "accepts": setting.accepts,
                "default": setting.default,
                "help": " ".join((setting.info.description or "").split()),
            }
            for setting in options
        },
        "hooks": [_hook(hook, one) for hook, found in registry.lifecycle.items() for one in found],
    }


def page(found: Mapping[str, Any]) -> Iterator[str]:
    """The declarations of :func:`declared`, line by line."""
    for kind in Kind:
        own = [row for row in found["components"] if row["kind"] == kind.value]
        yield from [f"  {kind.words}"] if own else []
        for row in own:
            yield f"    {row['name']:<28} {row['summary']}".rstrip()
            yield f"    {'':<28} {_traits_in_words(row['traits'])}{row['target']}"
    yield from _listed("presets", (f"--{key.replace('_', '-')} {value}" for key, value in found["presets"].items()))
    for flag, option in found["options"].items():
        yield from [] if flag != next(iter(found["options"])) else ["  options"]
        yield f"    {flag} ({option['accepts']}; default {as_words(option['default'])})"
        yield f"    {'':<28} {option['help']}"
    yield from _listed(
        "hooks of the run's life",
        (f"{row['hook']:<28} {where_called(row['hook'])}; {row['at']}" for row in found["hooks"]),
    )


def where_called(hook: str) -> str:
    """The processes that call a hook of the run's life, and what its failure means."""
    lifecycle = LIFECYCLE_HOOKS[hook]
    places = ["every rank" if place is Place.RANK else place.value for place in lifecycle.places]
    return f"on {', '.join(places)}; {lifecycle.policy}"


def place_of(function: Any) -> str:
    """``file:line`` of a function."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _listed(title: str, rows: Iterator[str]) -> Iterator[str]:
    lines = [f"    {row}" for row in rows]
    yield from [f"  {title}", *lines] if lines else []


def _component(kind: Kind, component: Component) -> dict[str, Any]:
    assert component.traits is not None  # registration fills them in
    return {
        "kind": kind.value,
        "name": component.name,
        "target": component.target,
        "summary": component.summary,
        "traits": {
            name: sorted(value) if isinstance(value, AbstractSet) else value
            for name, value in asdict(component.traits).items()
        },
    }


def _hook(hook: str, one: Implementation) -> dict[str, Any]:
    lifecycle = LIFECYCLE_HOOKS[hook]
    return {
        "hook": hook,
        "places": [place.value for place in lifecycle.places],
        "policy": lifecycle.policy,
        "at": place_of(one.function),
    }


def _traits_in_words(traits: Mapping[str, Any]) -> str:
    words = [
        f"{name} {', '.join(value) or 'nothing' if isinstance(value, list) else value}"
        for name, value in traits.items()
    ]
    return "; ".join([*words, ""])


USAGE = """\
slime plugins trace CONFIG.toml [flags of slime run]
slime plugins trace [flags of slime run]

Says which functions the run would call for each hook, in order, and which components it would use, and why."""


def trace(resolved: Resolved, active: ActivePlugins, *, architecture: str) -> Iterator[str]:
    """The components and hooks that the run calls, line by line; nothing of it is started.

    Arguments:
        architecture: of the start weights.
    """
    registry = active.registry
    yield "once, at start"
    for hook, found in registry.declarations.items():
        yield from _calls_of(hook, "", found)
    yield ""
    yield "while it runs"
    for hook, found in registry.lifecycle.items():
        yield from _calls_of(hook, where_called(hook), found)
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
    """The selection of the component: a flag, a line of a file, a preset, a default, or another component."""
    source = resolved.provenance.get(one.by)
    if source is None:
        return f"by {one.by}"
    return f"by {one.by} ({source})" if source != DEFAULT else f"by default of {one.by}"


def _calls_of(hook: str, arguments: str, found: Sequence[Implementation]) -> Iterator[str]:
    yield f"  {hook:<40} {arguments}{'' if found else '  (no plugin)'}".rstrip()
    for number, one in enumerate(found, start=1):
        plugin = one.plugin
        yield f"    {number}. {plugin.name} ({plugin.distribution} {plugin.version})  {place_of(one.function)}"


def _functions(found: Sequence[FunctionSource]) -> Iterator[str]:
    for function in found:
        code = function.code.plugin
        yield f"    {function}  ({code.distribution} {code.version})"


def _who(one: Selected) -> str:
    return f"{one.plugin.name} ({one.plugin.distribution} {one.plugin.version})"
