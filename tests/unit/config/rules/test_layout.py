"""The rules of layouts, shared devices, transports and the parity gate: the numbers, and what is accepted instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.embedded import ARITHMETIC
from slime_core.config.load import load

MODEL = ARITHMETIC / "model" / "config.json"


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


def described(folder: Path, **values: object) -> str:
    """Words that name a model of these values."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], **values}))
    return f"--hf-checkpoint {folder} --rollout-max-response-len 8"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "--actor-num-gpus-per-node 3 --pipeline-model-parallel-size 3 --tensor-model-parallel-size 2",
            "tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size = 2 x 3 x 1 = 6 ranks "
            "hold one copy of the model, but actor_num_nodes x actor_num_gpus_per_node = 1 x 3 = 3 is no multiple of "
            "6; give 6 ranks or a multiple, or smaller sizes",
        ),
        (
            "--actor-num-gpus-per-node 4 --context-parallel-size 2 --rollout-batch-size 1 --n-samples-per-prompt 1",
            "1 samples an optimizer step, for 4 learner ranks / 2 a copy of the model = 2 data-parallel ranks; each "
            "needs at least one, so raise global_batch_size",
        ),
        (
            "--sequence-parallel true",
            "sequence_parallel shares activations between tensor-parallel ranks, and tensor_model_parallel_size = 1; "
            "give it at least 2, or leave sequence_parallel out",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 3",
            "num_virtual_stages_per_pipeline_rank = 3 interleaves pipeline ranks, and pipeline_model_parallel_size = "
            "1; give it at least 2, or leave the virtual stages out",
        ),
        (
            "--tensor-model-parallel-size 8 --actor-num-gpus-per-node 8",
            f"tensor_model_parallel_size = 8 does not divide num_attention_heads = 4 of {MODEL}; accepted: 1, 2, 4",
        ),
        (
            "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3",
            "tensor_model_parallel_size = 3 does not divide num_attention_heads = 4, vocab_size = 16, "
            f"num_key_value_heads = 2, intermediate_size = 128 of {MODEL}; accepted: 1, 2, 4",
        ),
        (
            "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 3",
            "rollout_num_gpus_per_engine = 3 does not divide num_attention_heads = 4, num_key_value_heads = 2, "
            f"intermediate_size = 128 of {MODEL}; accepted: 1, 2, 4",
        ),
        (
            "--pipeline-model-parallel-size 5 --actor-num-gpus-per-node 5",
            f"pipeline_model_parallel_size = 5 chunks of a model with num_hidden_layers = 3 in {MODEL}; "
            "accepted: at most 4, so that every chunk but the last has a layer",
        ),
        (
            "--expert-model-parallel-size 2 --actor-num-gpus-per-node 2",
            f"expert_model_parallel_size = 2, but {MODEL} describes a model without experts; leave it out",
        ),
        (
            "--colocate true --rollout-num-gpus 3 --actor-num-gpus-per-node 2",
            "colocate: rollout_num_gpus = 3 is more than the learner's devices, actor_num_nodes x "
            "actor_num_gpus_per_node = 1 x 2 = 2, and engines sit on those; give at most 2",
        ),
        (
            "--update-weight-transport tensor --actor-num-nodes 2",
            "update_weight_transport = tensor shares memory inside the machine of the first learner rank, and "
            "actor_num_nodes = 2 has engines on others; choose disk, or without colocate distributed",
        ),
        (
            "--update-weight-disk-dir /dev/null/weights --update-weight-transport disk",
            "update_weight_disk_dir: /dev/null is a file, so /dev/null/weights cannot be a folder; choose another with "
            "--update-weight-disk-dir",
        ),
        (
            "--parity-mean-tolerance 0.01",
            "parity_mean_tolerance = 0.01 is above parity_max_tolerance = 0.001, and no mean is above its largest "
            "part; give both (in float32 they are 0.0001 and 0.001 by default)",
        ),
        (
            "--sglang-context-length 4096",
            "sglang_context_length = 4096, but the model reads at most max_position_embeddings = 128 tokens; give at "
            "most 128, or leave it out",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_arithmetic(line: str, says: str) -> None:
    assert broken_rules(line) == [says]


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
            "does not divide its 6 experts; accepted: 1, 2, 3, 6",
        ),
        (
            "--expert-model-parallel-size 3 --actor-num-gpus-per-node 4",
            "does not divide the 4 x 1 = 4 data- and context-parallel ranks that experts are shared over; accepted: 1, "
            "2, 4, or more learner ranks",
        ),
    ],
)
def test_experts_divide_over_the_replicas(line: str, says: str, tmp_path: Path) -> None:
    (message,) = broken_rules(f"{described(tmp_path, num_experts=6)} {line}")
    assert message.endswith(says)


