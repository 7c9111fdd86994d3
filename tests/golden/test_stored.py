"""Stored command lines resolve to the stored settings, and rollouts of the sampler give the stored samples."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.golden import sampler, settings

WANTED: dict[str, Any] = {one.__name__: json.loads(one.STORED.read_text()) for one in (settings, sampler)}
SETTINGS, SAMPLER = WANTED
COMMANDS, ROLLOUTS = WANTED[SETTINGS]["cases"], WANTED[SAMPLER]


@cache
def resolved(module: str) -> dict[str, Any]:
    """In a process of its own, because checks import Megatron, which takes over the process that loads it."""
    command = [sys.executable, "-m", module]
    done = subprocess.run(command, cwd=settings.REPO, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def again(module: str) -> str:
    return f"if this is meant, store it with python -m {module} --write"


def test_every_case_is_stored() -> None:
    assert list(resolved(SETTINGS)["cases"]) == list(COMMANDS), again(SETTINGS)
    assert list(resolved(SAMPLER)) == list(ROLLOUTS) == list(sampler.CASES), again(SAMPLER)
    assert resolved(SETTINGS)["base"] == WANTED[SETTINGS]["base"], again(SETTINGS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_resolves_as_stored(name: str) -> None:
    assert resolved(SETTINGS)["cases"].get(name) == COMMANDS[name], again(SETTINGS)


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, case in ROLLOUTS.items() for part in case])
def test_a_sampler_does_what_is_stored(name: str, part: str) -> None:
    assert resolved(SAMPLER)[name].get(part) == ROLLOUTS[name][part], again(SAMPLER)
