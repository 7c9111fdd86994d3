"""``slime plugins list``, ``show`` and ``trace``: installed plugins, the parts of a plugin, and the code of a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from slime_core.plugins.discovery import short_name
from slime_core.plugins.hooks import HOOKS, PLACES
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import load_plugins

if TYPE_CHECKING:
    from slime_core.components.functions import FunctionSource
    from slime_core.components.selection import Selected
    from slime_core.config.load import Resolved
    from slime_core.plugins.activation import ActivePlugins
    from slime_core.plugins.registry import Registry

TRACE = """\
slime plugins trace CONFIG.toml [flags of slime run]
slime plugins trace [flags of slime run]

Prints the functions that the run would call for each hook, in order, and the components that it would use, and why."""


def execute(argv: Sequence[str]) -> int:
    """Run one command; return its exit code."""
    if argv[:1] == ["trace"]:
        return print_trace(argv[1:])
    arguments = parser().parse_args(argv)
    return int(arguments.handler(arguments))


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``list`` and ``show``; its help names all commands."""
    result = argparse.ArgumentParser(prog="slime plugins", allow_abbrev=False)
    commands = result.add_subparsers(dest="plugins_command", required=True)
    listing = commands.add_parser("list", help="installed plugins and their parts")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    listing.set_defaults(handler=lambda arguments: list_plugins(as_json=arguments.json))
    showing = commands.add_parser("show", help="the components, presets, options and hooks of one plugin")
    showing.add_argument("name", metavar="NAME", help="an installed plugin, ./file.py or package.module")
    showing.add_argument("--json", action="store_true", help="print a JSON object")
    showing.set_defaults(handler=lambda arguments: show_plugin(arguments.name, as_json=arguments.json))
    # Its words are those of slime run, which argparse does not know.
    commands.add_parser("trace", help="which code a run calls, hook by hook; takes what slime run takes")
    return result


# --- What is installed ------------------------------------------------------------------------------------------------


def list_plugins(*, as_json: bool = False) -> int:
    """Print every installed plugin and the names that it adds; return the exit code, 0."""
    registry = load_plugins(options=False)
    rows = [_about(registry, name) for name in registry.loaded]
    rows += [{"name": name, "error": str(problem)} for name, problem in registry.broken.items()]
    print(json.dumps(rows, indent=2) if as_json else "\n".join(line for row in rows for line in _lines(row)))
    return 0


def _about(registry: Registry, name: str) -> dict[str, Any]:
    plugin, added = registry.loaded[name].plugin, registry.loaded[name].added
    names: dict[str, list[str]] = {}
    for component in added.components:
        names.setdefault(component.kind.value, []).append(component.name)
    return {
        "name": name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.module,
        "adds": names,
        "options": added.options_target is not None,
        "commands": list(added.commands),
    }


def _lines(row: Mapping[str, Any]) -> Iterator[str]:
    if "error" in row:
        yield f"{row['name']:<12} cannot be loaded: {row['error']}"
        return
    yield f"{row['name']:<12} {row['distribution']} {row['version']}"
    for kind, names in row["adds"].items():
        yield f"{'':<12} {kind.replace('_', ' ')}: {', '.join(names)}"
    if row["options"]:
        yield f"{'':<12} settings: slime run --help {row['name']}"
    if row["commands"]:
        yield f"{'':<12} command: {', '.join(f'slime {name}' for name in row['commands'])}"


# --- What a plugin adds -----------------------------------------------------------------------------------------------


def show_plugin(name: str, *, as_json: bool = False) -> int:
    """Print what one plugin adds and which hooks it implements; return the exit code, 0.

    Raises:
        PluginError: there is no such plugin, or it does not load.
    """
    registry = load_plugins([name])
    about = _about(registry, short_name(name)) | _declared(registry, short_name(name))
    print(json.dumps(about, indent=2, default=str) if as_json else "\n".join(_page(about)))
    return 0


def _declared(registry: Registry, name: str) -> dict[str, Any]:
    """Return what one plugin declares as JSON-ready values."""
    from slime_core.components.fit import summary_of
    from slime_core.config.settings import plugin_settings
    from slime_core.plugins.lifecycle import Hooks

    added, hooks = registry.loaded[name].added, Hooks(registry.only([name]))
    return {
        "components": [
            {
                "kind": component.kind.value,
                "name": component.name,
                "target": component.place,
                "summary": summary_of(component),
                "traits": {key: _plain(value) for key, value in vars(component.traits).items()},
            }
            for component in added.components
        ],
        "presets": added.preset_values,
        "options": {
            setting.flag: {
                "accepts": setting.accepts,
                "default": setting.default,
                "help": " ".join((setting.info.description or "").split()),
            }
            for setting in plugin_settings(registry.only([name]).options).values()
        },
        "hooks": {hook: _place_of(function) for hook in HOOKS for _, function in hooks.implementations(hook)},
    }


