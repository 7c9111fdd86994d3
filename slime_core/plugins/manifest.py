"""The plugins of a run, down to the content of their files: every process runs the same code or refuses to start.

    Manifest    of a run; in its folder, in its checkpoints, handed to every actor
    Lock        ``slime.lock``, the same as a file to commit next to a config

The driver writes the manifest and hands it to every actor as a constructor argument; the actor calls :func:`attach`.
Code never crosses between processes, except a single-file plugin, whose bytes are in the manifest.

The digest of a plugin: its files as they are now, named alike where it is installed and where it is editable.
Everything in its packages counts, because a changed prompt template changes a run like changed code does; only what
Python writes itself (byte code) and what is hidden does not.

A lock holds nothing that changes between two writings. A file of one's own is locked by its digest, and found again by
its path from the lock's folder, so that a lock and the files around it can be moved together.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from packaging.utils import canonicalize_name

from slime_core.errors import ManifestMismatch, PluginError
from slime_core.plugins.discovery import (
    CORE,
    PluginIdentity,
    PluginSource,
    Source,
    local_file,
    local_identity,
    module_identity,
)
from slime_core.plugins.loading import boundary
from slime_core.plugins.registry import Registry, register
from slime_core.untrusted import parse_toml, read_object, read_text

NO_FILES = "(no files)"
"""Stands for the digest of a distribution whose metadata is there and whose package is not."""


def file_digests(source: PluginSource) -> dict[str, str]:
    """The SHA-256 of every file of the plugin, by the file's name from where packages lie, such as ``acme/code.py``.

    Raises:
        PluginError: its package cannot be found or read; names distribution, version and entry point.
    """
    if source.source is Source.FILE:
        return {PurePath(source.plugin.distribution).name: hashlib.sha256(source.content).hexdigest()}
    step = "Reinstall it, or correct the entry point."
    if source.source is Source.MODULE:
        step = "Correct the name, or the Python path that should lead to it."
    with boundary(source.plugin, "finding its files", next_step=step):
        files = _package_files(source.plugin)
    if source.source is Source.INSTALLED and source.plugin.distribution != CORE.distribution:
        with boundary(source.plugin, "reading its RECORD", next_step="Reinstall it."):
            files |= _recorded_files(source.plugin.distribution)
    with boundary(source.plugin, "reading its files", next_step="Make every file of its package readable."):
        return {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in sorted(files)}


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
    files = metadata.distribution(distribution).files or []
    paths = {file: Path(str(file.locate())) for file in files if _counts(file) and not _installers(file)}
    return {file.as_posix(): path for file, path in paths.items() if path.is_file()}


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


SHOWN = 12
"""Characters of a digest that messages show."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One plugin of a run.

    Arguments:
        plugin, distribution, version, entry_point: see :class:`~slime_core.plugins.discovery.PluginIdentity`.
        digest: SHA-256 over the names and contents of its files, as hexadecimal.
        source: where its code comes from.
        content: the file itself in base64, for a single-file plugin; else empty.
        editable: its distribution is installed in place: its files may change without a new version.
        needed_by: why it is here although the run does not name it, ``"searchr1 requires it"``; else empty.
        claimed: it is active for a name that it claims, so without its presets and trackers.
        files: the first characters of each file's own SHA-256, by the file's name, sorted: so that a difference can be
            reported file by file.
    """

    plugin: str
    distribution: str
    version: str
    entry_point: str
    digest: str
    source: Source = Source.INSTALLED
    content: str = field(default="", repr=False)
    editable: bool = False
    needed_by: str = ""
    claimed: bool = False
    files: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def home(self) -> str:
        """The origin of its code, for messages and comparisons: distribution, module, or the file's own name."""
        return PurePath(self.distribution).name if self.source is Source.FILE else self.distribution

    def __str__(self) -> str:
        version = f" {self.version}" if self.source is Source.INSTALLED else ""
        return f"{self.home}{version} {self.digest[:SHOWN]}"


def listed(entries: Iterable[ManifestEntry]) -> str:
    """``core 0.1.0, grpo 0.1.0``: names and versions on one line."""
    return ", ".join(f"{entry.plugin} {entry.version}" for entry in entries)


ONLY_TRACK = "only_track"
"""Key of a run's ``plugins.json``: plugins without which its weights can be evaluated."""

ABSENT = "-"
"""Stands where one side has no such plugin."""

