"""Every capability has a test that exists, and a mutant that still can be applied."""

from __future__ import annotations

import pytest

from tests.golden.mutants import REPO, Row, rows


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.name)
def test_the_test_exists_and_the_mutant_changes_one_place(row: Row) -> None:
    assert row.node(REPO)
    assert row.old != row.new
    assert row.place(REPO)
