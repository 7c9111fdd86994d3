"""``slime plugins list``, ``show``, ``trace``, ``lock`` and ``verify``: what is installed, what a plugin declares,
which code a run calls, and which plugins it uses.

``list`` reads metadata and imports no plugin, so that no plugin can break it. ``show`` imports the named one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginError, UserError
from slime_core.plugins.component import Component, Kind
from slime_core.plugins.contracts import Place
from slime_core.plugins.discovery import (
    ARCHITECTURE_GROUP,
    CORE,
    Declared,
    PluginIdentity,
    PluginSource,
    activated_by,
    check_bounds,
    claims_for,
    installed,
    required_by,
    resolve,
    scan,
)
from slime_core.plugins.hooks import LIFECYCLE_HOOKS

if TYPE_CHECKING:
    from slime_core.cli.main import Command
    from slime_core.config.load import Resolved
    from slime_core.plugins.activation import ActivePlugins
    from slime_core.plugins.loading import FunctionSource
    from slime_core.plugins.registry import Implementation, Registry
    from slime_core.plugins.selection import Selected

TRACE = """\
slime plugins trace CONFIG.toml [flags of slime run]
slime plugins trace [flags of slime run]

Says which functions the run would call for each hook, in order, and which components it would use, and why."""

LOCK = """\
slime plugins lock [CONFIG.toml] [flags of slime run]

Writes the plugins that the run would use to slime.lock, or the file of --lock-file, for slime plugins verify and
slime run --locked."""


def execute(argv: Sequence[str], *, others: Sequence[Command] = ()) -> int:
    """Run one command; returns its exit code.

    Arguments:
        others: commands of installed distributions, for the help page.
    """
    if argv[:1] == ["trace"]:
        return print_trace(argv[1:])
    if argv[:1] == ["lock"]:
        return write_lock(argv[1:])
    arguments = parser(others).parse_args(argv)
    return int(arguments.handler(arguments))


def parser(others: Sequence[Command] = ()) -> argparse.ArgumentParser:
    """The parser of ``list``, ``show`` and ``verify``; its help names all commands."""
    found = argparse.ArgumentParser(prog="slime plugins", allow_abbrev=False)
    commands = found.add_subparsers(dest="plugins_command", required=True)
    listing = commands.add_parser("list", help="installed plugins, from metadata alone")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    listing.set_defaults(handler=lambda arguments: list_plugins(as_json=arguments.json))
    showing = commands.add_parser("show", help="the components, presets and options of one plugin")
    showing.add_argument("name", metavar="NAME", help="an installed plugin, ./file.py or package.module")
    showing.add_argument("--json", action="store_true", help="print a JSON object")
    showing.set_defaults(handler=lambda arguments: show_plugin(arguments.name, as_json=arguments.json))
    verifying = commands.add_parser("verify", help="compare slime.lock with what is installed")
    which = verifying.add_mutually_exclusive_group()
    which.add_argument("file", metavar="FILE", nargs="?", type=Path, help="the lock; default: slime.lock")
    which.add_argument("--lock-file", metavar="FILE", type=Path, help="the same, as slime run calls it")
    verifying.set_defaults(handler=lambda arguments: verify(arguments.file or arguments.lock_file))
    # Their words are those of slime run, which argparse does not know.
    commands.add_parser("trace", help="which code a run calls, hook by hook; takes what slime run takes")
    commands.add_parser("lock", help="write the plugins of a run to slime.lock; takes what slime run takes")
    for command in others:
        if command.words[0] == "plugins":
            commands.add_parser(command.words[1], help=f"from {command.distribution} {command.version}")
    return found


# --- What is installed ------------------------------------------------------------------------------------------------


def list_plugins(*, as_json: bool = False) -> int:
    """Print every installed plugin; imports none. Returns the exit code, 0."""
    found = scan()
    plugins = installed(found)
    counts = Counter(plugin.name for plugin in plugins)
    rows = [{**_metadata(plugin, found), "conflict": counts[plugin.name] > 1} for plugin in plugins]
    print(json.dumps(rows, indent=2) if as_json else "\n".join(line for row in rows for line in _lines(row)))
    for problem in found.unreadable:
        print(f"unreadable: {problem}; reinstall it, or remove it", file=sys.stderr)
    return 0


def show_plugin(name: str, *, as_json: bool = False) -> int:
    """Print what one plugin offers. Returns the exit code: 0, or 2 where it is installed but does not load.

    Raises:
        PluginError: there is no such plugin, or two claim the name.
    """
    from slime_core.plugins.registry import register

    source = PluginSource(CORE) if name == CORE.name else resolve(name)
    found: dict[str, Any] = {**_metadata(source.plugin, scan()), "error": None}
    try:
        found |= _declarations(register([source]))
    except PluginError as failure:
        found["error"] = str(failure)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print("\n".join([*_lines(found), *_page(found)]))
    return 0 if found["error"] is None else PluginError.exit_code


def _metadata(plugin: PluginIdentity, found: Declared) -> dict[str, Any]:
    """The metadata of a plugin, read without importing it."""
    claims = claims_for(plugin, found)
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
        "architectures": [claim.name for claim in claims.get(ARCHITECTURE_GROUP, ())],
        "claims": {group: [claim.name for claim in own] for group, own in claims.items()},
        "activated_by": list(activated_by(claims)),
        "requires": required_by(plugin, found),
        "unfit": _unfit(plugin),
    }


def _unfit(plugin: PluginIdentity) -> str | None:
    """Why the plugin's own bounds leave out this version of the core; None: they do not."""
    try:
        check_bounds(plugin, {CORE.distribution: CORE.version})
    except PluginError as mistake:
        return str(mistake)
    return None


