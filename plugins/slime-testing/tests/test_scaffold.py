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
from slime_core.plugins.component import Kind
from slime_testing import scaffold
from slime_testing.scaffold import KINDS, LONGEST_NAME, TEMPLATES, Scaffold, new_plugin

LONG = "a" * LONGEST_NAME
COMMON = {
    ".github/workflows/ci.yml",
    ".gitignore",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "run.toml",
    "src/slime_my_algo/__init__.py",
    "src/slime_my_algo/options.py",
    "src/slime_my_algo/plugin.py",
    "src/slime_my_algo/py.typed",
}
NOUNS = {
    "advantage-estimator": "advantage",
    "correction": "correction",
    "data-source": "data_source",
    "generate-function": "generate",
    "lifecycle": "penalty",
    "model-spec": "model",
    "multi-turn-generate-function": "conversation",
    "policy-loss": "loss",
    "prompt-format": "prompt_format",
    "reward-model": "reward",
    "rollout-source": "rollout_source",
    "sample-transform": "transform",
    "token-advantage-estimator": "token_advantage",
    "tracker": "tracker",
}


def texts(kind: str, name: str = "my-algo") -> dict[str, str]:
    return {str(place): text for place, text in Scaffold(kind, name).files().items()}


def project(kind: str) -> dict[str, object]:
    found: dict[str, object] = tomllib.loads(texts(kind)["pyproject.toml"])["project"]
    return found


