"""The tables of the engines' names are those of the versions that the environment pins.

``python -m tests.guards.test_engine_tables`` writes them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from slime_core.config.tables import DATA, Engine
from slime_core.cpu import serve as cpu

REPO = Path(__file__).parents[2]


def installed_rows(engine: Engine) -> dict[str, Any]:
    """Version and names of the installed engine, which takes over the process that loads it."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.guards.engine_tables", engine]
    ours = cpu.server_environment() if engine == "sglang" else {}
    done = subprocess.run(command, cwd=REPO, env=os.environ | ours, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("engine", get_args(Engine))
def test_the_table_is_what_the_installed_engine_says(engine):
    held = json.loads((DATA / f"{engine}.json").read_text(encoding="utf-8"))
    assert held == installed_rows(engine), "run: python -m tests.guards.test_engine_tables"


def text_of(table: Mapping[str, Any]) -> str:
    """One row a line, so that a change of version is a readable difference."""
    rows = ",\n".join(json.dumps(row) for row in table["rows"])
    return f'{{"version": {json.dumps(table["version"])}, "rows": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    for name in get_args(Engine):
        (DATA / f"{name}.json").write_text(text_of(installed_rows(name)), encoding="utf-8")
