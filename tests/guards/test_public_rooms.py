"""What plugins and built-ins name of the core, as code or as text, is public; the contracts know every room.

import-linter looks at imports that run. This looks at every line: imports for type checkers, targets, ``:class:`` in
docstrings, templates of packages, and what the guides and READMEs tell an author to import.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from inspect import ismodule
from pathlib import Path
from typing import Any

import pytest

import slime_core
from slime_core import checkpoint, weights

REPO = Path(__file__).resolve().parents[2]
CORE = REPO / "slime_core"
PUBLIC = {
    "contracts",
    "errors",
    "generation",
    "modeling",
    "ops",
    "prompts",
    "provisional",
    "services",
    "types",
}
"""The public rooms, in addition to the names of ``slime_core`` itself."""

NAMES_ONLY = {"checkpoint": checkpoint.__all__, "weights": weights.__all__}
"""Rooms of which the names are public, and not the files."""

OUTSIDE_THE_LAYERS = {"__main__", "builtin"}
NAMED = re.compile(r"slime_core\.(\w+)((?:\.\w+)*)")
CONTRACTS: list[dict[str, Any]] = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def rooms() -> set[str]:
    """Every folder and module of the core."""
    folders = {path.parent.name for path in CORE.glob("*/__init__.py")}
    return folders | {path.stem for path in CORE.glob("*.py")} - {"__init__"}


def contract(name: str) -> dict[str, Any]:
    (found,) = [one for one in CONTRACTS if one["name"].startswith(name)]
    return found


def own(modules: list[str]) -> set[str]:
    return {module.removeprefix("slime_core.").split(".")[0] for module in modules if module.startswith("slime_core.")}


def files() -> Iterator[Path]:
    """Sources of plugins and built-ins, except slime-testing's harness, and guides for authors."""
    for folder in (CORE / "builtin", *sorted(REPO.glob("plugins/*/src"))):
        paths = (path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".tmpl", ".toml", ".md"))
        yield from (path for path in paths if path.parent.name != "harness")
    yield from sorted(REPO.glob("plugins/*/README.md"))
    yield from (REPO / "docs" / name for name in ("plugins.md", "testing-plugins.md"))


def private(text: str, *, is_builtin: bool = False) -> list[str]:
    """What ``text`` names of the core and no plugin may import."""
    allowed = PUBLIC | set(slime_core.__all__) | ({"builtin"} if is_builtin else set())
    allowed |= {*NAMES_ONLY, *(f"{room}.{name}" for room, names in NAMES_ONLY.items() for name in names)}
    return sorted(
        {
            found[0]
            for found in NAMED.finditer(text)
            if (found[1] + found[2] if found[1] in NAMES_ONLY else found[1]) not in allowed
        }
    )


def found_in(path: Path) -> list[tuple[str, str]]:
    place = path.relative_to(REPO).as_posix()
    text = path.read_text(encoding="utf-8")
    return [(place, name) for name in private(text, is_builtin=place.startswith("slime_core/builtin/"))]


def test_plugins_and_built_ins_name_public_rooms_only() -> None:
    found = {one for path in files() for one in found_in(path)}
    assert found == set(), "import from a public room, or add what is missing to one"


def test_no_layer_names_a_built_in() -> None:
    below = [path for path in CORE.rglob("*.py") if path.relative_to(CORE).parts[0] != "builtin"]
    found = {path.name for path in below if "slime_core.builtin" in path.read_text(encoding="utf-8")}
    assert found == {"discovery.py"}, "built-ins are found as the plugin core"


def test_every_plugin_is_looked_at() -> None:
    looked_at = {path.parts[len(REPO.parts) + 1] for path in files() if "plugins" in path.parts}
    assert looked_at >= {path.parent.name for path in REPO.glob("plugins/*/pyproject.toml")}


def test_every_room_has_its_layer() -> None:
    layers = contract("A layer imports only lower layers")
    layered = {room for layer in layers["layers"] for room in re.split(r"\s*[|:]\s*", layer)}
    assert layers["exhaustive"]
    assert set(layers["exhaustive_ignores"]) == OUTSIDE_THE_LAYERS
    assert layered == rooms() - OUTSIDE_THE_LAYERS


def test_no_contract_names_a_room_that_is_not_there() -> None:
    named = {
        room for one in CONTRACTS for key in ("source_modules", "forbidden_modules") for room in own(one.get(key, []))
    }
    assert named - rooms() == set()


def test_every_private_room_is_closed_to_plugins_and_built_ins() -> None:
    closed = contract("Plugins and built-ins import the public packages")
    packages = {path.name for path in REPO.glob("plugins/*/src/*") if path.is_dir()}
    assert set(closed["source_modules"]) == packages | {"slime_core.builtin"}
    assert own(closed["forbidden_modules"]) == rooms() - PUBLIC - {"__main__", "builtin"}
    assert {f"slime_core.{room}.*" for room in NAMES_ONLY} <= set(closed["forbidden_modules"])
    assert {line.split(" -> ")[0] for line in closed["ignore_imports"]} == {
        "slime_testing.harness",
        "slime_testing.harness.*",
    }
    apart = contract("Plugins do not import built-ins")
    assert "slime_core.builtin" in apart["forbidden_modules"]
    assert set(apart["source_modules"]) == packages


@pytest.mark.parametrize(
    ("start", "may"),
    [
        ("Ray stays in", {"runtime"}),
        ("These packages do not import Megatron", {"checkpoint", "learner", "modeling"}),
    ],
)
def test_every_other_room_stands_in_the_contract(start: str, may: set[str]) -> None:
    one = contract(start)
    assert rooms() - own(one["source_modules"]) - may - {"__main__"} == set()


def test_all_is_exactly_what_the_package_offers() -> None:
    # A room that something has imported stands in the package's namespace as a module.
    public = {name for name, value in vars(slime_core).items() if not (name.startswith("_") or ismodule(value))}
    assert public <= set(slime_core.__all__)
    assert all(hasattr(slime_core, name) for name in slime_core.__all__)
    assert sorted(slime_core.__all__) == sorted(set(slime_core.__all__))