def _lines(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['name']:<16} {row['distribution']:<20} {row['version']:<12} {row['entry_point']}"
    notes = []
    if row.get("conflict"):
        notes.append(f"name claimed twice: write {row['distribution']}:{row['name']}, or uninstall what is not meant")
    if row["unfit"]:
        notes += [f"does not fit: {row['unfit'].partition(': ')[2].splitlines()[0]}"]
    if row["architectures"]:
        notes.append(f"for checkpoints of {', '.join(row['architectures'])}")
    if row["activated_by"]:
        notes.append(f"active with {', or '.join(row['activated_by'])}")
    if row["requires"]:
        notes.append(f"brings {', '.join(row['requires'])} with it")
    yield from (f"{'':<16} {line}" for line in notes)


# --- What a plugin declares -------------------------------------------------------------------------------------------


def _declarations(registry: Registry) -> dict[str, Any]:
    """The declarations of one plugin, as JSON-ready values.

    Arguments:
        registry: of this plugin alone.
    """
    from slime_core.config.settings import plugin_settings

    components = [(kind, registry.find(kind, name)) for kind in Kind for name in registry.names(kind)]
    return {
        "components": [
            {
                "kind": kind.value,
                "name": component.name,
                "target": component.target,
                "summary": component.summary,
                "traits": _traits(component),
            }
            for kind, component in components
        ],
        "presets": {key: value for key, (value, _) in registry.presets.items()},
        "options": {
            setting.flag: {
                "accepts": setting.accepts,
                "default": setting.default,
                "help": " ".join((setting.info.description or "").split()),
            }
            for setting in plugin_settings(registry.options).values()
        },
        "hooks": [
            {
                "hook": hook,
                "places": [place.value for place in LIFECYCLE_HOOKS[hook].places],
                "policy": "observer" if one.observes else LIFECYCLE_HOOKS[hook].policy,
                "at": _place_of(one.function),
            }
            for hook, found in registry.lifecycle.items()
            for one in found
        ],
    }


def _page(found: Mapping[str, Any]) -> Iterator[str]:
    """The declarations, line by line, or why the plugin does not load."""
    from slime_core.config.settings import as_words

    if found["error"] is not None:
        yield "  does not load:"
        yield from (f"    {line}" for line in found["error"].splitlines())
        return
    for kind in Kind:
        own = [row for row in found["components"] if row["kind"] == kind.value]
        yield from [f"  {kind.words}"] if own else []
        for row in own:
            words = [
                f"{name} {', '.join(value) or 'nothing' if isinstance(value, list) else value}; "
                for name, value in row["traits"].items()
            ]
            yield f"    {row['name']:<28} {row['summary']}".rstrip()
            yield f"    {'':<28} {''.join(words)}{row['target']}"
    yield from _listed("presets", (f"--{key.replace('_', '-')} {value}" for key, value in found["presets"].items()))
    yield from ["  options"] if found["options"] else []
    for flag, option in found["options"].items():
        yield f"    {flag} ({option['accepts']}; default {as_words(option['default'])})"
        yield f"    {'':<28} {option['help']}"
    yield from _listed(
        "hooks of the run's life",
        (f"{row['hook']:<28} {_where_called(row['hook'], row['policy'])}; {row['at']}" for row in found["hooks"]),
    )


def _where_called(hook: str, policy: str = "") -> str:
    """The processes that call a hook of the run's life, and what its failure means.

    Arguments:
        policy: of one implementation, which may be marked as an observer; empty: of the hook.
    """
    lifecycle = LIFECYCLE_HOOKS[hook]
    places = ["every rank" if place is Place.RANK else place.value for place in lifecycle.places]
    return f"on {', '.join(places)}; {policy or lifecycle.policy}"


