"""The rules of layouts, shared devices, transports and the parity gate: the numbers, and what is accepted instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.config.broken import blames, broken, described

EXPERTS = "expert_model_parallel_size x expert_tensor_parallel_size = "


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--expert-model-parallel-size 4 --actor-num-gpus-per-node 4", "expert_model_parallel_size = 4 .* 6 experts"),
        ("--expert-model-parallel-size 3 --actor-num-gpus-per-node 4", f"{EXPERTS}3 x 1 = 3 .* 4 ranks"),
        (
            "--expert-model-parallel-size 3 --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 "
            "--sequence-parallel",
            f"{EXPERTS}3 x 2 = 6 .* 4 ranks",
        ),
        (
            "--expert-model-parallel-size 3 --expert-tensor-parallel-size 3 --actor-num-gpus-per-node 4",
            f"{EXPERTS}3 x 3 = 9 .* 4 ranks",
        ),
    ],
)
def test_experts_divide_over_the_ranks_of_a_stage(line: str, says: str, tmp_path: Path) -> None:
    (mistake,) = broken(f"{described(tmp_path, num_experts=6)} {line}")
    assert mistake.key == "expert_model_parallel_size"
    assert re.match(says, str(mistake))


def test_tensor_parallel_ranks_share_out_experts_that_are_whole(tmp_path: Path) -> None:
    line = (
        "--tensor-model-parallel-size 4 --sequence-parallel --actor-num-gpus-per-node 8 --expert-model-parallel-size 8"
    )
    model = described(tmp_path, num_experts=128, num_attention_heads=32, num_key_value_heads=4)
    assert [mistake for mistake in broken(f"{model} {line}") if mistake.key.startswith("expert")] != []
    assert broken(f"{model} {line} --expert-tensor-parallel-size 1") == []


def test_layers_need_not_divide_but_every_chunk_has_one(tmp_path: Path) -> None:
    pipeline = "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2 --num-virtual-stages-per-pipeline-rank"
    line = described(tmp_path, num_hidden_layers=5)
    assert broken(f"{line} {pipeline} 3") == []
    blames(
        broken(f"{line} {pipeline} 4"),
        "pipeline_model_parallel_size",
        "num_virtual_stages_per_pipeline_rank = 2 x 4 = 8 ",
        "num_hidden_layers = 5",
        "6",
    )


def test_fewer_key_value_heads_than_ranks_are_accepted_where_each_rank_gets_one(tmp_path: Path) -> None:
    line = described(tmp_path, num_attention_heads=12, num_key_value_heads=3)
    assert broken(f"{line} --tensor-model-parallel-size 6 --actor-num-gpus-per-node 6") == []
    found = broken(f"{line} --tensor-model-parallel-size 4 --actor-num-gpus-per-node 4")
    blames(found, "tensor_model_parallel_size", "= 4 ", "num_key_value_heads = 3")


def test_sizes_missing_from_config_json_are_not_checked(tmp_path: Path) -> None:
    line = "--tensor-model-parallel-size 7 --pipeline-model-parallel-size 5 --actor-num-gpus-per-node 35"
    assert broken(f"{described(tmp_path)} {line}") == []


def test_a_mixture_over_tensor_ranks_shares_sequences(tmp_path: Path) -> None:
    model = described(tmp_path, num_experts=6)
    line = f"{model} --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2"
    says = ["= 2 with sequence_parallel = false: ", " 6 experts "]
    blames(broken(line), "tensor_model_parallel_size", *says)
    assert broken(f"{line} --sequence-parallel") == []
    assert broken(model) == []
    critic = "--critic-num-gpus 2 --critic-tensor-model-parallel-size 2"
    blames(broken(f"{model} {critic}"), "critic_num_gpus", "tensor_model_parallel_size", *says)


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
    blames(broken(f"{model} {line} 4"), "tensor_model_parallel_size", "= 4 ", f" {bad} of {tmp_path}/config.json")
    assert broken(f"{model} {line} 2") == []


def test_experts_may_be_narrower_than_dense_layers_that_are_not_there(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 10}
    line = "--actor-num-gpus-per-node 4 --sequence-parallel --tensor-model-parallel-size 4"
    assert broken(f"{described(tmp_path, **sizes)} {line}") == []
