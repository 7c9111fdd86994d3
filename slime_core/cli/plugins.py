"""``slime plugins list`` and ``slime plugins show NAME``: what is installed, and what one plugin offers.

``list`` reads metadata and imports no plugin, so that no plugin can break it. ``show`` imports the one it is asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from slime_core.cli import scaffold
from slime_core.cli.lock import add_lock, add_verify
from slime_core.errors import PluginError
from slime_core.plugins.component import Component, Kind
from slime_core.plugins.discovery import CORE, PluginIdentity, PluginSource, installed, resolve

if TYPE_CHECKING:
    from slime_core.plugins.registration import Registry

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
    checking.add_argument("--timeout-s", type=float, default=120.0, metavar="S", help="limit for one plugin [120]")
    checking.add_argument("--json", action="store_true", help="print a JSON list")
    checking.set_defaults(handler=_check)


def _check(arguments: argparse.Namespace) -> int:
    from slime_core.cli.checkup import check_plugins

    return check_plugins(arguments.names, timeout_s=arguments.timeout_s, as_json=arguments.json)


def list_plugins(*, as_json: bool = False) -> int:
    """Print every installed plugin; imports none. Returns the exit code, 0."""
    plugins = installed()
    counts = Counter(plugin.name for plugin in plugins)
    rows = [{**_identity(plugin), "conflict": counts[plugin.name] > 1} for plugin in plugins]
    print(json.dumps(rows, indent=2) if as_json else "\n".join(map(_line, rows)))
    return 0


def show_plugin(name: str, *, as_json: bool = False) -> int:
    """Print what one plugin offers. Returns the exit code: 0, or 2 where it is installed but does not load.

    Raises:
        PluginError: there is no such plugin, or two claim the name.
    """
    # Here, because it pulls in pydantic, which listing does not need.
    from slime_core.plugins.registration import register

    source = PluginSource(CORE) if name == CORE.name else resolve(name)
    try:
        registry = register([source])
    except PluginError as failure:
        print(f"{source.plugin}\n  does not load:", file=sys.stderr)
        print(failure, file=sys.stderr)
        return failure.exit_code
    found = _description(source.plugin, registry)
    print(json.dumps(found, indent=2, default=str) if as_json else _page(found))
    return 0


def _identity(plugin: PluginIdentity) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
    }


def _line(row: dict[str, Any]) -> str:
    conflict = "  (claimed twice: uninstall one)" if row["conflict"] else ""
    return f"{row['name']:<16} {row['distribution']:<20} {row['version']:<12} {row['entry_point']}{conflict}"


def _description(plugin: PluginIdentity, registry: Registry) -> dict[str, Any]:
    components = [(kind, registry.find(kind, name)) for kind in Kind for name in registry.names(kind)]
    return {
        **_identity(plugin),
        "components": [_component(kind, component) for kind, component in components],
        "presets": {key: value for key, (value, _) in registry.presets.items()},
        "options": {
            f"--{plugin.name}.{name.replace('_', '-')}": {"default": field.default, "help": field.description}
            for options in registry.options.values()
            for name, field in options.model_fields.items()
        },
    }


def _component(kind: Kind, component: Component) -> dict[str, str]:
    return {"kind": kind.value, "name": component.name, "target": component.target, "summary": component.summary}


def _page(found: dict[str, Any]) -> str:
    lines = [_line({**found, "conflict": False})]
    lines += [f"  {row['kind'].replace('_', ' ')} {row['name']}: {row['summary']}" for row in found["components"]]
    lines += [f"  sets --{key.replace('_', '-')} {value}" for key, value in found["presets"].items()]
    lines += [f"  {flag} (default {row['default']}): {row['help']}" for flag, row in found["options"].items()]
    return "\n".join(lines)
