"""Every snippet of docs/testing-plugins.md runs, and no suite or fixture is left out of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import slime_testing as testing
from slime_testing import pytest_plugin

pytest_plugins = ["pytester"]

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "testing-plugins.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
PLUGIN = """
from slime_core import hookimpl

@hookimpl
def slime_run_end(run):
    pass
"""


def test_every_suite_and_every_fixture_is_described() -> None:
    assert [name for name in (*testing.__all__, *pytest_plugin.__all__) if f"`{name}`" not in TEXT] == []


def test_every_snippet_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=PLUGIN)
    snippets = {f"test_{number}": text for number, text in enumerate(SNIPPETS)}
    snippets = {name: text.replace('"mine"', '"./mine.py"') for name, text in snippets.items()}
    pytester.makepyfile(**snippets)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    outcome = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    counts = outcome.parseoutcomes()
    assert "passed" in counts
    assert not counts.keys() & {"failed", "errors", "skipped"}
