"""``slime plugins list`` and ``slime plugins show NAME``: what is installed, and what one plugin offers.

``list`` reads metadata and imports no plugin, so that no plugin can break it. ``show`` imports the one it is asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from slime_core.cli.commands import Command
from slime_core.cli.lock import add_lock, add_verify
from slime_core.errors import PluginError
from slime_core.plugins.bounds import check_bounds
from slime_core.plugins.declared import ARCHITECTURE_GROUP, Declared, scan
from slime_core.plugins.discovery import (
    CORE,
    PluginIdentity,
    PluginSource,
    activated_by,
    claims_for,
    few_ways,
    installed,
    required_by,
    resolve,
)

__all__ = ["add_commands", "list_plugins", "show_plugin"]


def add_commands(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], *, added: Sequence[Command] = ()
) -> None:
    """Add ``plugins`` with ``list`` and ``show``; the chosen one is ``arguments.handler(arguments) -> exit code``.

    Arguments:
        added: commands of installed distributions, for the help page; they are run before argparse is asked.
    """
    commands = subparsers.add_parser("plugins", help="what is installed, and what a plugin offers").add_subparsers(
        dest="plugins_command", required=True
    )
    listing = commands.add_parser("list", help="installed plugins, from metadata alone")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    listing.set_defaults(handler=lambda arguments: list_plugins(as_json=arguments.json))
    add_lock(commands)
    add_verify(commands)
    showing = commands.add_parser("show", help="the components, presets and options of one plugin")
    showing.add_argument("name", metavar="NAME", help="an installed plugin, ./file.py or package.module")
    showing.add_argument("--json", action="store_true", help="print a JSON object")
    showing.set_defaults(handler=lambda arguments: show_plugin(arguments.name, as_json=arguments.json))
    # Takes the flags of slime run, which argparse does not know: the command line looks for it first.
    commands.add_parser("trace", help="which code a run calls, hook by hook; takes what slime run takes")
    for command in added:
        if command.words[0] == "plugins" and command.mistake is None:
            commands.add_parser(command.words[1], help=f"from {command.distribution} {command.version}")


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
    # Here, because it pulls in pydantic, which listing does not need.
    from slime_core.cli.describe import declared, page
    from slime_core.plugins.registry import register

    source = _source(name)
    found: dict[str, Any] = {**_metadata(source.plugin, scan()), "error": None}
    try:
        found |= declared(source.plugin, register([source]))
    except PluginError as failure:
        found["error"] = str(failure)
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        print("\n".join([*_lines(found), *(page(found) if found["error"] is None else _broken(found["error"]))]))
    return 0 if found["error"] is None else PluginError.exit_code


def _source(name: str) -> PluginSource:
    return PluginSource(CORE) if name == CORE.name else resolve(name)


def _metadata(plugin: PluginIdentity, found: Declared) -> dict[str, Any]:
    """What is known of a plugin without importing it."""
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
    told = []
    if row.get("conflict"):
        told.append(f"name claimed twice: write {row['distribution']}:{row['name']}, or uninstall what is not meant")
    if row["unfit"]:
        told += [f"does not fit: {row['unfit'].partition(': ')[2].splitlines()[0]}"]
    if row["architectures"]:
        told.append(f"for checkpoints of {', '.join(row['architectures'])}")
    if row["activated_by"]:
        told.append(f"active with {', or '.join(few_ways(row['activated_by'], row['name']))}")
    if row["requires"]:
        told.append(f"brings {', '.join(row['requires'])} with it")
    yield from (f"{'':<16} {line}" for line in told)


def _broken(error: str) -> Iterator[str]:
    yield "  does not load:"
    yield from (f"    {line}" for line in error.splitlines())
