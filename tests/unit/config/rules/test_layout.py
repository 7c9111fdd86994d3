"""The rules of layouts and of the critic: the numbers, and what is accepted instead."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC
from tests.unit.config.broken import blames, broken, described

SIX = {"num_experts": 6}
FIVE = {"num_hidden_layers": 5}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 3}
WIDE = {"num_experts": 4, "moe_intermediate_size": 6, "intermediate_size": 10, "num_attention_heads": 4}
DENSE_TOO = WIDE | {"mlp_only_layers": [0]}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}
WHOLE = {"num_experts": 128, "num_attention_heads": 32, "num_key_value_heads": 4}
TENSOR = "--tensor-model-parallel-size"
RANKS = "--actor-num-gpus-per-node"
STAGES = f"{RANKS} 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank"
SPREAD = f"{RANKS} 8 {TENSOR} 4 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size"
REPLAY = "--use-routing-replay --use-rollout-logprobs"
NO_SEQUENCES = "= 2 with sequence_parallel = false: "
WIDTHS = " moe_intermediate_size = 6, intermediate_size = 10 of "
EXPERTS = "expert_model_parallel_size x expert_tensor_parallel_size = "


@pytest.mark.parametrize(
    ("model", "line", "key", "names"),
    [
        ({"hidden_size": 8}, "--balance-by-flops", "balance_by_flops", ["config.json", "num_attention_heads, "]),
        ({}, "--hard-token-budget", "hard_token_budget", ["--rollout-max-prompt-len"]),
        (SIX, f"{RANKS} 2 {TENSOR} 2", "tensor_model_parallel_size", [NO_SEQUENCES, " 6 experts "]),
        (SIX, "--critic-num-gpus 2 --critic-tensor-model-parallel-size 2", "critic_num_gpus", [NO_SEQUENCES]),
        (WHOLE, f"{SPREAD} 4", "expert_model_parallel_size", [" = 8 x 4 = 32 "]),
        (FIVE, f"{STAGES} 4", "pipeline_model_parallel_size", [" = 2 x 4 = 8 ", "num_hidden_layers = 5", "6"]),
        (HEADS, f"{RANKS} 4 {TENSOR} 4", "tensor_model_parallel_size", ["= 4 ", "num_key_value_heads = 3"]),
        # Tensor ranks share the width of the layers that are there.
        *[
            (model, f"{RANKS} 4 --sequence-parallel {TENSOR} 4", "tensor_model_parallel_size", ["= 4 ", width])
            for model, width in [
                (WIDE, " moe_intermediate_size = 6 of "),
                (WIDE | {"mlp_only_layers": [], "decoder_sparse_step": 1}, " moe_intermediate_size = 6 of "),
                (DENSE_TOO, WIDTHS),
                (WIDE | {"decoder_sparse_step": 2}, WIDTHS),
            ]
        ],
        (
            ROUTED,
            "--use-rollout-routing-replay --prefill-num-servers 1 --rollout-num-gpus 2",
            "prefill_num_servers",
            ["worker_type", "use_rollout_routing_replay"],
        ),
        (ROUTED, REPLAY, "use_routing_replay", ["use_rollout_logprobs"]),  # no pass records before training
    ],
)
def test_what_a_model_cannot_do_is_refused(
    model: dict[str, object], line: str, key: str, names: list[str], tmp_path: Path
) -> None:
    blames(broken(f"{described(tmp_path, **model)} {line}"), key, *names)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (SIX, ""),
        (SIX, f"{RANKS} 2 {TENSOR} 2 --sequence-parallel"),
        (WHOLE, f"{SPREAD} 1"),
        (FIVE, f"{STAGES} 3"),
        (HEADS, f"{RANKS} 6 {TENSOR} 6"),
        ({}, f"{RANKS} 35 {TENSOR} 7 --pipeline-model-parallel-size 5"),  # sizes that config.json lacks
        (WIDE, f"{RANKS} 4 --sequence-parallel {TENSOR} 2"),
        (DENSE_TOO, f"{RANKS} 4 --sequence-parallel {TENSOR} 2"),
        (WIDE | {"moe_intermediate_size": 8}, f"{RANKS} 4 --sequence-parallel {TENSOR} 4"),
        (ROUTED, "--use-routing-replay"),
        (ROUTED, "--use-rollout-routing-replay"),
        # The backward pass records where it runs layers again.
        (ROUTED, f"{REPLAY} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (ROUTED, f"{REPLAY} --recompute-activations"),
    ],
)
def test_what_a_model_can_do_is_accepted(model: dict[str, object], line: str, tmp_path: Path) -> None:
    assert broken(f"{described(tmp_path, **model)} {line}") == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("4", "expert_model_parallel_size = 4 .* 6 experts"),
        ("3", f"{EXPERTS}3 x 1 = 3 .* 4 ranks"),
        ("3 --tensor-model-parallel-size 2 --sequence-parallel", f"{EXPERTS}3 x 2 = 6 .* 4 ranks"),
        ("3 --expert-tensor-parallel-size 3", f"{EXPERTS}3 x 3 = 9 .* 4 ranks"),
    ],
)
def test_experts_divide_over_the_ranks_of_a_stage(line: str, says: str, tmp_path: Path) -> None:
    model = f"{described(tmp_path, num_experts=6)} --actor-num-gpus-per-node 4"
    (mistake,) = broken(f"{model} --expert-model-parallel-size {line}")
    assert mistake.key == "expert_model_parallel_size"
    assert re.match(says, str(mistake))


# --- Critic -----------------------------------------------------------------------------------------------------------


def test_a_separate_critic_has_a_layout_of_its_own() -> None:
    sizes = "--critic-tensor-model-parallel-size 2 --critic-pipeline-model-parallel-size 2"
    actor = "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 4 --sequence-parallel"
    assert broken(f"{actor} --critic-num-gpus 4 {sizes}") == []
    # Settings that are not given are those of the actor, except for those that only some layouts have.
    assert broken(f"{actor} --critic-num-gpus 1 --critic-tensor-model-parallel-size 1") == []


def test_a_critic_of_another_model_is_refused_and_its_layout_is_that_of_the_model_that_is_built(tmp_path: Path) -> None:
    model = ARITHMETIC / "model"
    found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    blames(broken(f"--critic-load {tmp_path}"), "critic_load", f"{tmp_path} ", "config.json")
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
def test_a_separate_critic_shares_its_experts_where_its_ranks_divide(line: str, experts: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "num_experts": 4}')
    line += f" --expert-model-parallel-size 2 --actor-num-gpus-per-node 2 --hf-checkpoint {tmp_path}"
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    assert config.critic_parallel.expert_model_parallel_size == experts
    assert [mistake for mistake in broken(line) if "expert" in str(mistake)] == []