def _place_of(function: Any) -> str:
    """``file:line`` of a function."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _listed(title: str, rows: Iterator[str]) -> Iterator[str]:
    lines = [f"    {row}" for row in rows]
    yield from [f"  {title}", *lines] if lines else []


def _traits(component: Component) -> dict[str, Any]:
    assert component.traits is not None  # registration fills them in
    found = asdict(component.traits)
    return {name: sorted(value) if isinstance(value, AbstractSet) else value for name, value in found.items()}


# --- What a run calls -------------------------------------------------------------------------------------------------


def print_trace(words: Sequence[str]) -> int:
    """Print which code the run of these words calls; returns the exit code, 0."""
    from slime_core.cli import activation

    if "--help" in words or "-h" in words:
        print(TRACE)
        return 0
    print("\n".join(trace(*activation.resolve(activation.with_leading_config(words)))))
    return 0


def trace(resolved: Resolved, active: ActivePlugins) -> Iterator[str]:
    """The components and hooks that the run calls, line by line; nothing of it is started."""
    from slime_core.config.model_config import architecture_of
    from slime_core.plugins.selection import selected

    registry = active.registry
    yield "once, at start"
    for hook, found in registry.declarations.items():
        yield from _calls_of(hook, "", found)
    yield ""
    yield "while it runs"
    for hook, found in registry.lifecycle.items():
        yield from _calls_of(hook, _where_called(hook), found)
    yield ""
    yield "components"
    architecture = architecture_of(resolved.config.model.hf_checkpoint) or ""
    used = list(selected(resolved.config, registry, trains=True, architecture=architecture))
    for one in used:
        yield f"  {one.kind.words} {one.component.name}, {because(one, resolved)}"
        yield f"    {one.plugin.name} ({one.plugin.distribution} {one.plugin.version}): {one.component.target}"
        yield from _functions(active.functions.get(one.plugin.name, {}).get(one.component.name, ()))
    named = {(one.plugin.name, one.component.name) for one in used}
    options = [(plugin, option, found) for plugin, own in active.functions.items() for option, found in own.items()]
    others = [function for plugin, option, found in options if (plugin, option) not in named for function in found]
    yield from ["", "functions that other settings name by path", *_functions(others)] if others else []


def because(one: Selected, resolved: Resolved) -> str:
    """The selection of the component: a flag, a line of a file, a preset, a default, or another component."""
    from slime_core.config.load import DEFAULT

    source = resolved.provenance.get(one.by)
    if source is None:
        return f"by {one.by}"
    return f"by {one.by} ({source})" if source != DEFAULT else f"by default of {one.by}"


def _calls_of(hook: str, arguments: str, found: Sequence[Implementation]) -> Iterator[str]:
    yield f"  {hook:<40} {arguments}{'' if found else '  (no plugin)'}".rstrip()
    for number, one in enumerate(found, start=1):
        plugin = one.plugin
        marked = "  observer" if one.observes else ""
        yield f"    {number}. {plugin.name} ({plugin.distribution} {plugin.version})  {_place_of(one.function)}{marked}"


def _functions(found: Sequence[FunctionSource]) -> Iterator[str]:
    for function in found:
        code = function.code.plugin
        yield f"    {function}  ({code.distribution} {code.version})"


# --- The lock of a run ------------------------------------------------------------------------------------------------


def write_lock(words: Sequence[str]) -> int:
    """Write the lock that ``words`` ask for; returns the exit code, 0.

    Raises:
        UserError: a mistake in a setting, or a plugin that cannot be found or loaded.
    """
    if "--help" in words or "-h" in words:
        print(LOCK)
        return 0
    from slime_core.cli import activation
    from slime_core.config.load import load, peek
    from slime_core.plugins.manifest import LOCK_FILE, Lock, listed
    from slime_core.track.record import write_atomically

    argv = activation.with_settings_of_loaded_run(activation.with_leading_config(words))
    active = activation.activate_named(peek(argv), is_locked=False)
    path = load(argv, **active.for_settings, check_rules=False).config.run.lock_file or LOCK_FILE
    lock = Lock.of(active.manifest, path)
    try:
        write_atomically(path, lock.to_toml())
    except OSError as problem:
        raise UserError(f"{path} cannot be written: {problem}. Give another path with --lock-file.") from None
    print(f"{path}: {listed(lock.entries)}")
    return 0


def verify(file: Path | None = None) -> int:
    """Print what is installed otherwise than the lock says; returns the exit code: 0 where nothing is, else 1.

    Raises:
        PluginError: there is no such lock, or the file is none.
    """
    from slime_core.plugins.manifest import LOCK_FILE, read_lock

    lock = read_lock(file or LOCK_FILE)
    found = lock.verify()
    total = len(lock.entries)
    if found:
        print(f"{lock.path}: {len(found)} of {total} plugins are not here as it says:\n{lock.difference_text(found)}")
        return 1
    print(f"{lock.path}: all {total} plugins are here as it says")
    return 0