NAMED_FILES = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """One plugin that is not the same on both sides.

    Example: ``Difference("acme", "acme-tree 2.1 1a2b3c4d5e6f", "acme-tree 2.0 99aabbccddee", "version")``.

    Arguments:
        plugin: its name.
        wanted, found: who it is on either side, with version and the start of its digest.
        what: what differs; for content, the files.
    """

    plugin: str
    wanted: str
    found: str
    what: str

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Its cells in a table."""
        return self.plugin, self.wanted, self.found, self.what


def differences(wanted: Iterable[ManifestEntry], found: Iterable[ManifestEntry]) -> list[Difference]:
    """Differences between two sets; their order does not count."""
    left, right = _by_key(wanted), _by_key(found)
    compared = [compare(left.get(key), right.get(key)) for key in dict.fromkeys([*left, *right])]
    return [difference for difference in compared if difference is not None]


def compare(wanted: ManifestEntry | None, found: ManifestEntry | None) -> Difference | None:
    """The difference between two entries of one plugin; None: none. An entry that is None is missing."""
    some = wanted or found
    what = _what(wanted, found) if wanted and found else "missing" if wanted else "added"
    if some is None or not what:
        return None
    return Difference(some.plugin, str(wanted or ABSENT), str(found or ABSENT), what)


def difference_text(by_node: Mapping[str, Sequence[Difference]]) -> str:
    """The differences of one or several nodes as one table, and the next step.

    Arguments:
        by_node: name of a node -> what it has otherwise than the driver.
    """
    rows = [(node, *one.row) for node, found in by_node.items() for one in found]
    return (
        f"{table(rows, head=('node', 'plugin', 'driver', 'found there', 'differs in'))}\n"
        "Install the same on every node, or share one environment between the nodes."
    )


def table(rows: Sequence[Sequence[str]], *, head: Sequence[str]) -> str:
    """``rows`` under ``head``, in columns as wide as what is in them."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  " + "  ".join(line).rstrip() for line in padded)


def _by_key(entries: Iterable[ManifestEntry]) -> dict[tuple[str, int], ManifestEntry]:
    # Plugins have names of their own; functions that one setting names by path share the setting's.
    found: dict[tuple[str, int], ManifestEntry] = {}
    seen: Counter[str] = Counter()
    for entry in entries:
        found[entry.plugin, seen[entry.plugin]] = entry
        seen[entry.plugin] += 1
    return found


def _what(wanted: ManifestEntry, found: ManifestEntry) -> str:
    if (wanted.source, canonicalize_name(wanted.home)) != (found.source, canonicalize_name(found.home)):
        return "distribution"
    if wanted.source is Source.INSTALLED and wanted.version != found.version:
        return "version"
    if wanted.digest != found.digest:
        return _content(wanted, found)
    return "entry point" if wanted.entry_point != found.entry_point else ""


def _content(wanted: ManifestEntry, found: ManifestEntry) -> str:
    before, after = dict(wanted.files), dict(found.files)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if not (before and after and changed):
        return "content"
    rest = f" and {len(changed) - NAMED_FILES} more" if len(changed) > NAMED_FILES else ""
    return f"content of {', '.join(changed[:NAMED_FILES])}{rest}"


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
        """Differences of ``other``; the order of plugins, and changes of the past, do not count."""
        return [*differences(self.entries, other.entries), *differences(self.functions, other.functions)]

    def to_json(self, *, only_track: Collection[str] = ()) -> str:
        """The manifest as text; :meth:`from_json` reads it back to an equal manifest.

        Arguments:
            only_track: plugins that do nothing but track, for :func:`only_tracking`.
        """
        found: dict[str, Any] = {"plugins": list(map(_row, self.entries))}
        if only_track:
            found[ONLY_TRACK] = sorted(only_track)
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


def only_tracking(path: Path) -> tuple[str, ...]:
    """The plugins that a run's ``plugins.json`` says do nothing but track; none where it says nothing."""
    try:
        # The file may come from others: a name becomes a word of a command line and must not become a flag.
        return tuple(name for name in map(str, read_object(path)[ONLY_TRACK]) if not name.startswith("-"))
    except (OSError, ValueError, LookupError, TypeError):
        return ()


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
        table = difference_text({socket.gethostname(): found})
        raise ManifestMismatch(f"the plugins of this process are not the driver's:\n{table}")
    claimed = {entry.plugin for entry in manifest.entries if entry.claimed}
    return register([source_of(entry) for entry in manifest.entries], claimed=claimed)


def mismatches(
    manifest: Manifest, here: Callable[[ManifestEntry], ManifestEntry | None] | None = None
) -> list[Difference]:
    """Differences of this process from ``manifest``; imports no plugin.

    Arguments:
        here: finds the counterpart of an entry; None: :func:`entry_here`.
    """
    find = here or entry_here
    found = [compare(entry, find(entry)) for entry in (*manifest.entries, *manifest.functions)]
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
    """The counterpart of ``entry`` in this process; None: none. For a single file, the content in ``entry``."""
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
    return CORE.version if entry.distribution == CORE.distribution else metadata.version(entry.distribution)


# --- The lock ---------------------------------------------------------------------------------------------------------

LOCK_FILE = Path("slime.lock")
"""In the working directory, unless --lock-file names another."""

LOCK_FORMAT = 1
LOCK_HEAD = """\
# The plugins of a run, down to the content of their files. Written by slime plugins lock;
# slime plugins verify compares it with what is installed, slime run --locked refuses anything else.
"""
_LOCKED = {
    Source.INSTALLED: {"distribution": "distribution", "version": "version", "entry_point": "entry_point"},
    Source.MODULE: {"module": "entry_point"},
    Source.FILE: {"file": "distribution"},
}
"""Keys of a table of the lock, in addition to ``name`` and ``sha256`` -> the part of the entry."""


