"""The rules of layouts, shared devices, transports and the parity gate: the numbers, and what is accepted instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


def described(folder: Path, **values: object) -> str:
    """Words that name a model of these values."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], **values}))
    return f"--hf-checkpoint {folder} --rollout-max-response-len 8"


@pytest.mark.parametrize(
    "line",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel true --actor-num-gpus-per-node 2",
        "--pipeline-model-parallel-size 3 --actor-num-gpus-per-node 3",
        "--context-parallel-size 2 --actor-num-gpus-per-node 4",
        "--colocate true --actor-num-gpus-per-node 2 --rollout-num-gpus 2",
        "--update-weight-transport tensor",
        "--update-weight-transport disk --update-weight-disk-dir somewhere",
        "--parity-mean-tolerance 0.01 --parity-max-tolerance 0.1",
        "--parity-mean-tolerance 0.5 --bf16 true",
        "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2",
        "--sglang-context-length 128",
    ],
)
def test_a_layout_that_can_be_breaks_no_rule(line: str) -> None:
    assert broken_rules(line) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "--expert-model-parallel-size 4 --actor-num-gpus-per-node 4",
            "expert_model_parallel_size = 4 does not divide the 6 experts of ",
        ),
        (
            "--expert-model-parallel-size 3 --actor-num-gpus-per-node 4",
            "expert_model_parallel_size x expert_tensor_parallel_size = 3 x 1 = 3 does not divide the 4 ranks of a ",
        ),
        (
            "--expert-model-parallel-size 3 --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 "
            "--sequence-parallel",
            "expert_model_parallel_size x expert_tensor_parallel_size = 3 x 2 = 6 does not divide the 4 ranks of a ",
        ),
        (
            "--expert-model-parallel-size 3 --expert-tensor-parallel-size 3 --actor-num-gpus-per-node 4",
            "expert_model_parallel_size x expert_tensor_parallel_size = 3 x 3 = 9 does not divide the 4 ranks of a ",
        ),
    ],
)
def test_experts_divide_over_the_ranks_of_a_stage(line: str, says: str, tmp_path: Path) -> None:
    (message,) = broken_rules(f"{described(tmp_path, num_experts=6)} {line}")
    assert message.startswith(says)


def test_tensor_parallel_ranks_share_out_experts_that_are_whole(tmp_path: Path) -> None:
    line = (
        "--tensor-model-parallel-size 4 --sequence-parallel --actor-num-gpus-per-node 8 --expert-model-parallel-size 8"
    )
    model = described(tmp_path, num_experts=128, num_attention_heads=32, num_key_value_heads=4)
    assert [text for text in broken_rules(f"{model} {line}") if "expert" in text] != []
    assert broken_rules(f"{model} {line} --expert-tensor-parallel-size 1") == []


def test_layers_need_not_divide_but_every_chunk_has_one(tmp_path: Path) -> None:
    pipeline = "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2 --num-virtual-stages-per-pipeline-rank"
    line = described(tmp_path, num_hidden_layers=5)
    assert broken_rules(f"{line} {pipeline} 3") == []
    (message,) = broken_rules(f"{line} {pipeline} 4")
    assert message.startswith(
        "pipeline_model_parallel_size x num_virtual_stages_per_pipeline_rank = 2 x 4 = 8 chunks, but the model has "
        "num_hidden_layers = 5; accepted: at most 6"
    )


def test_fewer_key_value_heads_than_ranks_are_accepted_where_each_rank_gets_one(tmp_path: Path) -> None:
    line = described(tmp_path, num_attention_heads=12, num_key_value_heads=3)
    assert broken_rules(f"{line} --tensor-model-parallel-size 6 --actor-num-gpus-per-node 6") == []
    (message,) = broken_rules(f"{line} --tensor-model-parallel-size 4 --actor-num-gpus-per-node 4")
    assert "= 4 does not divide num_key_value_heads = 3 of " in message


def test_sizes_missing_from_config_json_are_not_checked(tmp_path: Path) -> None:
    line = "--tensor-model-parallel-size 7 --pipeline-model-parallel-size 5 --actor-num-gpus-per-node 35"
    assert broken_rules(f"{described(tmp_path)} {line}") == []


def test_a_mixture_over_tensor_ranks_shares_sequences(tmp_path: Path) -> None:
    line = f"{described(tmp_path, num_experts=6)} --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2"
    assert broken_rules(line) == [
        "tensor_model_parallel_size = 2 with sequence_parallel = false: Megatron trains a mixture of 6 experts over "
        "tensor-parallel ranks only where they share sequences too; give sequence_parallel = true, or "
        "tensor_model_parallel_size = 1"
    ]
    assert broken_rules(f"{line} --sequence-parallel") == []
    assert broken_rules(described(tmp_path, num_experts=6)) == []
    (of_critic,) = broken_rules(
        f"{described(tmp_path, num_experts=6)} --critic-num-gpus 2 --critic-tensor-model-parallel-size 2"
    )
    assert of_critic.startswith(
        "critic with critic_num_gpus = 2: tensor_model_parallel_size = 2 with sequence_parallel = false: "
    )


@pytest.mark.parametrize(
    ("more", "bad"),
    [
        ({}, "moe_intermediate_size = 6"),
        ({"mlp_only_layers": [], "decoder_sparse_step": 1}, "moe_intermediate_size = 6"),
        ({"mlp_only_layers": [0]}, "moe_intermediate_size = 6, intermediate_size = 10"),
        ({"decoder_sparse_step": 2}, "moe_intermediate_size = 6, intermediate_size = 10"),
    ],
)
def test_tensor_ranks_share_the_width_of_the_layers_that_are_there(more: dict[str, object], bad: str, tmp_path: Path):
    sizes = {"num_experts": 4, "moe_intermediate_size": 6, "intermediate_size": 10, "num_attention_heads": 4}
    line = "--actor-num-gpus-per-node 4 --sequence-parallel --tensor-model-parallel-size"
    model = described(tmp_path, **sizes, **more)
    assert broken_rules(f"{model} {line} 4") == [
        f"tensor_model_parallel_size = 4 does not divide {bad} of {tmp_path}/config.json; give a size that does"
    ]
    assert broken_rules(f"{model} {line} 2") == []


def test_experts_may_be_narrower_than_dense_layers_that_are_not_there(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 10}
    line = "--actor-num-gpus-per-node 4 --sequence-parallel --tensor-model-parallel-size 4"
    assert broken_rules(f"{described(tmp_path, **sizes)} {line}") == []