@pytest.fixture
def broken_acme(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plugin that ends the process that imports it."""
    site = tmp_path_factory.mktemp("site")
    (site / "acme.py").write_text("raise SystemExit(3)")
    info = site / "acme_tree-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tree\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[slime]\nacme = acme\n")
    monkeypatch.syspath_prepend(site)


def test_there_is_a_scaffold_for_every_kind_for_token_estimators_and_for_hooks():
    kinds = {kind.value.replace("_", "-") for kind in Kind}
    assert set(KINDS) == kinds | {"token-advantage-estimator", "multi-turn-generate-function", "lifecycle"}
    assert set(NOUNS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_has_the_common_files_its_noun_and_a_test_of_it(kind):
    noun = NOUNS[kind]
    extra = {"policy-loss": {"src/slime_my_algo/advantage.py"}, "model-spec": {"src/slime_my_algo/tiny.py"}}
    own = {f"src/slime_my_algo/{noun}.py", f"tests/test_{noun}.py"}
    assert set(texts(kind)) == COMMON | own | extra.get(kind, set())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["x", "my-algo", LONG])
def test_python_and_toml_can_be_read_and_no_placeholder_is_left(kind, name):
    for place, text in texts(kind, name).items():
        if place.endswith(".py"):
            ast.parse(text)
        if place.endswith(".toml"):
            tomllib.loads(text)
        left = text.replace("${{ matrix.python }}", "") if place.endswith("ci.yml") else text
        assert "$" not in left, place


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_declares_the_plugin_and_bounds_the_core_by_the_running_version(kind):
    major, minor, _ = slime_core.__version__.split(".")
    found = project(kind)
    assert found["name"] == "slime-my-algo"
    assert found["entry-points"]["slime"] == {"my-algo": "slime_my_algo.plugin"}
    assert found["dependencies"] == [f"slime-rl>={major}.{minor},<{major}.{int(minor) + 1}"]
    assert found["optional-dependencies"]["test"][0].startswith("slime-testing>=")


def test_a_model_spec_claims_in_its_metadata_what_its_traits_claim():
    assert project("model-spec")["entry-points"]["slime.models"] == {"Qwen2ForCausalLM": "my-algo"}
    assert 'architectures={"Qwen2ForCausalLM"}' in texts("model-spec")["src/slime_my_algo/plugin.py"]


def test_the_licence_is_the_one_of_the_first_party_plugins():
    ours = Path(__file__).parents[3] / "plugins/slime-grpo/LICENSE"
    assert (TEMPLATES / "common/LICENSE.tmpl").read_text() == ours.read_text()


def test_new_writes_the_files_and_prints_the_next_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "reward-model", "my-algo"]) == 0
    written = {str(path.relative_to("slime-my-algo")) for path in Path("slime-my-algo").rglob("*") if path.is_file()}
    assert written == set(texts("reward-model"))
    assert os.listdir() == ["slime-my-algo"]
    first, cd, install, run = capsys.readouterr().out.splitlines()
    assert first == "slime-my-algo: plugin 'my-algo', 12 files. Next:"
    assert (cd, run) == ("  cd slime-my-algo", "  slime run --plugin grpo --plugin my-algo --num-rollout 2")
    assert " --no-deps " in install


def test_the_printed_installation_changes_no_other_package(tmp_path, monkeypatch, capsys):
    """pip says what the command would install: this package alone, torch is left as it is."""
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    assert main(["plugins", "new", "reward-model", "my-algo", "--dir", str(tmp_path)]) == 0
    install, test = capsys.readouterr().out.splitlines()[2].split(" && ")
    dry = [*shlex.split(install), "--dry-run", "--quiet", "--report", "-"]
    python = {"python": sys.executable}.get(dry[0], dry[0])
    folder = next(tmp_path.glob("slime-my-algo*"))
    report = subprocess.run([python, *dry[1:]], cwd=folder, capture_output=True, text=True, check=True).stdout
    installed = json.loads(report)["install"]
    assert [one["metadata"]["name"] for one in installed] == ["slime-my-algo"]
    assert shlex.split(test)[1:] == ["-m", "pytest"]


@pytest.mark.parametrize(
    ("packages", "words"),
    [
        ({"pip", "hatchling"}, ["-m", "pip", "install", "--no-deps", "--no-build-isolation", "-e", "."]),
        ({"pip"}, ["-m", "pip", "install", "--no-deps", "-e", "."]),
        (set(), ["pip", "install", "--python", sys.executable, "--no-deps", "-e", "."]),
    ],
)
def test_the_printed_installation_uses_the_installer_that_is_there(monkeypatch, packages, words):
    monkeypatch.setattr(scaffold, "_is_installed", packages.__contains__)
    monkeypatch.setenv("PATH", "/nowhere")
    install, test = scaffold._install_and_test().split(" && ")
    assert shlex.split(install)[1:] == words
    assert shlex.split(test) == [sys.executable, "-m", "pytest"]


def test_a_kind_may_be_written_with_underscores_and_the_folder_elsewhere(tmp_path):
    assert main(["plugins", "new", "policy_loss", "my-algo", "--dir", str(tmp_path / "deep")]) == 0
    assert (tmp_path / "deep/slime-my-algo/src/slime_my_algo/loss.py").is_file()


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("advantage-estimater", "x", r"did you mean 'advantage-estimator'"),
        ("tracker", "My_Algo", "called 'My_Algo'"),
        ("tracker", "3d", r"cannot be called '3d'"),
        ("tracker", "a--b", r"cannot be called 'a--b'"),
        ("tracker", "", r"cannot be called ''"),
        ("tracker", LONG + "a", r"at most 30 characters\."),
        ("tracker", "slime-x", "'slime-x' would be slime-slime-x"),
        ("tracker", "data", r"called 'data': \[data\]"),
        ("tracker", "grpo", r"'grpo' \(slime-grpo 0\.1\.0"),
        ("tracker", "rl", r"'core' \(slime-rl"),
        ("policy-loss", "clipped", "the name 'clipped'"),
        ("reward-model", "rloo", "the name 'rloo' is"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_and_nothing_is_written(kind, name, message, tmp_path):
    with pytest.raises(PluginError, match=message):
        new_plugin(kind, name, where=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_one_message_and_exit_code_2(capsys):
    assert main(["plugins", "new", "tracker", "grpo"]) == 2
    assert "'grpo' (slime-grpo" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_existing_files_are_never_overwritten(kind, tmp_path):
    target = tmp_path / "slime-my-algo"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(PluginError, match="slime-my-algo is there already"):
        new_plugin("tracker", "my-algo", where=tmp_path)
    assert list(tmp_path.iterdir()) == [target]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    write, seen = Path.write_text, []

    def full_disk(path: Path, text: str, **options: str) -> int:
        seen.append(path)
        if len(seen) > 5:
            raise OSError(28, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(PluginError, match="folder with --dir"):
        new_plugin("tracker", "my-algo", where=tmp_path)
    assert len(seen) == 6
    assert list(tmp_path.iterdir()) == []


def test_the_folder_above_a_file_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PluginError, match=r"folder with --dir\."):
        new_plugin("tracker", "my-algo", where=tmp_path / "file")


def test_a_broken_plugin_that_is_installed_keeps_its_name_and_stops_no_other(tmp_path, broken_acme):
    with pytest.raises(PluginError, match=r"'acme' \(acme-tree 1\.0"):
        new_plugin("tracker", "acme", where=tmp_path)
    assert new_plugin("tracker", "acme-two", where=tmp_path) == 0