@dataclass(frozen=True, slots=True)
class Lock:
    """The contents of a lock file.

    Arguments:
        path: of the file.
        manifest: entries and functions sorted by name, ``core`` first.
    """

    path: Path
    manifest: Manifest

    @staticmethod
    def of(manifest: Manifest, path: Path) -> Lock:
        """The lock that holds exactly ``manifest``."""
        return Lock(path, Manifest(_sorted(manifest.entries), _sorted(manifest.functions)))

    @property
    def entries(self) -> tuple[ManifestEntry, ...]:
        """The plugins, and after them the functions."""
        return (*self.manifest.entries, *self.manifest.functions)

    def to_toml(self) -> str:
        """The text of the file; the same for the same plugins, wherever it is written."""
        import tomli_w

        plugins, functions = self.manifest.entries, self.manifest.functions
        tables: dict[str, Any] = {"version": LOCK_FORMAT, "plugin": [self._table(entry) for entry in plugins]}
        if functions:
            tables["function"] = [self._table(entry) for entry in functions]
        return LOCK_HEAD + tomli_w.dumps(tables)

    def admit(self, manifest: Manifest) -> None:
        """Check that the lock holds everything in ``manifest``; it may hold more.

        Raises:
            ManifestMismatch: with a table of the entries that it lacks.
        """
        self._refuse([one for one in self._differences(manifest) if one.found != ABSENT])

    def check(self, manifest: Manifest) -> None:
        """Check that the lock and ``manifest`` hold the same.

        Raises:
            ManifestMismatch: with a table of the differences.
        """
        self._refuse(self._differences(manifest))

    def verify(self) -> list[Difference]:
        """Differences of the installed plugins from the lock; imports no plugin."""
        return mismatches(self.manifest, self._here)

    def difference_text(self, found: Sequence[Difference]) -> str:
        """The differences as a table, and the next step."""
        rows = [one.row for one in found]
        return (
            f"{table(rows, head=('plugin', self.path.name, 'here', 'differs in'))}\n"
            f"Install what {self.path.name} says, or rewrite it with slime plugins lock."
        )

    def _refuse(self, found: Sequence[Difference]) -> None:
        if found:
            raise ManifestMismatch(
                f"the plugins of this run are not those of {self.path}:\n{self.difference_text(found)}"
            )

    def _differences(self, manifest: Manifest) -> list[Difference]:
        return self.manifest.differences(Lock.of(manifest, self.path).manifest)

    def _here(self, entry: ManifestEntry) -> ManifestEntry | None:
        if entry.source is not Source.FILE:
            return entry_here(entry)
        path = self.path.parent / entry.distribution
        return entry_of(local_file(path.read_bytes(), path=str(path))) if path.is_file() else None

    def _table(self, entry: ManifestEntry) -> dict[str, str]:
        found = {key: str(getattr(entry, part)) for key, part in _LOCKED[entry.source].items()}
        if entry.source is Source.FILE:
            found["file"] = _relative(Path(entry.distribution), self.path.parent)
        return {"name": entry.plugin, **found, "sha256": entry.digest}


def read_lock(path: Path) -> Lock:
    """The lock in the file ``path``.

    Raises:
        PluginError: there is no such file, or it is not a lock.
    """
    try:
        found = parse_toml(read_text(path))
        if found["version"] != LOCK_FORMAT:
            raise ValueError(f"its version is {found['version']!r}, and this slime reads {LOCK_FORMAT}")
        plugins = tuple(map(_locked_entry, found["plugin"]))
        return Lock(path, Manifest(plugins, tuple(map(_locked_entry, found.get("function", [])))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as mistake:
        reason = f"no {mistake}" if isinstance(mistake, KeyError) else mistake
        raise PluginError(
            f"{path} is not a lock of plugins: {reason}.\nWrite one with slime plugins lock and the flags of the run, "
            "or give its path with --lock-file."
        ) from None


def _locked_entry(row: Mapping[str, str]) -> ManifestEntry:
    source = next((one for one, parts in _LOCKED.items() if row.keys() == {"name", *parts, "sha256"}), None)
    if source is None or not all(value and isinstance(value, str) for value in row.values()):
        raise ValueError(f"an entry is {dict(row)}")
    name, digest = row["name"], row["sha256"]
    match source:
        case Source.FILE:
            one = local_identity(digest, path=row["file"])
        case Source.MODULE:
            one = module_identity(row["module"], name=name)
        case Source.INSTALLED:
            one = PluginIdentity(name, row["distribution"], row["version"], row["entry_point"])
    return ManifestEntry(name, one.distribution, one.version, one.entry_point, digest, source)


def _sorted(entries: Iterable[ManifestEntry]) -> tuple[ManifestEntry, ...]:
    return tuple(sorted(entries, key=lambda entry: (entry.plugin != "core", entry.plugin, entry.home, entry.digest)))


def _relative(path: Path, folder: Path) -> str:
    """The file from the lock's folder, with ``..`` where it lies elsewhere."""
    # Real folders, because ".." leads out of the folder that a link means, not out of the link's own.
    real = Path(os.path.realpath(path.parent), path.name)
    return Path(os.path.relpath(real, os.path.realpath(folder))).as_posix()
