"""The memory of a GPU: what a plan says and refuses, and what a run that names nothing gets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime_core.cli import memory
from slime_core.cli.main import main
from slime_core.cli.memory import GpuPlan, Needs, chosen, with_memory_defaults
from slime_core.config.explain import to_toml
from slime_core.config.load import Resolved, load
from slime_core.config.schema import RunConfig
from slime_core.modeling.memory import GIB, PAUSED_ENGINE_GIB, SHARE
from slime_core.plugins.activation import activate

HIDDEN, LAYERS, VOCAB = 2560, 36, 151936
QWEN: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
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
    memory._smallest_here.cache_clear()
    yield
    memory._smallest_here.cache_clear()


def needs_of(config: RunConfig) -> Needs:
    ranks, total = config.num_learner_ranks, sum(SIZES.values())
    return Needs(parameters=total, item=2, ranks=ranks, copies=ranks, engines=1, roles=0, buffer=0, sizes=SIZES)


def planned(folder: Path, line: str = "", **more: int) -> GpuPlan:
    (folder / "config.json").write_text(json.dumps(QWEN))
    argv = ["--advantage-estimator", "toy", "--hf-checkpoint", str(folder), "--device", "cuda", *line.split()]
    config = load(argv, check_rules=False).config
    plan = GpuPlan.of(config, replace(needs_of(config), **more))  # type: ignore[arg-type]
    assert plan is not None
    return plan


def parts(plan: GpuPlan) -> Mapping[str, int]:
    return plan.usages()["learner"].parts


def mistakes(folder: Path, line: str, **more: int) -> list[str]:
    return list(planned(folder, line, **more).mistakes())


def test_the_parts_of_a_4b_model_by_hand(tmp_path):
    plan = planned(tmp_path, "--max-tokens-per-gpu 8192")
    kept = 6 * HIDDEN + 6 * 4096 + 3 * 1024 + 8 * 128 + 3 * 9728
    assert plan.size.kept == kept
    found = parts(plan)
    assert [found["weights"], found["gradients"], found["optimizer"]] == [n * 4_022_468_096 for n in (2, 4, 12)]
    assert found["activations"] == LAYERS * kept * 8192 * 2
    assert found["logits"] == (8192 * 2 + 1024 * 4) * VOCAB  # the chunk of --log-probs-chunk-size is in float32


@pytest.mark.parametrize(
    ("line", "logits"),
    [
        ("--log-probs-chunk-size none", 8192 * (2 + 4) * VOCAB),
        ("--bf16 --fp32-lm-head", (1024 * 4 + HIDDEN * 4) * VOCAB),  # and the gradient of the output weights
    ],
)
def test_logits_in_float32_exist_by_chunks_if_there_are_chunks(tmp_path, line, logits):
    assert parts(planned(tmp_path, f"--max-tokens-per-gpu 8192 {line}"))["logits"] == logits


def test_a_run_that_cannot_fit_names_the_largest_part_and_flags_that_fit(tmp_path):
    line = "--max-tokens-per-gpu 8192 --gpu-memory-gib 70"
    (message,) = mistakes(tmp_path, f"{line} --actor-num-gpus-per-node 8")
    for number in ("71.2 GiB", "activations (40.", "90% of 70 GiB", "63.0", "55.6 GiB"):
        assert number in message
    flags = message.partition("GiB): ")[2]
    assert flags.endswith("--recompute-granularity selective --recompute-modules mlp")
    assert mistakes(tmp_path, f"{line} {flags}") == []


def test_without_the_memory_of_a_gpu_nothing_is_refused(tmp_path):
    assert mistakes(tmp_path, "--max-tokens-per-gpu 1000000") == []
    (line,) = planned(tmp_path).lines()
    assert "--gpu-memory-gib" in line
    assert "7.5 weights + 15.0 " in line


def test_the_cache_of_an_engine_is_what_its_weights_leave(tmp_path):
    _, line = planned(tmp_path, "--gpu-memory-gib 80 --sglang-mem-fraction-static 0.5").lines()
    room = int((40 * GIB - 2 * sum(SIZES.values())) / (2 * LAYERS * 1024 * 2))
    assert "7.5 GiB of weights" in line
    assert f"{room:,} tokens of 144" in line


@pytest.mark.parametrize(
    ("line", "held"),
    [
        ("", LAYERS * 92_672 - LAYERS * 2 * 9728),
        ("--recompute-activations", LAYERS * 92_672 - LAYERS * 2 * 9728),
        ("--recompute-granularity selective --recompute-modules mlp", LAYERS * 44_032 + 3 * 9728),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            9 * HIDDEN + 4 * (44_032 + 3 * 9728),
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 6",
            6 * HIDDEN + 30 * (44_032 + 3 * 9728) + 44_032 + 3 * 9728,
        ),
    ],
)
def test_what_is_recomputed_is_not_held(tmp_path, line, held):
    """44,032 entries of a token are of attention and norms, 9,728 is the size of the MLP."""
    assert parts(planned(tmp_path, f"--max-tokens-per-gpu 8192 {line}"))["activations"] == held * 8192 * 2


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("--max-tokens-per-gpu 8192", 8192),
        ("--max-tokens-per-gpu 8192 --rollout-max-response-len 30000", 30000),
        ("--max-tokens-per-gpu 8192 --rollout-max-response-len 30000 --rollout-max-prompt-len 2000", 32000),
        ("--max-tokens-per-gpu 8192 --rollout-max-response-len 30000 --sglang-context-length 16000", 16000),
        ("--micro-batch-size 4 --rollout-max-response-len 3000", 12000),
    ],
)
def test_a_micro_batch_is_as_long_as_the_longest_sample(tmp_path, line, tokens):
    assert planned(tmp_path, line).training().tokens == tokens


def test_an_optimizer_on_the_host_leaves_the_gpu(tmp_path):
    flags = "--bf16 --optimizer-cpu-offload --use-precision-aware-optimizer"
    for more, share in (("", 0), ("--optimizer-offload-fraction 0.25", 9)):
        assert parts(planned(tmp_path, f"{flags} {more}"))["optimizer"] == share * sum(SIZES.values())


def test_a_critic_counts_where_it_is(tmp_path):
    line = "--max-tokens-per-gpu 2048 --gpu-memory-gib 141 --actor-num-gpus-per-node 8"
    assert mistakes(tmp_path, line, critic_parameters=sum(SIZES.values())) == []
    (message,) = mistakes(tmp_path, line.replace("141", "70"), critic_parameters=sum(SIZES.values()))
    assert "learner rank needs 67.4 GiB" in message
    separate = f"{line.replace('141', '70')} --critic-num-gpus 1"
    (message,) = mistakes(tmp_path, separate, critic_parameters=sum(SIZES.values()), critic_ranks=1)
    assert "critic rank needs 77." in message
    assert "--max-tokens-per-gpu" in message
    fitting = separate.replace("--critic-num-gpus 1", "--critic-num-gpus 2")
    assert mistakes(tmp_path, fitting, critic_parameters=sum(SIZES.values()), critic_ranks=2) == []


def test_an_optimizer_that_does_not_fit_the_host_is_refused(tmp_path):
    line = "--actor-num-gpus-per-node 8 --bf16 --optimizer-cpu-offload --use-precision-aware-optimizer"
    plan, state = planned(tmp_path, line), 12 * sum(SIZES.values())
    assert list(plan.host_mistakes(state + 8)) == []
    (message,) = plan.host_mistakes(state // 2)
    assert "--optimizer-cpu-offload" in message
    assert "45.0" in message
    assert "--optimizer-offload-fraction" in message
    half = planned(tmp_path, f"{line} --optimizer-offload-fraction 0.5")
    assert list(half.host_mistakes(state // 2 + 8)) == []
    plain = planned(tmp_path, "--actor-num-gpus-per-node 8 --bf16")
    assert list(plain.host_mistakes(0)) == []


def test_a_colocated_learner_needs_host_memory_for_all_that_it_holds_but_gradients(tmp_path):
    total = sum(SIZES.values())
    line = "--actor-num-gpus-per-node 8 --bf16 --colocate"
    plan, moved = planned(tmp_path, line), 8 * 2 * total + 12 * total
    assert list(plan.host_mistakes(moved + 8)) == []
    (message,) = plan.host_mistakes(moved - GIB)
    assert f"= {moved / GIB:.1f} for 8 learner ranks" in message
    assert "--actor-num-nodes" in message
    assert "leave --colocate out" in message
    assert any(f"{moved / GIB:.1f} of weights and optimizer" in text for text in plan.lines())
    assert list(planned(tmp_path, line, roles=1).host_mistakes(moved + 8)) != []
    assert list(planned(tmp_path, line, roles=1).host_mistakes(moved + 8 * 2 * total + 8)) == []
    both = planned(tmp_path, f"{line} --optimizer-cpu-offload --use-precision-aware-optimizer")
    assert list(both.host_mistakes(moved + 16)) == []


def test_a_paused_engine_keeps_memory_that_a_colocated_learner_cannot_use(tmp_path):
    line, ranks = "--max-tokens-per-gpu 8192 --rollout-num-gpus 8", " --actor-num-gpus-per-node 8"
    needed_gib = sum(parts(planned(tmp_path, line + ranks)).values()) / GIB
    limit = f" --gpu-memory-gib {(needed_gib + PAUSED_ENGINE_GIB / 2) / SHARE:.2f}"
    assert mistakes(tmp_path, line + ranks + limit) == []
    (message,) = mistakes(tmp_path, line + ranks + limit + " --colocate")
    assert mistakes(tmp_path, line + limit + " --colocate " + message.partition("GiB): ")[2]) == []
    larger = f" --gpu-memory-gib {(needed_gib + PAUSED_ENGINE_GIB) / SHARE + 0.1:.2f}"
    assert mistakes(tmp_path, line + ranks + larger + " --colocate") == []


def test_buckets_count_if_they_take_more_than_activations_and_logits(tmp_path):
    line = "--actor-num-gpus-per-node 8 --rollout-max-response-len 8 --rollout-max-prompt-len 8 --max-tokens-per-gpu"
    assert "publication" not in parts(planned(tmp_path, f"{line} 8192"))
    few = parts(planned(tmp_path, f"{line} 16"))
    assert few["publication"] + few["activations"] + few["logits"] == 2 * 512 * 2**20
    large = parts(planned(tmp_path, f"{line} 16 --update-weight-buffer-size 4294967296"))
    assert large["publication"] - few["publication"] == 2 * (4 * GIB - GIB // 2)
    colocated = planned(tmp_path, f"{line} 16 --colocate")
    assert "publication" not in parts(colocated)
    assert colocated._published == GIB


def test_latent_attention_caches_its_latents_on_every_gpu(tmp_path):
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **latent}))
    config = load(["--hf-checkpoint", str(tmp_path), "--device", "cuda"], check_rules=False).config
    size = memory.model_size(config, SIZES)
    assert size is not None
    assert size.cached(1) == size.cached(4) == LAYERS * (512 + 64)


@pytest.mark.parametrize(("printed", "found"), [("81559 81079", 81079 / 1024), ("No devices", None)])
def test_the_smallest_gpu_of_this_machine_counts(tmp_path, monkeypatch, printed, found):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho {printed}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    assert planned(tmp_path).memory == found


# --- Defaults ---------------------------------------------------------------------------------------------------------


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def checkpoint(folder: Path) -> Path:
    """A folder with that model, whose weights are holes in a file."""
    header, end = {}, 0
    for name, size in SIZES.items():
        header[name] = {"dtype": "BF16", "shape": [size], "data_offsets": [end, end + 2 * size]}
        end += 2 * size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(QWEN))
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


def test_the_command_says_what_it_chose_on_gpus_alone(tmp_path, capsys):
    words = ["--plugin", "grpo", "--hf-checkpoint", str(checkpoint(tmp_path)), "--gpu-memory-gib", "80"]
    assert main(["config", "show", *words, "--device", "cuda"]) == 0
    assert "max_tokens_per_gpu = 4096  # default that" in capsys.readouterr().out
    assert main(["config", "show", *words, "--device", "cpu"]) == 0
    assert "max_tokens_per_gpu = 8192  # default\n" in capsys.readouterr().out


def test_an_engine_without_room_for_a_response_is_refused(tmp_path):
    line = "--actor-num-gpus-per-node 8 --gpu-memory-gib 80 --max-tokens-per-gpu 2048 --sglang-mem-fraction-static"
    assert mistakes(tmp_path, f"{line} 0.1 --rollout-max-response-len 2000") == []
    (message,) = mistakes(tmp_path, f"{line} 0.1 --rollout-max-response-len 4000")
    assert "10% of 80 GiB" in message
    assert "--rollout-num-gpus-per-engine" in message


def test_a_colocated_gpu_holds_both_weights_while_they_are_published(tmp_path):
    line = "--colocate --actor-num-gpus-per-node 8 --max-tokens-per-gpu 256 --rollout-max-response-len 8"
    found = mistakes(tmp_path, f"{line} --gpu-memory-gib 16")
    assert any("holds 7.5 GiB" in text for text in found)
