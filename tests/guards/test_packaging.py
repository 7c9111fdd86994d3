"""What the distributions declare: names, versions, bounds and pins."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import slime_core

ROOT = Path(__file__).resolve().parents[2]
CORE = "slime-rl"
PLUGINS = {
    "slime-agents",
    "slime-compat",
    "slime-convert",
    "slime-cpu",
    "slime-datasets",
    "slime-doctor",
    "slime-grpo",
    "slime-lora",
    "slime-models",
    "slime-offpolicy",
    "slime-plots",
    "slime-ppo",
    "slime-rewards",
    "slime-searchr1",
    "slime-testing",
    "slime-trackers",
    "slime-transformers",
    "slime-watch",
}
PROJECTS = {
    path.parent.name if path.parent != ROOT else CORE: path
    for path in (ROOT / "pyproject.toml", *sorted((ROOT / "plugins").glob("*/pyproject.toml")))
}
# Import names that differ from the names of their distributions.
IMPORTED_AS = {
    "antlr4": "antlr4-python3-runtime",
    "latex2sympy2_extended": "latex2sympy2-extended",
    "huggingface_hub": "huggingface-hub",
    "importlib_metadata": "importlib-metadata",
    "math_verify": "math-verify",
    "annotated_types": "annotated-types",
    "megatron": "megatron-core",
    # pydantic requires one exact version of it, and its documentation has custom errors imported from there.
    "pydantic_core": "pydantic",
    "prometheus_client": "prometheus-client",
    "tomli_w": "tomli-w",
    "yaml": "pyyaml",
}


def project(name: str) -> dict[str, Any]:
    return tomllib.loads(PROJECTS[name].read_text(encoding="utf-8"))["project"]


def dependencies(name: str) -> dict[str, Requirement]:
    return {wanted.name: wanted for wanted in map(Requirement, project(name)["dependencies"])}


def extras(name: str) -> dict[str, Requirement]:
    lists = project(name).get("optional-dependencies", {}).values()
    return {wanted.name: wanted for several in lists for wanted in map(Requirement, several)}


def pins(file: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
    wanted = (Requirement(line) for line in lines if line and not line.startswith("#"))
    return {one.name: one for one in wanted}


def imports_of(folder: Path) -> Iterator[str]:
    """Yield the top-level name of every import of others' modules, the ones inside functions included."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            yield from (name.partition(".")[0] for name in names)


def texts() -> Iterator[Path]:
    yield from (ROOT / "Makefile", *PROJECTS.values(), *ROOT.glob("*.md"))
    for folder in ("docs", "examples", "plugins", "requirements"):
        yield from (
            path for path in (ROOT / folder).rglob("*") if path.suffix in {".md", ".toml", ".txt", ".in", ".sh"}
        )


def test_the_distributions_are_the_core_and_the_plugins():
    assert set(PROJECTS) == {CORE, *PLUGINS}
    assert all(project(name)["name"] == name for name in PROJECTS)
    assert {project(name)["version"] for name in PROJECTS} == {slime_core.__version__}


@pytest.mark.parametrize("name", sorted(PLUGINS))
def test_a_plugin_bounds_every_distribution_of_ours_on_both_sides(name):
    ours = {wanted: bound.specifier for wanted, bound in dependencies(name).items() if wanted in PROJECTS}
    assert CORE in ours
    for specifier in ours.values():
        assert {one.operator for one in specifier} == {">=", "<"}
        assert slime_core.__version__ in specifier


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_every_dependency_is_bounded_above(name):
    unbounded = [
        str(one)
        for one in (dependencies(name) | extras(name)).values()
        if not {"<", "=="} & {s.operator for s in one.specifier}
    ]
    assert unbounded == []


@pytest.mark.parametrize("name", sorted(PROJECTS))
def test_every_module_that_an_entry_point_or_script_names_is_there(name):
    declared = project(name)
    groups = [declared.get("entry-points", {}).get(group, {}) for group in ("slime", "pytest11")]
    targets = [target for group in (*groups, declared.get("scripts", {})) for target in group.values()]
    modules = [target.partition(":")[0] for target in targets]
    source = ROOT if name == CORE else PROJECTS[name].parent / "src"
    assert [one for one in modules if not (source / one.replace(".", "/")).with_suffix(".py").is_file()] == []


@pytest.mark.parametrize("name", sorted(PLUGINS))
def test_a_plugin_declares_nothing_in_metadata_but_its_modules(name: str) -> None:
    assert project(name)["entry-points"].keys() - {"pytest11"} == {"slime"}


def test_the_core_declares_what_it_imports():
    found = set(imports_of(ROOT / "slime_core")) - set(sys.stdlib_module_names) - {"slime_core"}
    distributions = {IMPORTED_AS.get(name, name) for name in found}
    assert distributions - set(dependencies(CORE)) - set(extras(CORE)) == set()


@pytest.mark.parametrize("name", sorted(PLUGINS))
def test_a_plugin_imports_what_it_or_the_core_declares(name):
    module = name.replace("-", "_")
    stand_ins = {path.stem for path in (PROJECTS["slime-cpu"].parent / "src/slime_cpu/stand_ins").iterdir()}
    names = set(imports_of(PROJECTS[name].parent / "src")) - stand_ins
    names -= {*sys.stdlib_module_names, "slime_core", module}
    distributions = {IMPORTED_AS.get(one, one.replace("_", "-") if one.startswith("slime_") else one) for one in names}
    assert distributions - set(dependencies(CORE)) - set(dependencies(name)) - set(extras(name)) == set()


def test_every_wheel_carries_its_licence_and_says_that_it_is_typed():
    for name, path in PROJECTS.items():
        source = ROOT / "slime_core" if name == CORE else path.parent / "src" / name.replace("-", "_")
        assert (path.parent / "LICENSE").read_text(encoding="utf-8").lstrip().startswith("Apache License"), name
        assert (source / "py.typed").is_file(), name


def test_nothing_is_installed_under_the_name_of_a_strangers_package():
    stranger = "slime" + "-core"
    assert [
        str(path.relative_to(ROOT)) for path in texts() if stranger in path.read_text(encoding="utf-8").lower()
    ] == []
    assert all(stranger not in dependencies(name) for name in PROJECTS)
    assert stranger not in pins("cpu.txt")


def test_the_pins_are_exact_and_say_nothing_about_where_packages_come_from():
    text = (ROOT / "requirements/cpu.txt").read_text(encoding="utf-8")
    assert re.findall(r"^\s*-.*|^.*://.*|^.* @ .*|^.*--hash.*", text, flags=re.MULTILINE) == []
    assert all([one.operator for one in pin.specifier] == ["=="] for pin in pins("cpu.txt").values())
    assert pins("cpu.txt")["torch"].specifier == Requirement("torch==2.13.0").specifier


def test_the_pins_lie_within_what_they_are_resolved_from_and_the_bounds_of_the_core():
    pinned = {name: Version(next(iter(pin.specifier)).version) for name, pin in pins("cpu.txt").items()}
    for wanted in (pins("cpu.in"), dependencies(CORE) | extras(CORE)):
        assert [name for name, bound in wanted.items() if pinned[name] not in bound.specifier] == []


def test_what_a_cpu_cannot_use_is_not_pinned():
    refused = {name for name, one in pins("cpu-overrides.txt").items() if one.marker}
    assert refused & set(pins("cpu.txt")) == set()


def test_no_lock_file_that_records_hosts_is_tracked():
    assert not (ROOT / "uv.lock").exists()
