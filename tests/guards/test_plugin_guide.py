"""docs/plugins.md is true: its commands run, files have its names, a test catches its mistake."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling import build

from slime_core import Place, Registration, Sample
from slime_core.cli.main import main
from slime_testing.harness import Kind, activate
from slime_testing.scaffold import Scaffold

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


def test_the_commands_of_the_consoles_run(follow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = commands()
    assert {command.split()[2] for command, _ in steps} == {"new", "check"}
    for command, code in steps:
        program, *words = shlex.split(command)
        assert program == "slime"
        assert main(words) == code, command
        if command.endswith("advantage-estimator my-algo"):
            install(follow / "slime-my-algo", follow / "site", monkeypatch)


def test_the_guide_lists_the_files_that_are_written() -> None:
    (tree,) = [block for block in blocks("") if block.startswith("slime-my-algo/\n")]
    assert {line.split()[0] for line in tree.splitlines()[1:]} == {str(place) for place in MY_ALGO.files()}


@pytest.mark.parametrize("place", ["__init__.py", "advantage.py"])
def test_the_code_that_the_guide_prints_is_in_the_package(place: str) -> None:
    path = f"src/slime_my_algo/{place}"
    (printed,) = blocks(f"python {path}")
    assert MY_ALGO.files()[Path(path)].endswith(printed)
    suite = re.search(r"```python\n(class TestContract.*?)```", GUIDE, re.DOTALL)
    assert suite is not None
    assert suite[1] in MY_ALGO.files()[Path("tests/test_advantage.py")]


def test_the_mistake_of_the_guide_is_caught(follow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "test_other_groups_change_nothing" in ended.stdout


def test_the_guide_is_short_and_names_every_method_of_registration() -> None:
    assert len(GUIDE.splitlines()) <= 400
    methods = [name for name in vars(Registration) if not name.startswith("_") and callable(vars(Registration)[name])]
    assert [name for name in methods if f"`{name}`" not in GUIDE and f"add.{name}" not in GUIDE] == [
        "flag_advice",
        "device",
    ]
    table = [line for line in GUIDE.splitlines() if line.startswith("| `")]
    for kind in Kind:
        (row,) = [line for line in table if line.startswith(f"| `{kind}` |")]
        keywords = inspect.signature(getattr(Registration, kind)).parameters.keys() - {
            "self",
            "name",
            "target",
            "summary",
        }
        assert keywords == set(re.findall(r"`(\w+)`", row.rstrip("| ").rpartition("|")[2]))


def test_the_hooks_of_the_guide_pass_the_checks_and_survive_a_resume(follow: Path) -> None:
    (example,) = blocks("python counted.py")
    (follow / "counted.py").write_text(example)
    assert main(["plugins", "check", "./counted.py"]) == 0
    hooks = activate("./counted.py").hooks(Place.SAMPLER)
    hooks.restore({"counted": {"samples": 7}})
    hooks.call("slime_after_rollout", rollout=4, samples=[Sample(), Sample()])
    assert hooks.states() == {"counted": {"samples": 9}}
