"""What launch scripts say of a model is accepted where it is true, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_compat.flags import advice
from slime_compat.launch_flags import Value, always, checks, describing, expected, without_effect
from slime_core.config.engine_flags import engine_settings
from slime_core.config.load import load
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
"""As in slime's launch scripts, for the embedded checkpoint."""

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

QWEN_MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "hidden_act": "silu",
}

MIXTURE_ARGS = """
    --moe-ffn-hidden-size 32 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall
    --moe-layer-freq [1,1] --num-experts 8 --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-aux-loss-coeff 0
    --moe-router-topk 2 --disable-bias-linear --qk-layernorm --swiglu
"""
"""As in slime's launch script of Qwen3-30B-A3B, but for the fused kernels."""


def mistakes_of(line: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(["--advantage-estimator", "grpo", *line.split()])
    return [text.removeprefix("  - ") for text in str(caught.value).splitlines() if text.startswith("  - ")]


def test_the_arguments_of_a_launch_script_are_accepted_and_change_nothing() -> None:
    plain = ["--advantage-estimator", "grpo"]
    assert load([*plain, *MODEL_ARGS.split()]).config == load(plain).config


@pytest.mark.parametrize(
    ("line", "mistake"),
    [
        ("--num-layers 5", "--num-layers 5"),
        ("--no-swiglu", "--no-swiglu"),
        ("--num-experts 8", "--num-experts 8"),
        ("--rope-fusion", "slime always uses false"),
        ("--hidden-size", "--hidden-size: accepted: a whole number"),
        ("--hidden-size 64 64", "--hidden-size 64 64: accepted: a whole number"),
        ("--rotary-base ten", "--rotary-base ten: accepted: a number"),
        ("--swiglu true", "--swiglu true: accepted: no value"),
    ],
)
def test_what_is_not_true_is_refused(line: str, mistake: str) -> None:
    (found,) = mistakes_of(line)
    assert mistake in found


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
"""Flags that slime's launch scripts give whatever the model, each with a value that is a run's own."""


@pytest.mark.parametrize("line", [f"--{flag.strip()}" for flag in SCRIPTS.split("--") if flag.strip()])
def test_a_default_of_slimes_scripts_is_accepted_and_changes_nothing(line: str) -> None:
    plain = ["--advantage-estimator", "grpo"]
    found, wanted = load([*plain, *line.split()]).config, load(plain).config
    changed = {"expert_tensor_parallel_size": None}
    assert found.model_copy(update={"parallel": found.parallel.model_copy(update=changed)}) == wanted.model_copy(
        update={"parallel": wanted.parallel.model_copy(update=changed)}
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
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
def test_another_value_of_such_a_flag_is_refused(line: str, named: str) -> None:
    found = mistakes_of(line)
    assert any(line.split()[0].strip("-").split("-")[0] in one and named in one for one in found)


GLM = {"model_type": "glm4", "rope_theta": 1e4}
YARN = {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}}
LLAMA = {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}}


@pytest.mark.parametrize(
    ("name", "described", "value"),
    [
        ("post_mlp_layernorm", GLM, True),
        ("rotary_interleaved", GLM, True),
        ("rotary_interleaved", LLAMA, False),
        ("rotary_scaling_factor", YARN, 40.0),
        ("mscale_all_dim", YARN, 1.0),
        ("rotary_scaling_factor", LLAMA, 8.0),
        ("use_rope_scaling", LLAMA, True),
        ("use_rope_scaling", YARN, False),
        ("rotary_scaling_factor", GLM, None),
    ],
)
def test_positions_and_norms_are_described_as_in_the_config(name: str, described: Any, value: object) -> None:
    assert expected(name, "other", described) == value


