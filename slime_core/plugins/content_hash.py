"""The digest of a plugin: its files as they are now, named alike where it is installed and where it is editable.

Everything in its packages counts, because a changed prompt template changes a run like changed code does; only what
Python writes itself (byte code) and what is hidden does not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath, PurePosixPath

from slime_core.plugins.boundary import boundary
from slime_core.plugins.discovery import CORE, PluginIdentity, PluginSource, Source

__all__ = [
    "NO_FILES",
    "digest",
    "editable_source",
    "file_digests",
]


NO_FILES = "(no files)"
"""Stands for the digest of a distribution whose metadata is there and whose package is not."""


def file_digests(source: PluginSource) -> dict[str, str]:
    """The SHA-256 of every file of the plugin, by the file's name from where packages lie, such as ``acme/code.py``.

    Raises:
        PluginError: its package cannot be found or read; names distribution, version and entry point.
    """
    if source.source is Source.FILE:
        return {PurePath(source.plugin.distribution).name: hashlib.sha256(source.content).hexdigest()}
    with boundary(source.plugin, "finding its files", next_step=_next_step(source)):
        files = _package_files(source.plugin)
    if source.source is Source.INSTALLED and source.plugin.distribution != CORE.distribution:
        with boundary(source.plugin, "reading its RECORD", next_step="Reinstall it."):
            files |= _recorded_files(source.plugin.distribution)
    with boundary(source.plugin, "reading its files", next_step="Make every file of its package readable."):
        return {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in sorted(files)}


def _next_step(source: PluginSource) -> str:
    if source.source is Source.MODULE:
        return "Correct the name, or the Python path that should lead to it."
    return "Reinstall it, or correct the entry point."


def digest(source: PluginSource, files: Mapping[str, str]) -> str:
    """One SHA-256 over what :func:`file_digests` found; of a single file, that file's own."""
    if not files:
        return NO_FILES
    if source.source is Source.FILE:
        return next(iter(files.values()))
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{files[name]}\n".encode())
    return total.hexdigest()


def editable_source(distribution: str) -> str | None:
    """The URL of the source folder that the distribution runs from, as the installer recorded it (PEP 610); None: it is
    no editable install.
    """
    try:
        recorded = json.loads(metadata.distribution(distribution).read_text("direct_url.json") or "{}")
        return str(recorded["url"]) if recorded["dir_info"]["editable"] else None
    except (metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        return None


def _recorded_files(distribution: str) -> dict[str, Path]:
    """The files that the installer recorded and that still exist; their recorded hashes are not trusted."""
    files = [
        file for file in metadata.distribution(distribution).files or [] if _counts(file) and not _installers(file)
    ]
    found = {file.as_posix(): Path(str(file.locate())) for file in files}
    return {name: path for name, path in found.items() if path.is_file()}


def _counts(file: PurePath) -> bool:
    is_hidden = any(part.startswith(".") or part == "__pycache__" for part in file.parts)
    return not is_hidden and file.suffix not in (".pyc", ".pyo")


def _installers(file: PurePosixPath) -> bool:
    """Whether the installer wrote it for itself: metadata, and the finders of an editable install."""
    # Scripts lie outside (..) and hold the path of one machine's Python, as finders hold that of the source.
    of_metadata = file.parts[0].endswith((".dist-info", ".egg-info"))
    return of_metadata or file.suffix == ".pth" or file.name.startswith("__editable__")


def _package_files(plugin: PluginIdentity) -> dict[str, Path]:
    """The files of the package that holds the entry point, by the names that they have where packages lie."""
    package = _package(plugin.entry_point.partition(":")[0].strip())
    root = PurePosixPath(*package.name.split("."))
    if package.submodule_search_locations is None:
        return {f"{root}.py": path for path in [Path(str(package.origin))] if path.is_file()}
    folders = [Path(folder) for folder in package.submodule_search_locations]
    paths = [(path, path.relative_to(folder)) for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(root / relative.as_posix()): path for path, relative in paths if _counts(relative)}


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
