"""The author's guide (docs/plugins.md) is true: its commands run, files have its names, a test finds its mistake."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling import build

from slime_core import Place, Sample, SamplerInfo
from slime_core.cli.main import main
from slime_core.harness import activate, find_plugin
from slime_testing.scaffold import KINDS, Scaffold

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
MY_ALGO = Scaffold("advantage-estimator", "my-algo")


def blocks(info: str) -> list[str]:
    """The content of every code block with exactly this after its fence."""
    every = re.findall(r"^```([^\n]*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    found = [content for opening, content in every if opening == info]
    assert found, info
    return found


def commands() -> list[tuple[str, int]]:
    """Every command of the consoles, and its exit code: 2 if the guide shows an error after it."""
    shown = [part.partition("\n") for block in blocks("console") for part in re.split(r"^\$ ", block, flags=re.M)[1:]]
    return [(command, 2 if printed.startswith("slime: ") else 0) for command, _, printed in shown]


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's working directory, and a folder on the path into which wheels are installed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    # slime plugins check tries a plugin in a process of its own.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path


def install(package: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.chdir(package)
        wheel = build.build_wheel(str(site.parent))
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(site.parent / wheel)], check=True)


def test_the_commands_of_the_consoles_run(follow: Path, monkeypatch: pytest.MonkeyPatch):
    steps = commands()
    assert {command.split()[2] for command, _ in steps} == {"new", "check", "show"}
    for command, code in steps:
        program, *words = shlex.split(command)
        assert program == "slime"
        assert main(words) == code, command
        if command.endswith("advantage-estimator my-algo"):
            install(follow / "slime-my-algo", follow / "site", monkeypatch)


def test_the_guide_lists_the_files_that_are_written():
    (tree,) = [block for block in blocks("") if block.startswith("slime-my-algo/\n")]
    named = {word for line in tree.splitlines()[1:] for word in line.split()}
    written = {str(place) for place in MY_ALGO.files()}
    own = {"src/slime_my_algo/__init__.py", "src/slime_my_algo/py.typed"}
    assert named & written == written - own


def test_the_class_that_the_guide_prints_is_in_the_package():
    (printed,) = blocks("python src/slime_my_algo/advantage.py")
    assert MY_ALGO.files()[Path("src/slime_my_algo/advantage.py")].endswith(printed)
    suite = re.search(r"```python\n(class TestContract.*?)```", GUIDE, re.DOTALL)
    assert suite is not None
    assert suite[1] in MY_ALGO.files()[Path("tests/test_advantage.py")]


def test_the_mistake_of_the_guide_is_found(follow: Path, monkeypatch: pytest.MonkeyPatch):
    assert main(["plugins", "new", "advantage-estimator", "my-algo"]) == 0
    (mistake,) = blocks("python mistake")
    path = follow / "slime-my-algo/src/slime_my_algo/advantage.py"
    right = "        centred_B: NDArray[np.float64] = batch.rewards_B - medians_P[group_B]\n"
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, mistake))
    install(follow / "slime-my-algo", follow / "site", monkeypatch)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line"]
    ended = subprocess.run(
        command, cwd="slime-my-algo", env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stdout
    assert re.search(r"^FAILED \S+::test_", ended.stdout, re.MULTILINE)


def test_the_guide_names_every_kind_with_the_suite_of_its_tests():
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| .* \| `(\w+Suite)` \|$", GUIDE, re.MULTILINE))
    assert set(rows) == set(KINDS)
    for kind, suite in rows.items():
        tests = next(text for place, text in Scaffold(kind, "x").files().items() if place.parts[0] == "tests")
        assert f"({suite}):" in tests, kind


def test_the_hooks_of_the_guide_write_into_the_run_folder_and_pass_the_checks(follow: Path):
    (example,) = blocks("python responses.py")
    (follow / "responses.py").write_text(example)
    assert main(["plugins", "check", "./responses.py"]) == 0
    assert sorted(os.listdir(follow)) == ["responses.py", "site"]
    plugin = activate(find_plugin("./responses.py"))
    hooks = plugin.hooks(Place.SAMPLER, None)
    run_folder = follow / "run"
    run_folder.mkdir()
    hooks.call("slime_sampler_start", sampler=SamplerInfo("http://127.0.0.1:1", folder=run_folder))
    samples = [Sample(prompt="1+1", response="2", reward=1.0), Sample(prompt="1+1", response="3", reward=0.0)]
    hooks.call("slime_after_rollout", rollout=4, samples=samples)
    assert hooks.failures.take().warnings == []
    assert [json.loads(line) for line in (run_folder / "responses-4.jsonl").read_text().splitlines()] == [
        {"response": "2", "reward": 1.0},
        {"response": "3", "reward": 0.0},
    ]
