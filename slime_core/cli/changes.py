"""What a resume does where plugins are no longer those that wrote the checkpoint: it refuses, unless it is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from slime_core.checkpoint.folder import Checkpoint
from slime_core.errors import ConfigError, ManifestMismatch
from slime_core.plugins.manifest import Difference, Manifest, PluginChange, table

__all__ = ["continued"]


def continued(manifest: Manifest, resume: Checkpoint | None, *, allowed: bool) -> Manifest:
    """The manifest of a run that goes on from ``resume``: with the changes that were allowed until now, and this one.

    A change of the core counts like that of any plugin: it may change what a step computes.

    Arguments:
        manifest: of the plugins that are active now.
        resume: what the run starts from; None: from the beginning.
        allowed: go on with other plugins, and say so.

    Raises:
        ManifestMismatch: something differs and ``allowed`` is False; with a table.
        ConfigError: ``allowed`` where nothing is resumed.
    """
    if resume is None:
        if allowed:
            raise ConfigError(
                "allow_plugin_change = true, and nothing is resumed; give --load RUN as well, or leave it out."
            )
        return manifest
    before = Manifest.from_json(json.dumps(resume.state.plugins)) if resume.state.plugins else Manifest(())
    found = before.differences(manifest)
    if not found:
        return replace(manifest, changes=before.changes)
    if not allowed:
        raise ManifestMismatch(
            f"{resume.path} was written with other plugins than would run now:\n{_table(resume, found)}\n"
            "Install what it was written with, or go on with what is here: --allow-plugin-change, which is recorded."
        )
    print(
        f"warning: --allow-plugin-change: {resume.path.name} was written with other plugins:\n{_table(resume, found)}",
        file=sys.stderr,
        flush=True,
    )
    change = PluginChange(resume.state.step, tuple(map(_line, found)))
    return replace(manifest, changes=(*before.changes, change))


def _table(resume: Checkpoint, found: Sequence[Difference]) -> str:
    return table([one.row for one in found], head=("plugin", resume.path.name, "now", "differs in"))


def _line(found: Difference) -> str:
    return f"{found.plugin}: {found.wanted} -> {found.found} ({found.what})"
