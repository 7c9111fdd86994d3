"""Every stored command line resolves to the stored settings and selects the stored components."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.golden.settings import REPO, STORED

AGAIN = "if this is meant, store it with python -m tests.golden.settings --write"
WANTED: dict[str, Any] = json.loads(STORED.read_text())


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    """In a process of its own, because checks import Megatron, which takes over the process that loads it."""
    command = [sys.executable, "-m", "tests.golden.settings"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    resolved: dict[str, Any] = json.loads(done.stdout)
    return resolved


def test_the_same_commands_are_stored(resolved: dict[str, Any]) -> None:
    assert list(resolved["cases"]) == list(WANTED["cases"]), AGAIN
    assert resolved["base"] == WANTED["base"], AGAIN


@pytest.mark.parametrize("name", WANTED["cases"])
def test_a_command_resolves_as_stored(name: str, resolved: dict[str, Any]) -> None:
    assert resolved["cases"].get(name) == WANTED["cases"][name], AGAIN
