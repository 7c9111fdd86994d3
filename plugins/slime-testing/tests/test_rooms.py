"""The kit and what it writes stand on the public rooms of the core: imported, or named as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import slime_testing

SOURCE = Path(slime_testing.__file__).parent
PUBLIC = {"errors", "generation", "harness", "modeling", "ops", "prompts", "services", "types"}


def named(text: str) -> set[str]:
    """The rooms of the core that are named with a dot, in code or in words."""
    return {found[1] for found in re.finditer(r"\bslime_core(?:\.|/)([a-z_]+)\b", text)}


def files() -> Iterator[Path]:
    return (path for path in SOURCE.rglob("*") if path.suffix in {".py", ".tmpl", ".toml"})


def test_only_public_rooms_are_named() -> None:
    found = {str(path.relative_to(SOURCE)): named(path.read_text("utf-8")) - PUBLIC for path in files()}
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


def test_a_private_room_would_be_seen() -> None:
    assert named('python -m "slime_core.cli.main", slime_core/config') == {"cli", "config"}
