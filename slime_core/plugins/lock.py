"""``slime.lock``: the plugins of a run, down to the content of their files, as a file to commit next to a config.

It holds nothing that changes between two writings. A file of one's own is locked by its digest, and found again by its
path from the lock's folder, so that a lock and the files around it can be moved together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import ManifestMismatch, PluginError
from slime_core.plugins.discovery import Source, local_file
from slime_core.plugins.manifest import (
    ABSENT,
    Difference,
    Manifest,
    ManifestEntry,
    compare,
    differences,
    entry_here,
    entry_of,
    table,
)
from slime_core.untrusted import parse_toml, read_text

LOCK_FILE = Path("slime.lock")
"""In the working directory, unless --lock-file names another."""

FORMAT = 1
HEAD = """\
# The plugins of a run, down to the content of their files. Written by slime plugins lock;
# slime plugins verify compares it with what is installed, slime run --locked refuses anything else.
"""
_KEYS = {
    Source.INSTALLED: {"name", "distribution", "version", "entry_point", "sha256"},
    Source.MODULE: {"name", "module", "sha256"},
    Source.FILE: {"name", "file", "sha256"},
}


@dataclass(frozen=True, slots=True)
class Lock:
    """The contents of a lock file.

    Arguments:
        path: of the file.
        plugins, functions: as in a manifest, sorted by name; ``core`` first.
    """

    path: Path
    plugins: tuple[ManifestEntry, ...]
    functions: tuple[ManifestEntry, ...] = ()

    @staticmethod
    def of(manifest: Manifest, path: Path) -> Lock:
        """The lock that holds exactly ``manifest``."""
        return Lock(path, _sorted(manifest.entries), _sorted(manifest.functions))

    def to_toml(self) -> str:
        """The text of the file; the same for the same plugins, wherever it is written."""
        import tomli_w

        tables: dict[str, Any] = {"version": FORMAT, "plugin": [self._table(entry) for entry in self.plugins]}
        if self.functions:
            tables["function"] = [self._table(entry) for entry in self.functions]
        return HEAD + tomli_w.dumps(tables)

    def admit(self, manifest: Manifest) -> None:
        """Returns if everything in ``manifest`` stands in the lock; the lock may hold more.

        Raises:
            ManifestMismatch: with a table of what does not.
        """
        self._refuse([one for one in self._differences(manifest) if one.found != ABSENT])

    def check(self, manifest: Manifest) -> None:
        """Returns if the lock and ``manifest`` hold the same.

        Raises:
            ManifestMismatch: with a table of what differs.
        """
        self._refuse(self._differences(manifest))

    def verify(self) -> list[Difference]:
        """Differences of the installed plugins from the lock; imports no plugin."""
        found = [compare(entry, self._here(entry)) for entry in (*self.plugins, *self.functions)]
        return [difference for difference in found if difference is not None]

    def difference_text(self, found: Sequence[Difference]) -> str:
        """The differences as a table, and the next step."""
        rows = [one.row for one in found]
        installs = " ".join(sorted({one.install for one in found if one.install}))
        which = f" ({installs})" if installs else ""
        return (
            f"{table(rows, head=('plugin', self.path.name, 'here', 'differs in'))}\n"
            f"Install what {self.path.name} says{which}, or rewrite it with slime plugins lock."
        )

    def _refuse(self, found: Sequence[Difference]) -> None:
        if found:
            raise ManifestMismatch(
                f"the plugins of this run are not those of {self.path}:\n{self.difference_text(found)}"
            )

    def _differences(self, manifest: Manifest) -> list[Difference]:
        here = Lock.of(manifest, self.path)
        return [*differences(self.plugins, here.plugins), *differences(self.functions, here.functions)]

    def _here(self, entry: ManifestEntry) -> ManifestEntry | None:
        if entry.source is not Source.FILE:
            return entry_here(entry)
        path = self.path.parent / entry.distribution
        return entry_of(local_file(path.read_bytes(), path=str(path))) if path.is_file() else None

    def _table(self, entry: ManifestEntry) -> dict[str, str]:
        match entry.source:
            case Source.FILE:
                where = {"file": _relative(Path(entry.distribution), self.path.parent)}
            case Source.MODULE:
                where = {"module": entry.entry_point}
            case Source.INSTALLED:
                where = {
                    "distribution": entry.distribution,
                    "version": entry.version,
                    "entry_point": entry.entry_point,
                }
        return {"name": entry.plugin, **where, "sha256": entry.digest}


def read_lock(path: Path) -> Lock:
    """The lock in the file ``path``.

    Raises:
        PluginError: there is no such file, or it is no lock.
    """
    try:
        found = parse_toml(read_text(path))
        if found["version"] != FORMAT:
            raise ValueError(f"its version is {found['version']!r}, and this slime reads {FORMAT}")
        return Lock(path, _entries(found["plugin"]), _entries(found.get("function", [])))
    except OSError as problem:
        raise PluginError(
            f"{path}: there is no lock of plugins here ({problem.strerror}).\n"
            "Write one with slime plugins lock and the flags of the run, or give its path with --lock-file."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as mistake:
        reason = f"no {mistake}" if isinstance(mistake, KeyError) else mistake
        raise PluginError(
            f"{path} is no lock of plugins: {reason}.\nRewrite it with slime plugins lock and the flags of the run."
        ) from None


def _entries(rows: Iterable[Mapping[str, str]]) -> tuple[ManifestEntry, ...]:
    return tuple(map(_entry, rows))


def _entry(row: Mapping[str, str]) -> ManifestEntry:
    source = next((source for source, keys in _KEYS.items() if row.keys() == keys), None)
    if source is None or not all(isinstance(value, str) for value in row.values()):
        raise ValueError(f"an entry has the keys {', '.join(row)}")
    empty = [key for key, value in row.items() if not value]
    if empty:
        raise ValueError(f"an entry has nothing as {' and '.join(empty)}")
    name, digest = row["name"], row["sha256"]
    match source:
        case Source.FILE:
            return ManifestEntry(
                name, row["file"], f"sha256:{digest[:12]}", f"slime_local_{digest[:16]}", digest, source
            )
        case Source.MODULE:
            return ManifestEntry(name, f"module {row['module']}", "(local)", row["module"], digest, source)
        case Source.INSTALLED:
            return ManifestEntry(name, row["distribution"], row["version"], row["entry_point"], digest)


def _sorted(entries: Iterable[ManifestEntry]) -> tuple[ManifestEntry, ...]:
    return tuple(sorted(entries, key=lambda entry: (entry.plugin != "core", entry.plugin, entry.home, entry.digest)))


def _relative(path: Path, folder: Path) -> str:
    """The file from the lock's folder, with ``..`` where it lies elsewhere."""
    # Real folders, because ".." leads out of the folder that a link means, not out of the link's own.
    real = Path(os.path.realpath(path.parent), path.name)
    return Path(os.path.relpath(real, os.path.realpath(folder))).as_posix()
