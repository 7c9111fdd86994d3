"""The rules of reference, old actor, teacher and optimizer: each broken once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.schema import ARITHMETIC
from tests.unit.config.broken import blames, broken

MODEL = ARITHMETIC / "model"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model of another size."""
    described = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    described |= {"hidden_size": 12345, "torch_dtype": "bfloat16", "bos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("line", ["--use-opd --opd-teacher-load", "--use-kl-loss --ref-load"])
def test_a_model_of_another_size_cannot_take_turns_with_the_actor(other: Path, line: str) -> None:
    size = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    # Neither the dtype nor the ids of special tokens make another model.
    key = line.split("--")[-1].replace("-", "_")
    blames(broken(f"{line} {other}"), key, f"= {other}: ", f"{MODEL}: hidden_size = 12345 instead of {size};")
