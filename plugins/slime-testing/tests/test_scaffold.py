"""``slime plugins new``: which files, which names, which refusals; nothing is written by half."""

from __future__ import annotations

import ast
import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import slime_core
from slime_core.cli.main import main
from slime_core.errors import PluginError
from slime_testing import scaffold
from slime_testing.harness import Kind
from slime_testing.scaffold import KINDS, LONGEST_NAME, Scaffold, new_plugin

LONG = "a" * LONGEST_NAME


def texts(kind: str, name: str = "my-algo") -> dict[str, str]:
    return {str(place): text for place, text in Scaffold(kind, name).files().items()}


def test_there_is_a_package_for_every_kind_two_variants_and_hooks() -> None:
    kinds = {kind.value.replace("_", "-") for kind in Kind}
    assert set(KINDS) == kinds | {"token-advantage-estimator", "multi-turn-generate-function", "lifecycle"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_has_at_most_seven_files_with_the_plugin_and_its_tests(kind: str) -> None:
    places = set(texts(kind))
    source = "src/slime_my_algo/"
    assert places >= {"pyproject.toml", "README.md", f"{source}__init__.py", f"{source}py.typed"}
    assert [place for place in places if place.startswith("tests/test_")]
    assert len(places) <= 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["x", "my-algo", LONG])
def test_python_and_toml_can_be_read_and_no_placeholder_is_left(kind: str, name: str) -> None:
    for place, text in texts(kind, name).items():
        if place.endswith(".py"):
            ast.parse(text)
        if place.endswith(".toml"):
            tomllib.loads(text)
        assert "$" not in text, place


def test_a_package_declares_the_plugin_and_bounds_the_core_by_the_running_version() -> None:
    major, minor, _ = slime_core.__version__.split(".")
    project = tomllib.loads(texts("tracker")["pyproject.toml"])["project"]
    assert project["name"] == "slime-my-algo"
    assert project["entry-points"] == {"slime": {"my-algo": "slime_my_algo"}}
    assert project["dependencies"] == [f"slime-rl>={major}.{minor},<{major}.{int(minor) + 1}"]
    assert project["optional-dependencies"]["test"][0].startswith("slime-testing>=")


def test_new_writes_the_files_and_prints_the_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "reward-model", "my-algo"]) == 0
    written = {str(path.relative_to("slime-my-algo")) for path in Path("slime-my-algo").rglob("*") if path.is_file()}
    assert written == set(texts("reward-model"))
    assert os.listdir() == ["slime-my-algo"]
    _, cd, install, run = capsys.readouterr().out.splitlines()
    assert (cd, run) == ("  cd slime-my-algo", "  slime run --plugin grpo --plugin my-algo --num-rollout 2")
    assert " --no-deps " in install


def test_the_printed_installation_changes_no_other_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    assert main(["plugins", "new", "reward-model", "my-algo", "--dir", str(tmp_path)]) == 0
    install, test = capsys.readouterr().out.splitlines()[2].split(" && ")
    dry = [*shlex.split(install), "--dry-run", "--quiet", "--report", "-"]
    python = {"python": sys.executable}.get(dry[0], dry[0])
    folder = next(tmp_path.glob("slime-my-algo*"))
    report = subprocess.run([python, *dry[1:]], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert [each["metadata"]["name"] for each in json.loads(report)["install"]] == ["slime-my-algo"]
    assert shlex.split(test)[1:] == ["-m", "pytest"]


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ({"pip", "hatchling"}, ["-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", "."]),
        ({"pip"}, ["-m", "pip", "install", "--no-deps", "-e", "."]),
        (set(), ["pip", "install", "--python", sys.executable, "--no-deps", "-e", "."]),
    ],
)
def test_the_printed_installation_uses_the_installer_of_the_environment(
    packages: set[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaffold, "_is_installed", packages.__contains__)
    monkeypatch.setenv("PATH", "/nowhere")
    install, test = scaffold._install_and_test().split(" && ")
    assert shlex.split(install)[1:] == words
    assert shlex.split(test) == [sys.executable, "-m", "pytest"]


def test_a_kind_may_be_written_with_underscores_and_the_folder_elsewhere(tmp_path: Path) -> None:
    assert main(["plugins", "new", "policy_loss", "my-algo", "--dir", str(tmp_path / "deep")]) == 0
    assert (tmp_path / "deep/slime-my-algo/src/slime_my_algo/loss.py").is_file()


@pytest.mark.parametrize(
    ("kind", "name", "word"),
    [
        ("advantage-estimater", "x", "'advantage-estimator'"),
        ("tracker", "My_Algo", "'My_Algo'"),
        ("tracker", "3d", "'3d'"),
        ("tracker", "a--b", "'a--b'"),
        ("tracker", "", "''"),
        ("tracker", LONG + "a", "30"),
        ("tracker", "slime-x", "slime-slime-x"),
        ("tracker", "data", "data"),
        ("tracker", "grpo", "slime-grpo"),
        ("tracker", "rl", "slime-rl"),
        ("policy-loss", "clipped", "'core'"),
        ("reward-model", "rloo", "'grpo'"),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(kind: str, name: str, word: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=word):
        new_plugin(kind, name, where=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("existing", ["folder", "file", "dangling link"])
def test_existing_files_are_never_overwritten(existing: str, tmp_path: Path) -> None:
    target = tmp_path / "slime-my-algo"
    if existing == "folder":
        target.mkdir()
    elif existing == "file":
        target.write_text("mine")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(PluginError, match="slime-my-algo"):
        new_plugin("tracker", "my-algo", where=tmp_path)
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = Path.write_text, list[Path]()

    def full_disk(path: Path, text: str, **options: str) -> int:
        written.append(path)
        if len(written) > 3:
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(PluginError, match="--dir"):
        new_plugin("tracker", "my-algo", where=tmp_path)
    assert len(written) == 4
    assert list(tmp_path.iterdir()) == []


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PluginError, match="--dir"):
        new_plugin("tracker", "my-algo", where=tmp_path / "file")


def test_a_broken_plugin_keeps_its_name_and_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "acme_tree-1.0.dist-info").mkdir(parents=True)
    (site / "acme.py").write_text("raise SystemExit(3)")
    (site / "acme_tree-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: acme-tree\nVersion: 1.0\n")
    (site / "acme_tree-1.0.dist-info/entry_points.txt").write_text("[slime]\nacme = acme\n")
    monkeypatch.syspath_prepend(site)
    with pytest.raises(PluginError, match="acme-tree"):
        new_plugin("tracker", "acme", where=tmp_path)
    assert new_plugin("tracker", "acme-two", where=tmp_path) == 0
