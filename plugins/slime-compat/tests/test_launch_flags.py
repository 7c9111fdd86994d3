"""Flags with which launch scripts describe a model: accepted if they are true, and without effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_compat.flags import advice
from slime_compat.launch_flags import WITHOUT_EFFECT, Value, always, checks, describing, expected
from slime_core.config.engine_flags import megatron_settings
from slime_core.config.load import load
from slime_core.config.schema import RunConfig
from slime_core.config.settings import core_settings
from slime_core.errors import ConfigError

MODEL_ARGS = """
    --swiglu --num-layers 3 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 16 --use-rotary-position-embeddings --disable-bias-linear --qk-layernorm
    --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 10000 --vocab-size 16
    --untie-embeddings-and-output-weights
    --no-position-embedding --position-embedding-type rope --rotary-percent 1 --make-vocab-size-divisible-by 8
    --attention-dropout 0.0 --hidden-dropout 0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --no-masked-softmax-fusion --no-gradient-accumulation-fusion --use-distributed-optimizer --optimizer adam
"""
"""As in slime's launch scripts, for the built-in model."""

SCRIPTS = """
    --use-dynamic-batch-size --balance-data --attention-backend flash --attention-backend fused --seq-length 32768
    --expert-tensor-parallel-size 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --context-parallel-size 1 --expert-model-parallel-size 1 --optimizer adam --loss-type policy_loss
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --train-backend megatron --megatron-to-hf-mode bridge --rollout-data-transport object-store
    --update-weight-mode full --distributed-backend nccl --distributed-timeout-minutes 10 --num-gpus-per-node 8
    --use-rollout-entropy --log-probs-max-tokens-per-gpu 9216 --rollout-shuffle
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0
    --moe-grouped-gemm --moe-permute-fusion --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall
    --no-rope-fusion --no-gradient-accumulation-fusion --no-bias-swiglu-fusion
"""
"""Flags of slime's launch scripts for every model, with values that a run has anyway."""

MIXTURE_ARGS = """
    --moe-ffn-hidden-size 32 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall
    --moe-layer-freq [1,1] --num-experts 8 --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-aux-loss-coeff 0
    --moe-router-topk 2 --disable-bias-linear --qk-layernorm --swiglu
"""
"""As in slime's launch script of Qwen3-30B-A3B, without the fused kernels."""


def read(*words: str) -> RunConfig:
    return load(["--advantage-estimator", "grpo", "--rollout-max-response-len", "8", *words]).config


