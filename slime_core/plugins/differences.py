"""Two sets of plugins compared, and what differs as one table: for nodes, for a resume, and for ``slime.lock``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slime_core.plugins.declared import canonical
from slime_core.plugins.discovery import Source
from slime_core.plugins.entries import ManifestEntry

__all__ = ["ABSENT", "Difference", "compare", "differences", "table", "told"]

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
        install: what an installer would be told to make it the same, ``"acme-tree==2.1"``; empty: that is no help.
    """

    plugin: str
    wanted: str
    found: str
    what: str
    install: str = ""

    @property
    def row(self) -> tuple[str, str, str, str]:
        """Its cells in a table."""
        return self.plugin, self.wanted, self.found, self.what


def differences(wanted: Iterable[ManifestEntry], found: Iterable[ManifestEntry]) -> list[Difference]:
    """What differs between two sets; their order does not count."""
    left, right = _by_key(wanted), _by_key(found)
    compared = [compare(left.get(key), right.get(key)) for key in dict.fromkeys([*left, *right])]
    return [difference for difference in compared if difference is not None]


def compare(wanted: ManifestEntry | None, found: ManifestEntry | None) -> Difference | None:
    """What differs between two entries of one plugin; None: nothing. An entry that is None is one that is missing."""
    some = wanted or found
    what = _what(wanted, found) if wanted and found else "missing" if wanted else "added"
    if some is None or not what:
        return None
    pinned = f"{wanted.distribution}=={wanted.version}" if wanted and wanted.source is Source.INSTALLED else ""
    installs = pinned if what in ("missing", "distribution", "version") else ""
    return Difference(some.plugin, str(wanted or ABSENT), str(found or ABSENT), what, installs)


def told(by_node: Mapping[str, Sequence[Difference]]) -> str:
    """The differences of one or several nodes as one table, and the next step.

    Arguments:
        by_node: name of a node -> what it has otherwise than the driver.
    """
    rows = [(node, *one.row) for node, found in by_node.items() for one in found]
    installs = sorted({one.install for found in by_node.values() for one in found if one.install})
    which = f" ({' '.join(installs)})" if installs else ""
    return (
        f"{table(rows, head=('node', 'plugin', 'driver', 'found there', 'differs in'))}\n"
        f"Install the same on every node{which}, or share one environment between the nodes."
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
    if (wanted.source, canonical(wanted.home)) != (found.source, canonical(found.home)):
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
