"""``slime plugins list`` and ``slime plugins show NAME``: what is installed, and what one plugin offers.

``list`` reads metadata and imports no plugin, so that no plugin can break it. ``show`` imports the one it is asked for.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from slime_core.cli import scaffold
from slime_core.cli.lock import add_lock, add_verify
from slime_core.errors import PluginError
from slime_core.plugins.discovery import (
    ARCHITECTURE_GROUP,
    CORE,
    PATHS,
    PluginIdentity,
    PluginSource,
    installed,
    resolve,
)

__all__ = ["add_commands", "list_plugins", "show_plugin"]


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plugins`` with ``list`` and ``show``; the chosen one is ``arguments.handler(arguments) -> exit code``."""
    commands = subparsers.add_parser("plugins", help="what is installed, and what a plugin offers").add_subparsers(
        dest="plugins_command", required=True
    )
    listing = commands.add_parser("list", help="installed plugins, from metadata alone")
    listing.add_argument("--json", action="store_true", help="print a JSON list")
    listing.set_defaults(handler=lambda arguments: list_plugins(as_json=arguments.json))
    scaffold.add_command(commands)
    add_lock(commands)
    add_verify(commands)
    showing = commands.add_parser("show", help="the components, presets and options of one plugin")
    showing.add_argument("name", metavar="NAME", help="an installed plugin, ./file.py or package.module")
    showing.add_argument("--json", action="store_true", help="print a JSON object")
    showing.set_defaults(handler=lambda arguments: show_plugin(arguments.name, as_json=arguments.json))
    checking = commands.add_parser("check", help="whether plugins are sound, each tried in a process of its own")
    checking.add_argument("names", metavar="NAME", nargs="*", help="plugins, ./file.py or package.module; none: all")
    checking.add_argument(
        "--timeout-s", type=float, default=120.0, metavar="S", help="limit for one check of a plugin [120]"
    )
    checking.add_argument("--json", action="store_true", help="print a JSON list")
    checking.set_defaults(handler=_check)
    # Takes the flags of slime run, which argparse does not know: the command line looks for it first.
    commands.add_parser("trace", help="which code a run calls, hook by hook; takes what slime run takes")


def _check(arguments: argparse.Namespace) -> int:
    from slime_core.cli.checkup import check_plugins

    return check_plugins(arguments.names, timeout_s=arguments.timeout_s, as_json=arguments.json)


def list_plugins(*, as_json: bool = False) -> int:
    """Print every installed plugin; imports none. Returns the exit code, 0."""
    plugins = installed()
    counts = Counter(plugin.name for plugin in plugins)
    rows = [{**_metadata(plugin), "conflict": counts[plugin.name] > 1} for plugin in plugins]
    print(json.dumps(rows, indent=2) if as_json else "\n".join(line for row in rows for line in _lines(row)))
    return 0


def show_plugin(name: str, *, as_json: bool = False) -> int:
    """Print what one plugin offers. Returns the exit code: 0, or 2 where it is installed but does not load.

    Raises:
        PluginError: there is no such plugin, or two claim the name.
    """
    # Here, because it pulls in pydantic, which listing does not need.
    from slime_core.cli.describe import declared, page
    from slime_core.plugins.registration import register

    source = _source(name)
    found: dict[str, Any] = {**_metadata(source.plugin), "error": None}
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
    ours = {plugin.name: plugin for plugin in (CORE, PATHS)}
    return PluginSource(ours[name]) if name in ours else resolve(name)


def _metadata(plugin: PluginIdentity) -> dict[str, Any]:
    """What is known of a plugin without importing it."""
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
        "architectures": _architectures(plugin),
    }


def _architectures(plugin: PluginIdentity) -> list[str]:
    """What the plugin's own distribution claims for it."""
    points = metadata.entry_points(group=ARCHITECTURE_GROUP)
    own = [point for point in points if point.value == plugin.name and point.dist is not None]
    return sorted(point.name for point in own if point.dist and point.dist.name == plugin.distribution)


def _lines(row: dict[str, Any]) -> Iterator[str]:
    yield f"{row['name']:<16} {row['distribution']:<20} {row['version']:<12} {row['entry_point']}"
    if row.get("conflict"):
        yield f"{'':<16} name claimed twice: uninstall one"
    if row["architectures"]:
        yield f"{'':<16} for checkpoints of {', '.join(row['architectures'])}"


def _broken(error: str) -> Iterator[str]:
    yield "  does not load:"
    yield from (f"    {line}" for line in error.splitlines())