def mistakes(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read(*words)
    return [text.removeprefix("  - ") for text in str(refused.value).splitlines() if text.startswith("  - ")]


@pytest.fixture
def mixture(tmp_path: Path) -> tuple[str, str]:
    """The flags of a checkpoint with experts."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return "--hf-checkpoint", str(tmp_path)


def test_the_arguments_of_a_launch_script_are_accepted_and_change_nothing(mixture: tuple[str, str]) -> None:
    assert read(*MODEL_ARGS.split()) == read()
    assert read(*mixture, *MIXTURE_ARGS.split()) == read(*mixture)


@pytest.mark.parametrize("line", [f"--{flag.strip()}" for flag in SCRIPTS.split("--") if flag.strip()])
def test_a_default_of_slimes_scripts_is_accepted_and_changes_nothing(line: str) -> None:
    same = {"expert_tensor_parallel_size": None}
    changed, unchanged = read(*line.split()), read()
    assert changed.parallel.model_copy(update=same) == unchanged.parallel.model_copy(update=same)
    assert changed.model_copy(update={"parallel": unchanged.parallel}) == unchanged


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--num-layers 5", "--num-layers 5"),
        ("--no-swiglu", "--no-swiglu"),
        ("--num-experts 8", "--num-experts 8"),
        ("--rope-fusion", "false"),
        ("--hidden-size", "whole number"),
        ("--hidden-size 64 64", "whole number"),
        ("--rotary-base ten", "a number"),
        ("--swiglu true", "no value"),
        ("--loss-type sft_loss", "--advantage-estimator"),
        ("--update-weight-mode delta", "full"),
        ("--train-backend fsdp", "megatron"),
        ("--distributed-timeout-minutes 30", "10"),
        ("--use-dynamic-batch-size true", "no value"),
        ("--moe-router-load-balancing-type sinkhorn", "seq_aux_loss"),
        ("--attention-backend triton", "flash"),
        ("--seq-length", "whole number"),
        ("--expert-tensor-parallel-size 2", "expert_model_parallel_size"),
    ],
)
def test_a_value_that_is_not_true_is_refused(line: str, named: str) -> None:
    flag = line.split()[0].strip("-").split("-")[0]
    assert any(flag in mistake and named in mistake for mistake in mistakes(*line.split()))


@pytest.mark.parametrize(
    ("line", "named"),
    [("--moe-router-topk 8", "2"), ("--moe-router-pre-softmax", "false"), ("--moe-layer-freq [0,1]", "[1,1]")],
)
def test_arguments_of_another_mixture_are_mistakes(mixture: tuple[str, str], line: str, named: str) -> None:
    (mistake,) = mistakes(*mixture, *line.split())
    assert f"config.json says {named}" in mistake


def test_a_checkpoint_without_config_is_reported_once(tmp_path: Path) -> None:
    (mistake,) = mistakes("--hf-checkpoint", str(tmp_path), "--num-layers", "3", "--swiglu")
    assert f"hf_checkpoint: {tmp_path}" in mistake


def test_each_name_is_in_one_table_and_no_setting() -> None:
    names = [*describing(), *always(), *WITHOUT_EFFECT]
    assert len(names) == len({*names})
    refused = {flag for flag, what in advice().items() if isinstance(what, str)}
    assert not refused & checks().keys()
    settings = {setting.flag for setting in (*core_settings().values(), *megatron_settings().values())}
    assert not refused.union(checks()) & settings


GLM = {"model_type": "glm4", "rope_theta": 1e4}
YARN = {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}}
LLAMA = {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}
OLDER = {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}
MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
}


EXPERTS = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "multi_latent_attention": True,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": None,
    "moe_layer_freq": "[0,1,1,1]",
}


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (GLM, {"post_mlp_layernorm": True, "rotary_interleaved": True, "rotary_scaling_factor": None}),
        (YARN, {"rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0, "use_rope_scaling": False}),
        (LLAMA, {"rotary_scaling_factor": 8.0, "rotary_interleaved": False, "use_rope_scaling": True}),
        (OLDER, {"untie_embeddings_and_output_weights": False, "rotary_base": 500_000.0, "rotary_percent": 0.5}),
        (MIXTURE, EXPERTS),
        (QWEN, {"moe_router_pre_softmax": False, "moe_router_score_function": "softmax"}),
        ({**QWEN, "norm_topk_prob": False}, {"moe_router_pre_softmax": True}),
        ({"rope_theta": None}, {"rotary_base": None}),
        ({"hidden_size": "64", "num_attention_heads": 4}, {"kv_channels": None}),
        ({"num_experts": 2, "num_hidden_layers": "2"}, {"moe_layer_freq": None}),
    ],
)
def test_the_values_of_a_config(config: dict[str, Any], values: dict[str, Value | None]) -> None:
    assert {name: expected(name, "", config) for name in values} == values


@pytest.mark.parametrize("pattern", ["([0]*1+[1]*3)", "[0,1,1,1]", "[0]*1 + [1]*3"])
def test_a_pattern_of_layers_may_be_written_in_several_ways(pattern: str) -> None:
    assert expected("moe_layer_freq", pattern, MIXTURE) == pattern


@pytest.mark.parametrize("pattern", ["1", "[1]*4", "__import__('os')", "[0]*99999999"])
def test_another_pattern_of_layers_does_not_agree(pattern: str) -> None:
    assert expected("moe_layer_freq", pattern, MIXTURE) == "[0,1,1,1]"


@pytest.mark.parametrize(("size", "divisor", "result"), [(300, 128, 1), (300, 100, 100), ([1], 128, None)])
def test_a_vocabulary_is_not_padded(size: object, divisor: int, result: int | None) -> None:
    assert expected("make_vocab_size_divisible_by", divisor, {"vocab_size": size}) == result
