"""The rules of the critic: each broken once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC
from tests.unit.config.broken import blames, broken


def test_a_separate_critic_has_a_layout_of_its_own():
    sizes = "--critic-tensor-model-parallel-size 2 --critic-pipeline-model-parallel-size 2"
    actor = "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 4 --sequence-parallel"
    assert broken(f"{actor} --critic-num-gpus 4 {sizes}") == []
    # Settings that are not given are those of the actor, except for those that only some layouts have.
    assert broken(f"{actor} --critic-num-gpus 1 --critic-tensor-model-parallel-size 1") == []


def test_start_weights_of_the_critic_are_a_model(tmp_path: Path):
    blames(broken(f"--critic-load {tmp_path}"), "critic_load", f"{tmp_path} ", "config.json")


def test_a_critic_of_another_model_is_refused_and_its_layout_is_that_of_the_model_that_is_built(tmp_path: Path):
    model = ARITHMETIC / "model"
    found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(found | {"num_attention_heads": 6}), encoding="utf-8")
    mistakes = broken(f"--critic-load {tmp_path} --critic-num-gpus 4 --critic-tensor-model-parallel-size 4")
    blames(mistakes, "critic_load", f"{model}: num_attention_heads = 6 ", f"{found['num_attention_heads']};")
    (tmp_path / "config.json").write_text(json.dumps(found | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    assert broken(f"--critic-load {tmp_path}") == []


@pytest.mark.parametrize(
    ("line", "experts"),
    [
        ("--critic-num-gpus 1", 1),
        ("--critic-num-gpus 3", 1),
        ("--critic-num-gpus 4", 2),
        ("--critic-num-gpus 2 --critic-context-parallel-size 2", 2),
        ("--critic-num-gpus 2 --critic-tensor-model-parallel-size 2 --critic-sequence-parallel true", 1),
    ],
)
def test_a_separate_critic_shares_its_experts_where_its_ranks_divide(line: str, experts: int, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "num_experts": 4}')
    line += f" --expert-model-parallel-size 2 --actor-num-gpus-per-node 2 --hf-checkpoint {tmp_path}"
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    assert config.critic_parallel.expert_model_parallel_size == experts
    assert [mistake for mistake in broken(line) if "expert" in str(mistake)] == []