def test_layers_need_not_divide_but_every_chunk_has_one(tmp_path: Path) -> None:
    pipeline = "--pipeline-model-parallel-size 2 --actor-num-gpus-per-node 2 --num-virtual-stages-per-pipeline-rank"
    line = described(tmp_path, num_hidden_layers=5)
    assert broken_rules(f"{line} {pipeline} 3") == []
    (message,) = broken_rules(f"{line} {pipeline} 4")
    assert message.startswith(
        "pipeline_model_parallel_size x num_virtual_stages_per_pipeline_rank = 2 x 4 = 8 chunks of a model with "
        "num_hidden_layers = 5 in "
    )


def test_fewer_key_value_heads_than_ranks_are_accepted_where_each_rank_gets_one(tmp_path: Path) -> None:
    line = described(tmp_path, num_attention_heads=12, num_key_value_heads=3)
    assert broken_rules(f"{line} --tensor-model-parallel-size 6 --actor-num-gpus-per-node 6") == []
    (message,) = broken_rules(f"{line} --tensor-model-parallel-size 4 --actor-num-gpus-per-node 4")
    assert "num_key_value_heads = 3" in message
    assert message.endswith("accepted: 1, 3, 6, 12")


def test_what_config_json_does_not_say_is_not_judged(tmp_path: Path) -> None:
    line = "--tensor-model-parallel-size 7 --pipeline-model-parallel-size 5 --actor-num-gpus-per-node 35"
    assert broken_rules(f"{described(tmp_path)} {line}") == []


def test_a_mixture_over_tensor_ranks_shares_sequences(tmp_path: Path) -> None:
    line = f"{described(tmp_path, num_experts=6)} --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2"
    assert broken_rules(line) == [
        f"tensor_model_parallel_size = 2 with sequence_parallel = false: {tmp_path}/config.json describes a mixture of "
        "6 experts, and Megatron trains one over tensor-parallel ranks only where they share sequences too; give "
        "sequence_parallel = true, or tensor_model_parallel_size = 1"
    ]
    assert broken_rules(f"{line} --sequence-parallel") == []
    assert broken_rules(described(tmp_path, num_experts=6)) == []
    (of_critic,) = broken_rules(
        f"{described(tmp_path, num_experts=6)} --critic-num-gpus 2 --critic-tensor-model-parallel-size 2"
    )
    assert of_critic.startswith("critic: critic_tensor_model_parallel_size = 2 with critic_sequence_parallel = false: ")
    assert of_critic.endswith("; give critic_sequence_parallel = true, or critic_tensor_model_parallel_size = 1")


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
        f"tensor_model_parallel_size = 4 does not divide {bad} of {tmp_path}/config.json; accepted: 1, 2"
    ]
    assert broken_rules(f"{model} {line} 2") == []


def test_experts_may_be_narrower_than_dense_layers_that_are_not_there(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "moe_intermediate_size": 8, "intermediate_size": 10}
    line = "--actor-num-gpus-per-node 4 --sequence-parallel --tensor-model-parallel-size 4"
    assert broken_rules(f"{described(tmp_path, **sizes)} {line}") == []
