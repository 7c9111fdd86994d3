"""Rows and recomputation that a run on GPUs does not name: the fastest that fit the memory of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli import memory
from slime_core.cli.main import main
from slime_core.cli.memory import chosen, with_memory_defaults
from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load
from slime_core.plugins.activation import activate

QWEN: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QWEN_SIZES = {"model.embed_tokens.weight": 388_956_160, "model.layers.0.mlp.gate_proj.weight": 3_633_511_936}
MIXTURE: Mapping[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "tie_word_embeddings": False,
}
MIXTURE_SIZES = {
    "model.embed_tokens.weight": 311_164_928,
    "lm_head.weight": 311_164_928,
    "model.layers.0.self_attn.q_proj.weight": 918_763_520,
    "model.layers.0.mlp.experts.0.gate_proj.weight": 28_991_029_248,
}
"""Parameters of Qwen3-4B and Qwen3-30B-A3B by ``slime models show``, all of a kind in one weight."""

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CUT = "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 2"


@pytest.fixture(autouse=True)
def no_gpus_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_smallest_here", lambda: None)


def checkpoint(folder: Path, config: Mapping[str, Any] = QWEN, sizes: Mapping[str, int] = QWEN_SIZES) -> Path:
    """A folder with these sizes, whose weights are holes in a file."""
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [size], "data_offsets": [end, end + 2 * size]}
        end += 2 * size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def resolved(folder: Path, line: str) -> Resolved:
    words = ["--advantage-estimator", "grpo", "--device", "cuda", "--hf-checkpoint", str(folder), *line.split()]
    return with_memory_defaults(load(words, check_rules=False), activate(["grpo"]).registry)


def flags(folder: Path, line: str) -> str:
    """What was chosen, as flags."""
    return "".join(chosen(resolved(folder, line))).removeprefix("memory: ").partition(" (")[0]


@pytest.mark.parametrize(
    ("gpus", "memory", "found"),
    [
        (1, 80, f"--max-tokens-per-gpu 4096 {FULL}"),
        (2, 80, "--max-tokens-per-gpu 4096"),
        (8, 60, "--max-tokens-per-gpu 4096"),
        (8, 80, ""),
        (8, 36, "--max-tokens-per-gpu 4096 " + FULL),
        (2, 64, "--max-tokens-per-gpu 2048"),
        (8, 40, "--max-tokens-per-gpu 2048 --recompute-granularity selective --recompute-modules mlp"),
        (8, 24, ""),
    ],
)
def test_a_4b_model_gets_the_fastest_rows_and_recomputation_that_fit(tmp_path, gpus, memory, found):
    line = f"--actor-num-gpus-per-node {gpus} --gpu-memory-gib {memory}"
    assert flags(checkpoint(tmp_path), line) == found


def test_a_mixture_on_eight_gpus(tmp_path):
    folder = checkpoint(tmp_path, MIXTURE, MIXTURE_SIZES)
    line = f"--actor-num-gpus-per-node 8 --gpu-memory-gib 80 {CUT}"
    assert flags(folder, line) == "--max-tokens-per-gpu 2048"
    assert flags(folder, line.replace("80", "82")) == "--max-tokens-per-gpu 4096"
    # Buckets of weights take more than activations and logits, so recomputation would save nothing.
    assert flags(folder, line.replace("80", "76")) == ""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("--max-tokens-per-gpu 8192", "--recompute-granularity selective --recompute-modules mlp"),
        ("--max-tokens-per-gpu 2048", ""),
        (FULL, ""),
        ("--recompute-activations", "--max-tokens-per-gpu 4096"),
        ("--hard-token-budget", "--recompute-granularity selective --recompute-modules mlp"),
        ("--micro-batch-size 8", "--recompute-granularity selective --recompute-modules mlp"),
        # A sample that is longer than a row gets one of its own, so that shorter rows hold no less.
        ("--rollout-max-response-len 8192", "--recompute-granularity selective --recompute-modules mlp"),
    ],
)
def test_what_a_run_gives_stays(tmp_path, given, found):
    folder = checkpoint(tmp_path)
    assert flags(folder, f"--actor-num-gpus-per-node 8 --gpu-memory-gib 70 {given}") == found


def test_what_was_chosen_fits_and_is_recorded_so_that_a_resumed_run_has_it(tmp_path):
    folder = checkpoint(tmp_path)
    found = resolved(folder, "--gpu-memory-gib 80")
    written = to_toml(found)
    assert "max_tokens_per_gpu = 4096  # default that" in written
    assert 'recompute_granularity = "full"  # default that' in written
    (tmp_path / "run.toml").write_text(written)
    again = load(["--config", str(tmp_path / "run.toml")], check_rules=False)
    assert again.config == found.config
    assert list(chosen(with_memory_defaults(again, activate(["grpo"]).registry))) == []


def test_a_critic_on_the_same_gpus_counts(tmp_path):
    folder, registry = checkpoint(tmp_path), activate(["grpo", "ppo"]).registry
    words = f"--hf-checkpoint {folder} --device cuda --gpu-memory-gib 80 --actor-num-gpus-per-node 8"
    alone, beside = (
        with_memory_defaults(load([*words.split(), "--advantage-estimator", one], check_rules=False), registry)
        for one in ("grpo", "ppo")
    )
    assert alone.config.megatron.given == ()
    assert beside.config.learner.max_tokens_per_gpu == 2048


@pytest.mark.parametrize("line", ["", "--gpu-memory-gib 80 --debug-rollout-only"])
def test_nothing_is_chosen_where_the_memory_is_unknown_or_nothing_trains(tmp_path, line):
    assert flags(checkpoint(tmp_path), line) == ""


def test_the_command_says_what_it_chose_on_gpus_alone(tmp_path, capsys):
    words = ["--plugin", "grpo", "--hf-checkpoint", str(checkpoint(tmp_path)), "--gpu-memory-gib", "80"]
    assert main(["config", "show", *words, "--device", "cuda"]) == 0
    assert "max_tokens_per_gpu = 4096  # default that" in capsys.readouterr().out
    assert main(["config", "show", *words, "--device", "cpu"]) == 0
    assert "max_tokens_per_gpu = 8192  # default\n" in capsys.readouterr().out
