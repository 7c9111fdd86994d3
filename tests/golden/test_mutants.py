"""Every capability has a test that exists and that `make test` runs, and a mutant that still can be applied."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.golden.mutants import REPO, Row, rows


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_test_exists_and_the_mutant_changes_one_place(row: Row) -> None:
    assert row.node(REPO)
    assert row.old != row.new
    assert row.place(REPO)


def test_no_capability_is_covered_by_a_long_test_alone() -> None:
    nodes = sorted({row.node(REPO) for row in rows()})
    collect = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "-m", "long", "--no-header"]
    done = subprocess.run([*collect, *nodes], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stdout  # pytest's code for: no test was collected
