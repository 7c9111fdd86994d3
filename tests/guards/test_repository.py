"""The workflows of CI and of a release: they parse, and call targets of the Makefile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return content


def commands(path: Path) -> Iterator[str]:
    for job in jobs(path).values():
        yield from (step["run"] for step in job["steps"] if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(path: Path) -> None:
    called = [command.split()[1] for command in commands(path)]
    assert called[0] == "setup"
    assert set(called) <= TARGETS


def test_ci_runs_the_supported_versions_of_python() -> None:
    versions = jobs(ROOT / ".github/workflows/test.yml")["test"]["strategy"]["matrix"]["python"]
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert versions == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', pyproject)


def test_only_a_tag_publishes() -> None:
    publish = jobs(ROOT / ".github/workflows/release.yml")["publish"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert publish["needs"] == "wheels"
    assert publish["environment"] == "release"


def test_the_contributors_commands_are_targets() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    assert {"quick", "test"} <= named <= TARGETS
