"""Examines one plugin in a separate process, because importing it may hang, crash or exit.

Run as ``python -m slime_testing.examine RESULTS``, with the plugin on stdin as JSON. Each check writes a line before
it starts and one when it is done, so that the waiting process knows which check was running when this one died.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.errors import PluginError
from slime_core.harness import (
    CORE,
    ActivePlugin,
    PluginIdentity,
    PluginSource,
    Source,
    activate,
    boundary,
    check_hooks,
    import_plugin,
)
from slime_testing import conformance
from slime_testing.claims import broken_claims, unclaimed
from slime_testing.conformance import Finding
from slime_testing.verdicts import Verdict, fails, ok, skipped, warns

__all__ = ["STARTED", "pack", "unpack"]

STARTED = "started"
"""Key of a line that names the check that has started."""

COMPAT = "compat"
"""Name of slime-compat's plugin, whose components only call functions that a run names by path."""

LIFE = "hooks of the run's life"

HEAVY = ("torch", "ray", "megatron", "sglang", "transformers", "numpy")

Write = Callable[[dict[str, str]], None]


def pack(source: PluginSource) -> str:
    """Convert the plugin to one line, with an absolute path for a file; :func:`unpack` is the inverse."""
    plugin = source.plugin
    is_file = source.source is Source.FILE
    where = os.path.abspath(plugin.distribution) if is_file else plugin.distribution
    return json.dumps(
        {
            "plugin": [plugin.name, where, plugin.version, plugin.entry_point],
            "source": source.source.value,
            "content": base64.b64encode(source.content).decode(),
        }
    )


def unpack(line: str) -> PluginSource:
    """Convert a line of :func:`pack` back to the plugin."""
    found = json.loads(line)
    content = base64.b64decode(found["content"])
    return PluginSource(PluginIdentity(*found["plugin"]), Source(found["source"]), content)


def main(results: Path, source: PluginSource) -> None:
    """Examine the plugin and write the results."""
    with results.open("a", encoding="utf-8") as file:

        def write(row: dict[str, str]) -> None:
            print(json.dumps(row), file=file, flush=True)

        _examine(source, write)


def _examine(source: PluginSource, write: Write) -> None:
    write({STARTED: "import"})
    holder = _import(source, write)
    if holder is None:
        return
    write({STARTED: "hooks"})
    if not _attempt("hooks", lambda: check_hooks(source.plugin, holder), write):
        return
    write({STARTED: "registration"})
    active = _attempt("registration", lambda: activate(source), write)
    if isinstance(active, ActivePlugin):
        _declared(active, write)


def _declared(active: ActivePlugin, write: Write) -> None:
    """Check every declared component against the contract of its kind."""
    source = active.source
    if source.source is Source.INSTALLED and source.plugin.distribution != CORE.distribution:
        write({STARTED: "claims"})
        write(_claims(active).as_row())
    why_not = _no_properties(source)
    for kind, name in active.offers:
        check = f"{kind.words} {name}"
        write({STARTED: check})
        if _attempt(check, partial(active.load, kind, name), write) and why_not is None:
            write({STARTED: f"{check}, properties"})
            held = partial(conformance.check_component, name, kind=kind, plugin=_as_named(source))
            _hold(f"{check}, properties", source, held, write)
    if why_not is not None:
        write(skipped("properties", why_not).as_row())
    elif active.lifecycle:
        write({STARTED: LIFE})
        _hold(LIFE, source, partial(conformance.check_lifecycle, _as_named(source)), write)


def _claims(active: ActivePlugin) -> Verdict:
    """Compare the claims that activate the plugin with its declarations."""
    if broken := broken_claims(active):
        return fails("claims", "\n".join(broken))
    missing = unclaimed(active)
    return warns("claims", "\n".join(missing)) if missing else ok("claims")


def _no_properties(source: PluginSource) -> str | None:
    """Return the reason why the suites cannot test the plugin; None: they can."""
    if source.plugin.name == COMPAT:
        return "what it does is what the functions do that a run names by path"
    return None


def _hold(check: str, source: PluginSource, properties: Callable[[], Sequence[Finding]], write: Write) -> None:
    try:
        with boundary(source.plugin, f"testing {check}"):
            found = properties()
    except PluginError as failure:
        write(fails(check, str(failure)).as_row())
        return
    verdict = skipped if all(one.skipped for one in found) else fails
    listed = "\n".join(f"{one.property}: {one.message}" for one in found)
    write((verdict(check, listed) if found else ok(check)).as_row())


def _as_named(source: PluginSource) -> str:
    """Return the value of ``--plugin`` for the plugin."""
    plugin = source.plugin
    if source.source is Source.INSTALLED:
        return plugin.name if plugin.distribution == CORE.distribution else f"{plugin.distribution}:{plugin.name}"
    return plugin.distribution if source.source is Source.FILE else plugin.entry_point


def _import(source: PluginSource, write: Write) -> Any:
    before = set(sys.modules)
    try:
        holder = import_plugin(source)
    except PluginError as failure:
        write(fails("import", str(failure)).as_row())
        return None
    loaded = [name for name in HEAVY if name in sys.modules and name not in before]
    if loaded:
        advice = "every command that names the plugin waits for that; import it in the module of the target"
        write(warns("import", f"importing it loads {', '.join(loaded)}: {advice}").as_row())
    else:
        write(ok("import").as_row())
    return holder


def _attempt(check: str, action: Callable[[], Any], write: Write) -> Any:
    """Run ``action`` and write its verdict; return its result (True for None), or None if it failed."""
    try:
        found = action()
    except PluginError as failure:
        write(fails(check, str(failure)).as_row())
        return None
    write(ok(check).as_row())
    return True if found is None else found


if __name__ == "__main__":
    main(Path(sys.argv[1]), unpack(sys.stdin.read()))
