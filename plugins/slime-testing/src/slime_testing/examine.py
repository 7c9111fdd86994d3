"""Examines one plugin in a separate process, because importing it may hang, crash or exit.

Run as ``python -m slime_testing.examine RESULTS``, with the plugin on stdin as JSON. Each check writes a line before
it starts and one when it is done, so that the waiting process can name the check that was running when this one died.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from slime_core import boundary
from slime_core.errors import PluginError
from slime_testing import conformance
from slime_testing.conformance import Finding
from slime_testing.harness import ActivePlugin, Plugin, Source, activate, import_plugin
from slime_testing.verdicts import Verdict, fails, ok, skipped, warns

__all__ = ["STARTED", "pack", "unpack"]

STARTED = "started"
"""Key of a line that names the check that has started."""

COMPAT = "compat"
"""Name of slime-compat's plugin, whose components only call functions that a run names by path."""

HOOKS = "lifecycle hooks"

HEAVY = ("torch", "ray", "megatron", "sglang", "transformers", "numpy", "pandas", "aiohttp")
"""Packages that a plugin's module should not import: every ``slime`` command imports every installed plugin."""

Write = Callable[[dict[str, str]], None]


def pack(plugin: Plugin) -> str:
    """Convert the plugin to one line, with an absolute path for a file; :func:`unpack` is the inverse."""
    values = asdict(plugin) | {"content": base64.b64encode(plugin.content).decode(), "neighbours": ()}
    if plugin.source is Source.FILE:
        values["distribution"] = os.path.abspath(plugin.distribution)
    return json.dumps(values)


def unpack(line: str) -> Plugin:
    """Convert a line of :func:`pack` back to the plugin."""
    values = json.loads(line)
    values |= {"source": Source(values["source"]), "content": base64.b64decode(values["content"]), "neighbours": ()}
    return Plugin(**values)


def main(results: Path, plugin: Plugin) -> None:
    """Examine the plugin and write the results."""
    with results.open("a", encoding="utf-8") as file:

        def write(row: dict[str, str]) -> None:
            print(json.dumps(row), file=file, flush=True)

        _examine(plugin, write)


def _examine(plugin: Plugin, write: Write) -> None:
    write({STARTED: "import"})
    verdict = _import(plugin)
    write(verdict.as_row())
    if verdict.status == "FAILED":
        return
    write({STARTED: "registration"})
    active = _attempt("registration", lambda: activate(plugin), write)
    if isinstance(active, ActivePlugin):
        _examine_added(active, write)


def _examine_added(active: ActivePlugin, write: Write) -> None:
    """Check every component against the contract and the suite of its kind, and the lifecycle hooks."""
    plugin = active.plugin
    tests = plugin.name != COMPAT
    for component in active.components:
        check = f"{component.kind.words} {component.name}"
        write({STARTED: check})
        if _attempt(check, partial(active.load, component.kind, component.name), write) and tests:
            test = partial(conformance.check_component, component.name, kind=component.kind, plugin=plugin)
            _test(f"{check}, properties", plugin, test, write)
    if not tests:
        reason = "its components call functions that a run names by path"
        write(skipped("properties", reason).as_row())
    elif active.lifecycle:
        _test(HOOKS, plugin, partial(conformance.check_lifecycle, plugin), write)


def _test(check: str, plugin: Plugin, properties: Callable[[], Sequence[Finding]], write: Write) -> None:
    write({STARTED: check})
    try:
        with boundary(plugin, f"testing {check}"):
            findings = properties()
    except PluginError as failure:
        write(fails(check, str(failure)).as_row())
        return
    verdict = skipped if all(finding.skipped for finding in findings) else fails
    text = "\n".join(f"{finding.property}: {finding.message}" for finding in findings)
    write((verdict(check, text) if findings else ok(check)).as_row())


def _import(plugin: Plugin) -> Verdict:
    """Import the plugin's module and measure what that loads."""
    before = set(sys.modules)
    try:
        import_plugin(plugin)
    except PluginError as failure:
        return fails("import", str(failure))
    loaded = sys.modules.keys() - before
    if heavy := [name for name in HEAVY if name in loaded]:
        advice = "every slime command waits for that; import it in the module of the target"
        return warns("import", f"importing {plugin.module} loads {', '.join(heavy)}: {advice}")
    return ok("import", f"loads {len(loaded)} modules")


def _attempt(check: str, action: Callable[[], Any], write: Write) -> Any:
    """Run ``action`` and write its verdict; return its result, or None if it failed."""
    try:
        result = action()
    except PluginError as failure:
        write(fails(check, str(failure)).as_row())
        return None
    write(ok(check).as_row())
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]), unpack(sys.stdin.read()))
