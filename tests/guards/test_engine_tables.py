"""The tables of the engines' names are those of the versions that the environment pins.

``python -m tests.guards.test_engine_tables`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

import slime_core
from slime_core.config.tables import Engine, installed_rows

DATA = Path(slime_core.__file__).parent / "config" / "data"


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
