"""Several rollouts of the sampler give the stored samples, ledger, shards and metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.golden.sampler import CASES, REPO, STORED

AGAIN = "if this is meant, store it with python -m tests.golden.sampler --write"
WANTED: dict[str, Any] = json.loads(STORED.read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.golden.sampler"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stderr
    cases: dict[str, Any] = json.loads(done.stdout)
    return cases


def test_every_case_is_stored(found: dict[str, Any]) -> None:
    assert list(found) == list(WANTED) == list(CASES), AGAIN


@pytest.mark.parametrize(("name", "part"), [(name, part) for name, case in WANTED.items() for part in case])
def test_a_sampler_does_what_is_stored(name: str, part: str, found: dict[str, Any]) -> None:
    assert found[name].get(part) == WANTED[name][part], AGAIN
