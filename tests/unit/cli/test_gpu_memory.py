"""What slime check says of the memory of a GPU, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli import gpu_memory
from slime_core.cli.needs import GIB, Needs
from slime_core.config.load import load
from slime_core.config.schema import RunConfig

HIDDEN, LAYERS, VOCAB = 2560, 36, 151936
QWEN: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 9728,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SIZES = {
    "model.embed_tokens.weight": HIDDEN * VOCAB,
    "model.layers.0.mlp.gate_proj.weight": 4_022_468_096 - HIDDEN * VOCAB,
}
"""Qwen3-4B: 4,022,468,096 parameters."""


@pytest.fixture(autouse=True)
def no_gpus_from_outside(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    gpu_memory._smallest_here.cache_clear()
    yield
    gpu_memory._smallest_here.cache_clear()


def planned(folder: Path, line: str = "") -> tuple[RunConfig, Needs]:
    (folder / "config.json").write_text(json.dumps(QWEN))
    argv = ["--advantage-estimator", "toy", "--hf-checkpoint", str(folder), "--device", "cuda", *line.split()]
    config = load(argv, check_rules=False).config
    ranks = config.num_learner_ranks
    needs = Needs(parameters=sum(SIZES.values()), item=2, ranks=ranks, copies=ranks, engines=1, roles=0, buffer=0)
    return config, needs


def mistakes(folder: Path, line: str) -> list[str]:
    config, needs = planned(folder, line)
    return list(gpu_memory.mistakes(config, gpu_memory.model_size(config, SIZES), needs))


def test_the_parts_of_a_4b_model_by_hand(tmp_path):
    config, needs = planned(tmp_path, "--max-tokens-per-gpu 8192")
    size = gpu_memory.model_size(config, SIZES)
    assert size is not None
    kept = 6 * HIDDEN + 6 * 4096 + 3 * 1024 + 8 * 128 + 5 * 9728
    assert size.kept == kept
    found = gpu_memory.of_learner(config, size, needs)
    assert [found.weights, found.gradients, found.optimizer] == [n * 4_022_468_096 for n in (2, 4, 12)]
    assert found.activations == LAYERS * kept * 8192 * 2
    assert found.logits == 8192 * VOCAB * 8


def test_a_run_that_cannot_fit_names_the_largest_part_and_what_fits(tmp_path):
    (message,) = mistakes(tmp_path, "--max-tokens-per-gpu 8192 --gpu-memory-gib 80 --actor-num-gpus-per-node 8")
    assert message.startswith("GPU memory: a learner rank needs 88.")
    assert "most of it activations (50." in message
    assert "and 90% of 80 GiB are 72.0; this fits (40." in message
    assert message.endswith("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")


def test_the_flags_that_it_names_fit(tmp_path):
    (message,) = mistakes(tmp_path, "--max-tokens-per-gpu 8192 --gpu-memory-gib 80 --actor-num-gpus-per-node 8")
    flags = message.partition("GiB): ")[2]
    assert mistakes(tmp_path, f"--max-tokens-per-gpu 8192 --gpu-memory-gib 80 {flags}") == []


def test_more_gpus_are_named_where_those_of_the_run_hold_no_layout(tmp_path):
    (message,) = mistakes(tmp_path, "--max-tokens-per-gpu 8192 --gpu-memory-gib 24 --actor-num-gpus-per-node 1")
    assert "this fits (" in message
    assert "--actor-num-gpus-per-node 1 " not in message


def test_without_the_memory_of_a_gpu_nothing_is_refused(tmp_path):
    assert mistakes(tmp_path, "--max-tokens-per-gpu 1000000") == []
    config, needs = planned(tmp_path)
    (line,) = gpu_memory.lines(config, gpu_memory.model_size(config, SIZES), needs)
    assert line.startswith("memory of a learner GPU of an unknown size (--gpu-memory-gib), in GiB: 7.5 weights + 15.0 ")


def test_the_cache_of_an_engine_is_what_its_weights_leave(tmp_path):
    config, needs = planned(tmp_path, "--gpu-memory-gib 80 --sglang-mem-fraction-static 0.5")
    _, line = gpu_memory.lines(config, gpu_memory.model_size(config, SIZES), needs)
    room = int((40 * GIB - 2 * sum(SIZES.values())) / (2 * LAYERS * 1024 * 2))
    assert line == f"an engine's cache: room for {room:,} tokens of 144 KiB, at most"


def test_a_config_that_says_too_little_is_not_planned(tmp_path):
    config, needs = planned(tmp_path, "--gpu-memory-gib 8")
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    size = gpu_memory.model_size(config, SIZES)
    assert size is None
    assert list(gpu_memory.mistakes(config, size, needs)) == list(gpu_memory.lines(config, size, needs)) == []


@pytest.mark.parametrize(("printed", "found"), [("81559 81079", 81079 / 1024), ("No devices", None)])
def test_the_smallest_gpu_of_this_machine_counts(tmp_path, monkeypatch, printed, found):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho {printed}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    config, _ = planned(tmp_path)
    assert gpu_memory.gpu_memory_gib(config) == found