def _plain(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, AbstractSet) else value


def _page(about: Mapping[str, Any]) -> Iterator[str]:
    from slime_core.config.settings import as_words

    yield f"{about['name']}  {about['distribution']} {about['version']}, module {about['module']}"
    for kind in Kind:
        rows = [row for row in about["components"] if row["kind"] == kind.value]
        yield from [f"  {kind.words}"] if rows else []
        for row in rows:
            traits = [
                f"{name}={', '.join(value) or 'nothing' if isinstance(value, list) else value}"
                for name, value in row["traits"].items()
            ]
            yield f"    {row['name']:<28} {row['summary']}".rstrip()
            yield f"    {'':<28} {'; '.join([*traits, row['target']])}"
    yield from _listed("presets", (f"--{key.replace('_', '-')} {value}" for key, value in about["presets"].items()))
    yield from ["  options"] if about["options"] else []
    for flag, option in about["options"].items():
        yield f"    {flag} ({option['accepts']}; default {as_words(option['default'])})"
        yield f"    {'':<28} {option['help']}"
    yield from _listed("commands", (f"slime {name}" for name in about["commands"]))
    yield from _listed("hooks", (f"{hook:<28} {place}" for hook, place in about["hooks"].items()))


def _place_of(function: Any) -> str:
    """Return ``file:line`` of a function."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _listed(title: str, rows: Iterator[str]) -> Iterator[str]:
    lines = [f"    {row}" for row in rows]
    yield from [f"  {title}", *lines] if lines else []


# --- What a run calls -------------------------------------------------------------------------------------------------


def print_trace(words: Sequence[str]) -> int:
    """Print which code the run of these words calls; return the exit code, 0."""
    from slime_core.cli import activation

    if "--help" in words or "-h" in words:
        print(TRACE)
        return 0
    print("\n".join(trace(*activation.resolve(activation.with_leading_config(words)))))
    return 0


def trace(resolved: Resolved, active: ActivePlugins) -> Iterator[str]:
    """Yield the hook implementations and components that the run calls, line by line; starts nothing."""
    from slime_core.components.selection import selected
    from slime_core.config.model_config import architecture_of
    from slime_core.plugins.lifecycle import Hooks

    registry, hooks = active.registry, Hooks(active.registry)
    yield "hooks"
    for hook in HOOKS:
        places = ", ".join(PLACES.get(hook, ())) or "driver, at start"
        calls = hooks.implementations(hook)
        yield f"  {hook:<28} {places}{'' if calls else '  (no plugin)'}"
        yield from (f"    {number}. {_call(*call)}" for number, call in enumerate(calls, start=1))
    yield from ["", "components"]
    architecture = architecture_of(resolved.config.model.hf_checkpoint) or ""
    used = list(selected(resolved.config, registry, trains=True, architecture=architecture))
    for entry in used:
        yield f"  {entry.kind.words} {entry.component.name}, {because(entry, resolved)}"
        yield f"    {entry.plugin}: {entry.component.place}"
        yield from _functions(active.functions.get(entry.plugin.name, {}).get(entry.component.name, ()))
    named = {(entry.plugin.name, entry.component.name) for entry in used}
    options = [(plugin, name, code) for plugin, entries in active.functions.items() for name, code in entries.items()]
    others = [function for plugin, name, code in options if (plugin, name) not in named for function in code]
    yield from ["", "functions that other settings name by path", *_functions(others)] if others else []


def _call(plugin: str, function: Callable[..., Any]) -> str:
    return f"{plugin}  {_place_of(function)}"


def because(entry: Selected, resolved: Resolved) -> str:
    """Return why the component is used: a flag, a line of a file, a preset, a default, or another component."""
    from slime_core.config.load import DEFAULT

    source = resolved.provenance.get(entry.by)
    if source is None:
        return f"by {entry.by}"
    return f"by {entry.by} ({source})" if source != DEFAULT else f"by default of {entry.by}"


def _functions(sources: Sequence[FunctionSource]) -> Iterator[str]:
    for source in sources:
        yield f"    {source}  ({source.code.distribution} {source.code.version})"
