"""The rules of the critic: each broken once, with its whole text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.embedded import ARITHMETIC
from slime_core.config.load import load


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--num-rollout 5 --num-critic-only-steps 5",
            "num_critic_only_steps = 5 leaves the actor no rollout: num_rollout = 5; give at most 4, or more rollouts",
        ),
        (
            "--critic-lr 1e-5 --min-lr 1e-4",
            "critic_lr = 1e-05 is below min_lr = 0.0001, which the critic's schedule shares with the actor's; raise "
            "critic_lr, or lower min_lr",
        ),
        (
            "--critic-lr 1e-5 --lr-warmup-init 1e-4",
            "critic_lr = 1e-05 is below lr_warmup_init = 0.0001, which the critic's schedule shares with the actor's; "
            "raise critic_lr, or lower lr_warmup_init",
        ),
        (
            "--critic-lr-warmup-iters 10 --lr-decay-iters 10",
            "critic_lr_warmup_iters = 10 is not below lr_decay_iters = 10, which the critic's schedule shares with the "
            "actor's; give at most 9, or raise lr_decay_iters",
        ),
        (
            "--critic-lr-warmup-iters 3 --lr-decay-style WSD --lr-wsd-decay-iters 6 --num-rollout 4 "
            "--num-steps-per-rollout 2 --lr-warmup-iters 0",
            "lr_wsd_decay_iters = 6 is more than the critic's steps after warm-up: num_rollout x steps a rollout - "
            "critic_lr_warmup_iters = 8 - 3 = 5; give at most that, or lower critic_lr_warmup_iters",
        ),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 7 --num-rollout 4 --num-steps-per-rollout 2 --lr-warmup-iters 0 "
            "--num-critic-only-steps 1",
            "lr_wsd_decay_iters = 7 is more than the steps after warm-up: (num_rollout - num_critic_only_steps) x "
            "steps a rollout - lr_warmup_iters = 6 - 0 = 6; give at most that",
        ),
        (
            "--critic-num-gpus 3 --critic-tensor-model-parallel-size 2",
            "critic: critic_tensor_model_parallel_size x critic_pipeline_model_parallel_size x "
            "critic_context_parallel_size = 2 x 1 x 1 = 2 ranks hold one copy of the model, but critic_num_gpus = 3 is "
            "no multiple of 2; give 2 ranks or a multiple, or smaller sizes",
        ),
        (
            "--critic-num-gpus 3 --critic-tensor-model-parallel-size 3",
            f"critic: critic_tensor_model_parallel_size = 3 does not divide num_attention_heads = 4, vocab_size = 16, "
            f"num_key_value_heads = 2, intermediate_size = 128 of {ARITHMETIC / 'model' / 'config.json'}; accepted: 1, "
            "2, 4",
        ),
        (
            "--critic-num-gpus 5 --critic-pipeline-model-parallel-size 5",
            "critic: critic_pipeline_model_parallel_size = 5 chunks of a model with num_hidden_layers = 3 in "
            f"{ARITHMETIC / 'model' / 'config.json'}; accepted: at most 4, so that every chunk but the last has a "
            "layer",
        ),
        (
            "--critic-num-gpus 3 --rollout-batch-size 1 --n-samples-per-prompt 2",
            "critic: 2 samples an optimizer step, for 3 critic ranks / 1 a copy of the model = 3 data-parallel ranks; "
            "each needs at least one, so raise global_batch_size",
        ),
    ],
)
def test_a_broken_rule_says_what_to_write_instead(line, message):
    assert broken_rules(line) == [message]


def test_settings_within_bounds_break_no_rule():
    line = "--num-rollout 5 --num-critic-only-steps 4 --critic-lr 1e-4 --min-lr 1e-4 --lr-warmup-init 1e-4"
    assert broken_rules(line) == []
    # The critic's steps are all of the run, the actor's those after the critic was alone.
    schedule = "--lr-decay-style WSD --lr-wsd-decay-iters 6 --num-rollout 4 --num-steps-per-rollout 2"
    assert broken_rules(f"{schedule} --critic-lr-warmup-iters 2 --num-critic-only-steps 1 --lr-warmup-iters 0") == []
    assert broken_rules("--critic-lr-warmup-iters 9 --lr-decay-iters 10") == []


def test_a_critic_apart_has_a_layout_of_its_own():
    sizes = "--critic-tensor-model-parallel-size 2 --critic-pipeline-model-parallel-size 2"
    actor = "--actor-num-gpus-per-node 4 --tensor-model-parallel-size 4 --sequence-parallel"
    assert broken_rules(f"{actor} --critic-num-gpus 4 {sizes}") == []
    # What is not said is as for the actor, but for what only some layouts have.
    assert broken_rules(f"{actor} --critic-num-gpus 1 --critic-tensor-model-parallel-size 1") == []


def test_start_weights_of_the_critic_are_a_model(tmp_path: Path):
    assert broken_rules(f"--critic-load {tmp_path}") == [
        f"critic_load: {tmp_path} holds no config.json; accepted: a Hugging Face folder on this machine (download a "
        "hub model first)"
    ]


def test_a_critic_of_another_model_is_refused_and_its_layout_is_that_of_the_model_that_is_built(tmp_path: Path):
    model = ARITHMETIC / "model"
    found = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = found["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(found | {"num_attention_heads": 6}), encoding="utf-8")
    assert broken_rules(f"--critic-load {tmp_path} --critic-num-gpus 4 --critic-tensor-model-parallel-size 4") == [
        f"critic_load = {tmp_path}: the critic is built as the actor is, its head aside, and its config.json describes "
        f"another one than that of {model}: num_attention_heads = 6 instead of {heads}; give a model of the same "
        "architecture, sizes and vocabulary"
    ]
    (tmp_path / "config.json").write_text(json.dumps(found | {"torch_dtype": "bfloat16"}), encoding="utf-8")
    assert broken_rules(f"--critic-load {tmp_path}") == []


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
def test_a_critic_apart_shares_its_experts_where_its_ranks_divide(line: str, experts: int, tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["X"], "num_experts": 4}')
    line += f" --expert-model-parallel-size 2 --actor-num-gpus-per-node 2 --hf-checkpoint {tmp_path}"
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    assert config.critic_parallel.expert_model_parallel_size == experts
    assert [message for message in broken_rules(line) if "expert" in message] == []
