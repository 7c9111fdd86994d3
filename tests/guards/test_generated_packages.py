"""What ``slime plugins new`` writes works for every kind: lint, types, tests, wheel, settings."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli.activation import with_settings_of_loaded_run
from slime_core.cli.main import main
from slime_core.config.load import Resolved, load, peek
from slime_core.config.settings import anchored
from slime_core.plugins.activation import activate_line
from slime_testing.scaffold import KINDS, LONGEST_NAME, TEMPLATES, Scaffold

ROOT = Path(__file__).parents[2]
SCAFFOLDS = {kind: Scaffold(kind, "hooks" if kind == "lifecycle" else kind) for kind in KINDS}
BUILD = """
import os, sys
from hatchling import build
wheels, *packages = sys.argv[1:]
for package in packages:
    os.chdir(package)
    build.build_wheel(wheels)
"""


def python(*words: object, where: Path, path: Path | None = None) -> str:
    """Run ``python`` with these words, and ``path`` in front of what it imports from; what it printed."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    command = [sys.executable, *map(str, words)]
    pipe = subprocess.PIPE
    ended = subprocess.run(
        command, cwd=where, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of every kind, each called after its kind."""
    folder = tmp_path_factory.mktemp("packages")
    for scaffold in SCAFFOLDS.values():
        assert main(["plugins", "new", scaffold.kind, scaffold.name, "--dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def wheels(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of every package."""
    wheels = tmp_path_factory.mktemp("wheels")
    python("-c", BUILD, wheels, *sorted(folder.iterdir()), where=folder)
    return wheels


@pytest.fixture(scope="module")
def site(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which all wheels are installed."""
    site = tmp_path_factory.mktemp("site")
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target", site)
    python("-m", "pip", "install", *options, *sorted(wheels.iterdir()), where=wheels)
    return site


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages are installed in this process."""
    monkeypatch.syspath_prepend(site)


def resolve(argv: list[str]) -> Resolved:
    seen = peek(argv)
    active = activate_line(seen)
    return load(with_settings_of_loaded_run(argv), **active.for_load, check_rules=False)


def test_lint_and_format_find_nothing_whatever_the_length_of_the_name(folder: Path, tmp_path: Path) -> None:
    for name in ("x", "a" * LONGEST_NAME):
        for kind in KINDS:
            for place, text in Scaffold(kind, name).files().items():
                file = tmp_path / kind / name / place
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
    for words in (("check",), ("format", "--check")):
        python("-m", "ruff", *words, "--no-cache", folder, tmp_path, where=folder)


@pytest.mark.long
def test_types_hold_under_the_strict_settings_of_the_packages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = sorted(folder.iterdir())
    monkeypatch.setenv("MYPYPATH", os.pathsep.join(str(package / "src") for package in packages))
    # One run for all, with the settings of this project: `make types` has left their cache.
    python("-m", "mypy", *[package / part for package in packages for part in ("src", "tests")], where=ROOT)


def test_the_settings_of_types_are_as_strict_as_ours() -> None:
    ours, theirs = (
        tomllib.loads(text)["tool"]["mypy"]
        for text in ((ROOT / "pyproject.toml").read_text(), SCAFFOLDS["tracker"].files()[Path("pyproject.toml")])
    )
    same = {"python_version", "strict", "enable_error_code"}
    assert {key: theirs[key] for key in same} == {key: ours[key] for key in same}
    assert set(theirs["untyped_calls_exclude"]) <= set(ours["untyped_calls_exclude"])
    assert "overrides" not in theirs


@pytest.mark.long
def test_the_tests_of_the_packages_pass_with_warnings_as_errors(folder: Path, site: Path) -> None:
    packages = sorted(folder.iterdir())
    words = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", packages[0] / "pyproject.toml", "--rootdir", folder)
    printed = python(*words, *(one / "tests" for one in packages), where=folder, path=site)
    assert "warning" not in printed
    for scaffold in SCAFFOLDS.values():
        passed = re.findall(rf"^{scaffold.distribution}/tests/.*::(\S+) PASSED", printed, re.MULTILINE)
        assert len(passed) > 2, scaffold.kind


def test_a_wheel_holds_the_package_and_its_types(wheels: Path) -> None:
    names = {file.name.partition("-")[0]: set(zipfile.ZipFile(file).namelist()) for file in wheels.iterdir()}
    assert set(names) == {scaffold.package for scaffold in SCAFFOLDS.values()}
    for package, files in names.items():
        assert files >= {f"{package}/__init__.py", f"{package}/py.typed"}
        assert all(name.startswith((f"{package}/", f"{package}-0.1.0.dist-info/")) for name in files)


def test_the_wheel_of_the_kit_carries_the_templates(tmp_path: Path) -> None:
    project = TEMPLATES.parents[2]
    python("-c", BUILD, tmp_path, project, where=ROOT)
    (wheel,) = tmp_path.iterdir()
    templates = {str(path.relative_to(project / "src")) for path in TEMPLATES.rglob("*") if path.is_file()}
    assert len(templates) > 2 * len(KINDS)
    assert set(zipfile.ZipFile(wheel).namelist()) >= templates


def test_installed_plugins_are_listed_in_a_separate_process(site: Path) -> None:
    rows = json.loads(python("-m", "slime_core", "plugins", "list", "--json", where=site, path=site))
    listed = {row["name"]: (row["distribution"], row["version"], row["module"]) for row in rows}
    for scaffold in SCAFFOLDS.values():
        assert listed[scaffold.name] == (scaffold.distribution, "0.1.0", scaffold.package)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", KINDS)
def test_show_prints_the_component_and_an_option(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    scaffold = SCAFFOLDS[kind]
    assert main(["plugins", "show", scaffold.name, "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert all(flag.startswith(f"--{scaffold.name}.") and option["help"] for flag, option in shown["options"].items())
    assert shown["options"]
    component = kind.removeprefix("token-").removeprefix("multi-turn-").replace("-", "_")
    assert kind == "lifecycle" or shown["adds"][component] == [scaffold.name]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", KINDS)
def test_the_command_of_the_readme_names_the_plugin_and_resolves(kind: str, folder: Path) -> None:
    scaffold = SCAFFOLDS[kind]
    readme = (folder / scaffold.distribution / "README.md").read_text()
    (command,) = re.findall(r"^slime run (.*)$", readme, re.MULTILINE)
    resolved = resolve(shlex.split(command))
    assert resolved.config.run.plugins == (*scaffold.recipe.partners, scaffold.name)
    options = resolved.plugin_options[scaffold.name]
    assert options == anchored(type(options)(), Path())
