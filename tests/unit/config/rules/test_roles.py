"""The rules of reference, old actor, teacher and optimizer: each broken once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC

MODEL = ARITHMETIC / "model"


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model of another size."""
    described = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    described |= {"hidden_size": 12345, "torch_dtype": "bfloat16", "bos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        "--use-kl-loss --ref-update-interval 4",
        "--kl-coef 0.1 --ref-update-interval 4 --use-kl-loss",
        f"--use-opd --opd-kl-coef 0.5 --opd-teacher-load {MODEL}",
        "--keep-old-actor --update-weights-interval 2",
        "--only-train-params-name-list mlp self_attention",
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --num-rollout 10",
        "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear --min-lr 1e-7 --lr-decay-iters 60",
        "--lr-decay-style constant --min-lr 0 --lr-wsd-decay-style exponential",
        "--lr-decay-style inverse-square-root --lr 1e-5 --lr-warmup-iters 3 --lr-warmup-init 1e-6",
    ],
)
def test_valid_settings_are_accepted(line: str) -> None:
    assert broken_rules(line) == []


@pytest.mark.parametrize("line", ["--use-opd --opd-teacher-load", "--use-kl-loss --ref-load"])
def test_a_model_of_another_size_cannot_take_turns_with_the_actor(other: Path, line: str) -> None:
    (found,) = broken_rules(f"{line} {other}")
    size = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    # Neither the dtype nor the ids of special tokens make another model.
    assert found == (
        f"{line.split('--')[-1].replace('-', '_')} = {other}: its config.json differs from that of {MODEL}: "
        f"hidden_size = 12345 instead of {size}; give a model of the same architecture, sizes and vocabulary"
    )
