"""The plugins that take part in a run: name, version and one digest of each, compared in every process and on resume.

The driver makes the manifest and passes it to every actor, which calls :func:`attach`. Only single files travel in it.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import NamedTuple

import importlib_metadata as metadata

from slime_core.errors import ManifestMismatch, PluginError, table
from slime_core.plugins.discovery import CORE, Plugin, Source, local_file
from slime_core.plugins.registry import Registry, register
from slime_core.user_code.failures import boundary

MISSING = "-"
"""Shown for a plugin that one side does not have."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One plugin, or one function that an option names by path (``name`` is then the option).

    Arguments:
        name, distribution, version, module: see :class:`~slime_core.plugins.discovery.Plugin`.
        digest: SHA-256 over the names and contents of the files of its package, as hexadecimal.
        content: the bytes of a single file in base64; else empty.
    """

    name: str
    distribution: str
    version: str
    module: str
    digest: str
    source: Source = Source.INSTALLED
    content: str = field(default="", repr=False)

    @staticmethod
    def of(plugin: Plugin) -> ManifestEntry:
        """Return the entry of a plugin, as its files are now.

        Raises:
            PluginError: the files cannot be found or read.
        """
        content = base64.b64encode(plugin.content).decode()
        about = (plugin.name, plugin.distribution, plugin.version, plugin.module)
        return ManifestEntry(*about, digest(plugin), plugin.source, content)

    @property
    def key(self) -> tuple[str, str]:
        """The key by which entries of one plugin are compared. A file may be in another folder."""
        return self.name, PurePath(self.distribution).name

    @property
    def plugin(self) -> Plugin:
        """The plugin as this process has it.

        Raises:
            PackageNotFoundError: its distribution is not installed.
        """
        if self.source is Source.FILE:
            return local_file(base64.b64decode(self.content), path=self.distribution, name=self.name)
        if self.name == CORE.name:
            return CORE
        version = metadata.version(self.distribution) if self.source is Source.INSTALLED else self.version
        return Plugin(self.name, self.distribution, version, self.module, self.source)

    def __str__(self) -> str:
        return f"{PurePath(self.distribution).name} {self.version} {self.digest[:12]}"


class Difference(NamedTuple):
    """A plugin that differs between the driver (or the run that is resumed) and this process.

    Example: ``Difference("acme", "acme-tree 2.1 1a2b3c4d5e6f", "acme-tree 2.0 99aabbccddee")``.
    """

    name: str
    expected: str
    actual: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The plugins that take part in a run, ``core`` first, and the functions that options name by path."""

    plugins: tuple[ManifestEntry, ...]
    functions: tuple[ManifestEntry, ...] = ()

    def differences(self, other: Manifest) -> list[Difference]:
        """Return the differences of ``other``; the order does not count."""
        left, right = ({entry.key: entry for entry in (*side.plugins, *side.functions)} for side in (self, other))
        pairs = [(key[0], left.get(key), right.get(key)) for key in dict.fromkeys([*left, *right])]
        return [
            Difference(name, str(before or MISSING), str(after or MISSING))
            for name, before, after in pairs
            if before is None or after is None or (before.version, before.digest) != (after.version, after.digest)
        ]

    def to_json(self) -> str:
        """Return the manifest as text for :meth:`from_json`."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Return the manifest that :meth:`to_json` wrote.

        Raises:
            PluginError: the text is not a manifest.
        """
        from pydantic import TypeAdapter, ValidationError  # listing plugins does without

        try:
            return TypeAdapter(Manifest).validate_json(text)
        except ValidationError as mistake:
            raise PluginError(f"this is not a manifest of plugins: {mistake}") from mistake

    def __str__(self) -> str:
        return ", ".join(f"{entry.name} {entry.version}" for entry in self.plugins)


def record(plugins: Iterable[Plugin], functions: Iterable[Plugin] = ()) -> Manifest:
    """Return the manifest of these plugins and functions, as their files are now.

    Raises:
        PluginError: the files of a plugin cannot be found or read.
    """
    return Manifest(tuple(map(ManifestEntry.of, plugins)), tuple(map(ManifestEntry.of, functions)))


def attach(manifest: Manifest) -> Registry:
    """Load the manifest's plugins in this process.

    Raises:
        ManifestMismatch: a plugin is missing here, or has another version or digest.
        PluginError: a plugin fails while it is imported.
    """
    if differences := mismatches(manifest):
        shown = table(differences, head=("plugin", "driver", "this process"))
        node = os.uname().nodename
        raise ManifestMismatch(f"this process on {node} has other plugins than the driver:\n{shown}")
    return register(entry.plugin for entry in manifest.plugins)


def mismatches(manifest: Manifest) -> list[Difference]:
    """Return the differences of this process from ``manifest``; imports no plugin."""
    actual = []
    for entry in (*manifest.plugins, *manifest.functions):
        with suppress(metadata.PackageNotFoundError, PluginError):
            actual.append(ManifestEntry.of(entry.plugin))
    return manifest.differences(Manifest(tuple(actual)))


def digest(plugin: Plugin) -> str:
    """Return the SHA-256 of a plugin: of the file, or over the names and contents of all files of its package.

    Raises:
        PluginError: the package cannot be found or read.
    """
    if plugin.source is Source.FILE:
        return hashlib.sha256(plugin.content).hexdigest()
    total = hashlib.sha256()
    with boundary(plugin, "reading the files of its package", next_step="Reinstall it, or correct its name."):
        for name, path in sorted(_files(plugin.module.partition(":")[0].strip()).items()):
            total.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _files(module: str) -> dict[str, Path]:
    """Return the files of the package around ``module`` that is not a shared namespace, by name in the package."""
    parts = module.split(".")
    specs = (importlib.util.find_spec(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    spec = next(spec for spec in specs if spec is None or spec.origin is not None)
    if spec is None:
        raise ModuleNotFoundError(f"no module {module}")
    if spec.submodule_search_locations is None:
        return {f"{spec.name}.py": Path(str(spec.origin))}
    files: dict[str, Path] = {}
    for package in spec.submodule_search_locations:
        for folder, folders, names in os.walk(package):
            folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
            counted = (name for name in names if not (name.startswith(".") or name.endswith((".pyc", ".pyo"))))
            files |= {Path(folder, name).relative_to(package).as_posix(): Path(folder, name) for name in counted}
    return files
