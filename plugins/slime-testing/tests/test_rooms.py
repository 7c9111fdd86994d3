"""The kit, except its harness, and the packages that it writes name public packages of the core only."""

from __future__ import annotations

import re
from pathlib import Path

import slime_testing

SOURCE = Path(slime_testing.__file__).parent
PUBLIC = {"errors", "generation", "modeling", "ops", "prompts", "provisional", "services", "types"}


def named(text: str) -> set[str]:
    """Return the packages of the core that are named with a dot."""
    return {match[1] for match in re.finditer(r"\bslime_core(?:\.|/)([a-z_]+)\b", text)}


def test_only_public_packages_are_named() -> None:
    files = [path for path in SOURCE.rglob("*") if path.suffix in {".py", ".tmpl"} and path.parent.name != "harness"]
    private = {str(path.relative_to(SOURCE)): named(path.read_text("utf-8")) - PUBLIC for path in files}
    assert {name: packages for name, packages in private.items() if packages} == {}
    assert named('python -m "slime_core.cli.main", slime_core/config') == {"cli", "config"}
