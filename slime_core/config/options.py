"""What the annotation of a setting may say about it, besides what values it takes.

    Flag        a flag without the plugin's name, and the section of files in which the setting once stood
    UsedBy      the components that read the setting
    Needs       another setting without which this one has no effect
    Conflicts   another setting that excludes this one

A condition speaks where its setting has another value than its default; the messages are made in one place
(:mod:`slime_core.plugins.conditions`).
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.types import JsonValue

__all__ = ["Condition", "Conflicts", "Flag", "Needs", "UsedBy"]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag without the plugin's name in it.

    Arguments:
        name: as the command line spells it, ``--length-limit``.
        section: of files in which the setting stood before it belonged to the plugin, and is still read; None: none.
    """

    name: str
    section: str | None = None

    def __post_init__(self) -> None:
        if not self.name.startswith("--") or "_" in self.name or "." in self.name or not self.name[2:]:
            raise ValueError(f"Flag({self.name!r}): accepted is a flag with dashes, such as --length-limit")


@dataclass(frozen=True, slots=True, init=False)
class UsedBy:
    """Components of the plugin that read the setting; a run that uses none of them and sets it is refused."""

    components: tuple[str, ...]

    def __init__(self, *components: str) -> None:
        if not components:
            raise ValueError("UsedBy() names no component; leave it out, or name those that read the setting")
        object.__setattr__(self, "components", components)


@dataclass(frozen=True, slots=True)
class Needs:
    """Another setting without which this one has no effect.

    Arguments:
        setting: its name, of the same plugin or of the core.
        equals: the value that it needs; None: any other than its default.
    """

    setting: str
    equals: JsonValue = None


@dataclass(frozen=True, slots=True)
class Conflicts:
    """Another setting, of the same plugin or of the core, that may not be set too."""

    setting: str


Condition = UsedBy | Needs | Conflicts
