"""One line of a manifest: who a plugin is and what its files hold, wherever it is installed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath

from slime_core.plugins.discovery import Source

__all__ = ["SHOWN", "ManifestEntry", "listed"]

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
            told file by file.
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
        """What holds its code, for messages and comparisons: the distribution, the module, or the file's own name."""
        return PurePath(self.distribution).name if self.source is Source.FILE else self.distribution

    def __str__(self) -> str:
        version = f" {self.version}" if self.source is Source.INSTALLED else ""
        return f"{self.home}{version} {self.digest[:SHOWN]}"


def listed(entries: Iterable[ManifestEntry]) -> str:
    """``core 0.1.0, grpo 0.1.0``: names and versions on one line."""
    return ", ".join(f"{entry.plugin} {entry.version}" for entry in entries)
