"""What installed metadata declares in slime's entry-point groups; imports nothing, and survives broken metadata.

    slime             grpo = "slime_grpo.plugin"         a plugin, and the module that holds its hooks
    slime.models      Qwen3ForCausalLM = "models"        checkpoints of this architecture need that plugin
    slime.requires    grpo = "searchr1"                  plugin searchr1 of this distribution requires plugin grpo

Of two copies of one distribution on the path, only the first is what an import would find, so only that one counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

__all__ = ["ARCHITECTURE_GROUP", "PLUGIN_GROUP", "REQUIRES_GROUP", "Declaration", "Declared", "canonical", "scan"]

PLUGIN_GROUP = "slime"
ARCHITECTURE_GROUP = "slime.models"
REQUIRES_GROUP = "slime.requires"

_GROUPS = (PLUGIN_GROUP, ARCHITECTURE_GROUP, REQUIRES_GROUP)
_BROKEN = (OSError, ValueError, TypeError, AttributeError, LookupError)
"""What ``importlib.metadata`` raises on files that are cut short, in another encoding, or no metadata at all."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """One entry point: ``group``, ``name = value``, and the distribution that has it."""

    group: str
    name: str
    value: str
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class Declared:
    """Everything that is declared for slime.

    Arguments:
        entries: in no order that means anything.
        unreadable: one line for each distribution that seems to declare something but cannot be read.
    """

    entries: tuple[Declaration, ...] = ()
    unreadable: tuple[str, ...] = ()

    def group(self, name: str) -> list[Declaration]:
        """The entries of one group, by name, then distribution."""
        found = [entry for entry in self.entries if entry.group == name]
        return sorted(found, key=lambda entry: (entry.name, entry.distribution, entry.value))


def scan() -> Declared:
    """What is declared now on ``sys.path``."""
    entries: list[Declaration] = []
    unreadable: list[str] = []
    for distribution in metadata.distributions():
        try:
            if "[slime" in (distribution.read_text("entry_points.txt") or ""):
                entries += _entries(distribution)
        except _BROKEN as problem:
            where = distribution.locate_file("")
            unreadable.append(f"a distribution in {where} ({type(problem).__name__}: {problem})")
    return Declared(tuple(entries), tuple(unreadable))


def canonical(distribution: str) -> str:
    """The name as indexes compare it: ``Slime_GRPO`` is ``slime-grpo``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _entries(distribution: metadata.Distribution) -> Iterator[Declaration]:
    about = distribution.metadata
    name, version = about["Name"], about["Version"]
    if not name or not version:
        raise ValueError(f"its METADATA has no {'Version' if name else 'Name'}")
    if not _is_first(distribution, name, version):
        return
    for point in distribution.entry_points:
        if point.group in _GROUPS:
            yield Declaration(point.group, point.name, point.value, name, version)


def _is_first(distribution: metadata.Distribution, name: str, version: str) -> bool:
    """Whether an import would find this copy of it."""
    first = metadata.distribution(name)
    return first.locate_file("") == distribution.locate_file("") and first.metadata["Version"] == version
