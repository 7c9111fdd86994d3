"""The tables of the engines' names are those of the versions that the environment pins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import slime_core
from slime_core.config.tables import installed_rows

DATA = Path(slime_core.__file__).parent / "config" / "data"


@pytest.mark.parametrize("engine", ["megatron-core", "sglang"])
def test_the_table_is_what_the_installed_engine_says(engine):
    held = json.loads((DATA / f"{engine}.json").read_text(encoding="utf-8"))
    assert held == installed_rows(engine), "run: python -m slime_core.config.tables"
