"""What a run's plugins are, down to the content of their files, so that every process runs the same code or refuses.

The driver writes the manifest and hands it to every actor as a constructor argument; the actor calls :func:`attach`.
Code never crosses, except a single-file plugin, whose bytes are in the manifest.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from typing import Any

import slime_core
from slime_core.errors import ManifestMismatch, PluginError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.discovery import CORE, PluginIdentity, PluginSource, Source, local_file
from slime_core.plugins.registration import Registry, register

__all__ = ["Manifest", "ManifestEntry", "attach", "record"]


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One plugin of a run.

    Arguments:
        plugin, distribution, version, entry_point: see :class:`~slime_core.plugins.discovery.PluginIdentity`.
        digest: SHA-256 over the content of its Python files, as hexadecimal.
        source: where its code comes from.
        content: the file itself in base64, for a single-file plugin; else empty.
    """

    plugin: str
    distribution: str
    version: str
    entry_point: str
    digest: str
    source: Source = Source.INSTALLED
    content: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The plugins of a run, ``core`` first, then in the order in which they were named.

    Arguments:
        functions: code that ``[custom]`` names by path; ``plugin`` is the setting, ``distribution`` the path.
    """

    entries: tuple[ManifestEntry, ...]
    functions: tuple[ManifestEntry, ...] = ()

    def to_json(self) -> str:
        """The manifest as text; :meth:`from_json` reads it back to an equal manifest."""
        rows = {"plugins": self.entries, **({"functions": self.functions} if self.functions else {})}
        return json.dumps({name: [asdict(entry) for entry in entries] for name, entries in rows.items()}, indent=2)

    @staticmethod
    def from_json(text: str) -> Manifest:
        """The manifest that :meth:`to_json` wrote.

        Raises:
            PluginError: the text is not a manifest.
        """
        try:
            found = json.loads(text)
            return Manifest(_entries(found["plugins"]), _entries(found.get("functions", [])))
        except (ValueError, KeyError, TypeError) as mistake:
            found = f"not a plugin manifest ({type(mistake).__name__}: {mistake})"
            raise PluginError(f"{found}; give the text that Manifest.to_json wrote") from mistake


def _entries(rows: Sequence[Mapping[str, Any]]) -> tuple[ManifestEntry, ...]:
    return tuple(ManifestEntry(**{**row, "source": Source(row["source"])}) for row in rows)


def record(sources: Sequence[PluginSource], functions: Sequence[PluginSource] = ()) -> Manifest:
    """The manifest of these plugins, and of code that is named by path, as their files are now."""
    return Manifest(tuple(map(_entry, sources)), tuple(map(_entry, functions)))


def attach(manifest: Manifest) -> Registry:
    """Load exactly the manifest's plugins in this process.

    Raises:
        ManifestMismatch: a plugin is missing here, or its version or content differs; names the plugin and both sides.
        PluginError: a plugin fails while it is imported.
    """
    for function in manifest.functions:
        _verified(function)
    return register([_verified(entry) for entry in manifest.entries])


def _entry(source: PluginSource) -> ManifestEntry:
    plugin = source.plugin
    return ManifestEntry(
        plugin=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        entry_point=plugin.entry_point,
        digest=_digest(source),
        source=source.source,
        content=base64.b64encode(source.content).decode(),
    )


def _verified(entry: ManifestEntry) -> PluginSource:
    here = _here(entry)
    who = f"plugin {entry.plugin!r} ({entry.distribution})"
    if here.plugin.version != entry.version:
        raise ManifestMismatch(
            f"{who}: the driver has version {entry.version}, this process has {here.plugin.version}.\n"
            f"Install {entry.distribution}=={entry.version} on every node."
        )
    digest = _digest(here)
    if digest != entry.digest:
        raise ManifestMismatch(
            f"{who} {entry.version}: the files differ: the driver has content {entry.digest[:12]}, this process has "
            f"{digest[:12]}.\nInstall the same files on every node, or share the environment between nodes."
        )
    return here


def _here(entry: ManifestEntry) -> PluginSource:
    """The plugin of ``entry`` as this process has it."""
    if entry.source is Source.FILE:
        return local_file(base64.b64decode(entry.content), path=entry.distribution)
    version = _version_here(entry)
    return PluginSource(PluginIdentity(entry.plugin, entry.distribution, version, entry.entry_point), entry.source)


def _version_here(entry: ManifestEntry) -> str:
    if entry.source is Source.MODULE:
        return entry.version
    if entry.distribution == CORE.distribution:
        return slime_core.__version__
    try:
        return metadata.version(entry.distribution)
    except metadata.PackageNotFoundError:
        raise ManifestMismatch(
            f"plugin {entry.plugin!r}: the driver has {entry.distribution} {entry.version}, this process has no such "
            f"distribution.\nInstall {entry.distribution}=={entry.version} on every node."
        ) from None


def _digest(source: PluginSource) -> str:
    if source.source is Source.FILE:
        return hashlib.sha256(source.content).hexdigest()
    files = _package_files(source.plugin)
    if source.source is Source.INSTALLED and source.plugin.distribution != CORE.distribution:
        files |= _recorded_files(source.plugin.distribution)
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _recorded_files(distribution: str) -> dict[str, Path]:
    """The Python files that the installer recorded and that still exist; their recorded hashes are not trusted."""
    files = [file for file in metadata.distribution(distribution).files or [] if _is_code(file)]
    found = {file.as_posix(): Path(str(file.locate())) for file in files}
    return {name: path for name, path in found.items() if path.is_file()}


def _is_code(file: PurePosixPath) -> bool:
    # An editable install records its finder, which holds the paths of one machine.
    return file.suffix == ".py" and ".." not in file.parts and not file.name.startswith("__editable__")


def _package_files(plugin: PluginIdentity) -> dict[str, Path]:
    """The Python files of the package that holds the entry point, named alike where it is installed and editable."""
    with boundary(plugin, "finding its files", next_step="Reinstall it, or correct the entry point."):
        package = _package(plugin.entry_point.partition(":")[0].strip())
    root = PurePosixPath(*package.name.split("."))
    if package.submodule_search_locations is None:
        return {f"{root}.py": Path(str(package.origin))}
    folders = [Path(folder) for folder in package.submodule_search_locations]
    paths = [(path, path.relative_to(folder)) for folder in folders for path in folder.rglob("*.py")]
    return {str(root / relative.as_posix()): path for path, relative in paths}


def _package(module: str) -> ModuleSpec:
    """The outermost package or module around ``module`` that is not a namespace shared with others."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = importlib.util.find_spec(".".join(parts[:end]))
        if spec is None:
            break
        if spec.origin is not None:
            return spec
    raise ModuleNotFoundError(f"no module {module}")