@pytest.mark.parametrize("key", ["num_layers", "hidden_dropout"])
def test_in_a_file_such_a_name_is_refused(key: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[megatron]\n{key} = 3\n")
    (found,) = mistakes_of(f"--config {file}")
    assert f"{key}: no setting" in found


def test_each_name_is_in_one_table_and_no_setting() -> None:
    names = [*describing(), *always(), *without_effect()]
    assert len(names) == len({*names})
    refused = {flag for flag, what in advice().items() if isinstance(what, str)}
    assert not refused & checks().keys()
    settings = {setting.flag for setting in (*core_settings().values(), *engine_settings("megatron").values())}
    assert not refused.union(checks()) & settings


def test_a_checkpoint_without_config_is_reported_once(tmp_path: Path) -> None:
    (only,) = mistakes_of(f"--hf-checkpoint {tmp_path} --num-layers 3 --swiglu")
    assert f"hf_checkpoint: {tmp_path}" in only


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts", 8),
        ("moe_router_topk", 2),
        ("moe_shared_expert_intermediate_size", 64),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_topk_scaling_factor", 2.5),
        ("multi_latent_attention", True),
        ("qk_pos_emb_head_dim", 8),
        ("v_head_dim", None),
    ],
)
def test_a_mixture_of_experts_is_described_as_in_its_config(name: str, value: object) -> None:
    assert expected(name, "other", MIXTURE) == value


@pytest.mark.parametrize("normed", [True, False])
def test_a_qwen_mixture_norms_the_weights_of_its_experts_or_takes_them_from_all(normed: bool) -> None:
    described = {"model_type": "qwen3_moe", "num_local_experts": 8, "norm_topk_prob": normed}
    assert expected("moe_router_pre_softmax", True, described) is not normed
    assert expected("moe_router_score_function", "softmax", described) == "softmax"


def test_a_sigmoid_scores_each_expert_before_some_are_chosen() -> None:
    assert expected("moe_router_pre_softmax", False, MIXTURE) is True


def test_the_arguments_of_a_mixtures_launch_script_agree_with_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_MIXTURE))
    line = ["--advantage-estimator", "grpo", "--rollout-max-response-len", "8", "--hf-checkpoint", str(tmp_path)]
    assert load([*line, *MIXTURE_ARGS.split()]).config == load(line).config


@pytest.mark.parametrize(
    ("line", "says"),
    [("--moe-router-topk 8", "2"), ("--moe-router-pre-softmax", "false"), ("--moe-layer-freq [0,1]", "[1,1]")],
)
def test_arguments_of_another_mixture_are_mistakes(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_MIXTURE))
    (found,) = mistakes_of(f"--rollout-max-response-len 8 --hf-checkpoint {tmp_path} {line}")
    assert f"config.json says {says}" in found


@pytest.mark.parametrize("pattern", ["([0]*1+[1]*3)", "[0,1,1,1]", "[0]*1 + [1] * 3".replace(" * ", "*")])
def test_a_pattern_of_layers_is_read(pattern: str) -> None:
    assert expected("moe_layer_freq", pattern, MIXTURE) == pattern


@pytest.mark.parametrize("pattern", ["1", "[1]*4", "__import__('os')", "[0]*99999999"])
def test_another_pattern_of_layers_does_not_agree(pattern: str) -> None:
    assert expected("moe_layer_freq", pattern, MIXTURE) == "[0,1,1,1]"


def test_tied_embeddings_of_an_older_config_and_its_rope_are_read() -> None:
    described = {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True}
    assert expected("untie_embeddings_and_output_weights", True, described) is False
    assert expected("rotary_base", 500_000.0, described) == 500_000.0
    assert expected("rotary_percent", 1.0, described) == 0.5


def test_a_vocabulary_is_not_padded() -> None:
    assert expected("make_vocab_size_divisible_by", 128, {"vocab_size": 300}) == 1
    assert json.dumps(expected("make_vocab_size_divisible_by", 100, {"vocab_size": 300})) == "100"


@pytest.mark.parametrize(
    ("name", "value", "described"),
    [
        ("rotary_base", 1e4, {"rope_theta": None}),
        ("kv_channels", 64, {"hidden_size": "64", "num_attention_heads": 4}),
        ("make_vocab_size_divisible_by", 128, {"vocab_size": [1]}),
        ("moe_layer_freq", "1", {"num_experts": 2, "num_hidden_layers": "2"}),
    ],
)
def test_an_odd_config_json_yields_nothing(name: str, value: Value, described: dict[str, object]) -> None:
    assert expected(name, value, described) is None
