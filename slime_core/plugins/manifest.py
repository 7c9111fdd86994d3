"""What a run's plugins are, down to the content of their files, so that every process runs the same code or refuses.

The driver writes the manifest and hands it to every actor as a constructor argument; the actor calls :func:`attach`.
Code never crosses, except a single-file plugin, whose bytes are in the manifest.
"""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import slime_core
from slime_core.errors import ManifestMismatch, PluginError
from slime_core.plugins.content import NO_FILES, digest, editable_source, file_digests
from slime_core.plugins.differences import Difference, compare, differences, told
from slime_core.plugins.discovery import CORE, PluginIdentity, PluginSource, Source, local_file
from slime_core.plugins.entries import SHOWN, ManifestEntry
from slime_core.plugins.registration import Registry, register

__all__ = [
    "Manifest",
    "ManifestEntry",
    "PluginChange",
    "attach",
    "entry_here",
    "entry_of",
    "mismatches",
    "record",
    "source_of",
]


@dataclass(frozen=True, slots=True)
class PluginChange:
    """A resume with other plugins than before, which the user allowed.

    Example: ``PluginChange(40, ("grpo: slime-grpo 0.1.0 1a2b3c4d5e6f -> slime-grpo 0.1.1 99aabbccddee (version)",))``.

    Arguments:
        step: of the checkpoint that was resumed.
        lines: one for each plugin that differed.
    """

    step: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The plugins of a run, ``core`` first, then in the order in which they were named.

    Arguments:
        functions: code that options name by path; ``plugin`` is the setting, ``distribution`` the path.
        changes: resumes that went on with other plugins, oldest first.
    """

    entries: tuple[ManifestEntry, ...]
    functions: tuple[ManifestEntry, ...] = ()
    changes: tuple[PluginChange, ...] = ()

    def differences(self, other: Manifest) -> list[Difference]:
        """What ``other`` has otherwise; the order of plugins, and changes of the past, do not count."""
        return [*differences(self.entries, other.entries), *differences(self.functions, other.functions)]

    def to_json(self) -> str:
        """The manifest as text; :meth:`from_json` reads it back to an equal manifest."""
        found: dict[str, Any] = {"plugins": list(map(_row, self.entries))}
        if self.functions:
            found["functions"] = list(map(_row, self.functions))
        if self.changes:
            found["changes"] = list(map(asdict, self.changes))
        return json.dumps(found, indent=2)

    @staticmethod
    def from_json(text: str) -> Manifest:
        """The manifest that :meth:`to_json` wrote.

        Raises:
            PluginError: the text is not a manifest.
        """
        try:
            found = json.loads(text)
            changes = tuple(PluginChange(row["step"], tuple(row["lines"])) for row in found.get("changes", []))
            return Manifest(_entries(found["plugins"]), _entries(found.get("functions", [])), changes)
        except (ValueError, KeyError, TypeError, AttributeError) as mistake:
            found = f"not a plugin manifest ({type(mistake).__name__}: {mistake})"
            raise PluginError(f"{found}; give the text that Manifest.to_json wrote") from mistake


def record(
    sources: Sequence[PluginSource],
    functions: Sequence[PluginSource] = (),
    *,
    needs: Mapping[str, str] | None = None,
    claimed: Collection[str] = (),
) -> Manifest:
    """The manifest of these plugins, and of code that is named by path, as their files are now.

    Arguments:
        needs: plugin -> why it is here, of those that the run does not name.
        claimed: of these, those that are here for a name that they claim.

    Raises:
        PluginError: the files of a plugin cannot be found.
    """
    names = [source.plugin.name for source in sources]
    entries = tuple(
        replace(entry_of(source), needed_by=(needs or {}).get(name, ""), claimed=name in claimed)
        for source, name in zip(sources, names, strict=True)
    )
    return Manifest(entries, tuple(map(entry_of, functions)))


def attach(manifest: Manifest) -> Registry:
    """Load exactly the manifest's plugins in this process.

    Raises:
        ManifestMismatch: plugins are missing here, or their version or content differs; a table of all of them with
            this node and both sides.
        PluginError: a plugin fails while it is imported.
    """
    found = mismatches(manifest)
    if found:
        table = told({socket.gethostname(): found})
        raise ManifestMismatch(f"the plugins of this process are not the driver's:\n{table}")
    claimed = {entry.plugin for entry in manifest.entries if entry.claimed}
    return register([source_of(entry) for entry in manifest.entries], claimed=claimed)


def mismatches(manifest: Manifest) -> list[Difference]:
    """What this process has otherwise than ``manifest`` says; imports no plugin."""
    found = [compare(entry, entry_here(entry)) for entry in (*manifest.entries, *manifest.functions)]
    return [difference for difference in found if difference is not None]


def _entries(rows: Sequence[Mapping[str, Any]]) -> tuple[ManifestEntry, ...]:
    entries = tuple(
        ManifestEntry(**{**row, "source": Source(row["source"]), "files": tuple(row.get("files", {}).items())})
        for row in rows
    )
    for one in entries:
        for key in ("plugin", "distribution", "version", "entry_point", "digest"):
            if not (isinstance(found := getattr(one, key), str) and found):
                raise ValueError(f"an entry's {key} is {found!r}")
    return entries


def _row(entry: ManifestEntry) -> dict[str, Any]:
    return {**asdict(entry), "files": dict(entry.files)}


def entry_of(source: PluginSource) -> ManifestEntry:
    """The entry of one plugin, as its files are now.

    Raises:
        PluginError: they cannot be found.
    """
    plugin, files = source.plugin, file_digests(source)
    return ManifestEntry(
        plugin=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        entry_point=plugin.entry_point,
        digest=digest(source, files),
        source=source.source,
        content=base64.b64encode(source.content).decode(),
        editable=source.source is Source.INSTALLED and editable_source(plugin.distribution) is not None,
        files=tuple((name, found[:SHOWN]) for name, found in files.items()),
    )


def entry_here(entry: ManifestEntry) -> ManifestEntry | None:
    """What this process has in place of ``entry``; None: nothing. Of a single file, that is what ``entry`` carries."""
    try:
        source = source_of(entry)
    except metadata.PackageNotFoundError:
        return None
    try:
        return entry_of(source)
    except PluginError:  # its package is not to be found
        is_installed = entry.source is Source.INSTALLED
        return replace(entry, version=source.plugin.version, digest=NO_FILES, files=()) if is_installed else None


def source_of(entry: ManifestEntry) -> PluginSource:
    """The plugin of ``entry`` as this process has it."""
    if entry.source is Source.FILE:
        found = local_file(base64.b64decode(entry.content), path=entry.distribution)
        return replace(found, plugin=replace(found.plugin, name=entry.plugin))
    identity = PluginIdentity(entry.plugin, entry.distribution, _version_here(entry), entry.entry_point)
    return PluginSource(identity, entry.source)


def _version_here(entry: ManifestEntry) -> str:
    if entry.source is Source.MODULE:
        return entry.version
    return slime_core.__version__ if entry.distribution == CORE.distribution else metadata.version(entry.distribution)
