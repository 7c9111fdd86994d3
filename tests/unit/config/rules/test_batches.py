"""The rules of micro-batches, budgets and averages: each broken once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    "line",
    [
        "--loss-token-divisor 64",
        "--micro-batch-size 3",
        "--balance-by-flops",
        "--hard-token-budget --max-tokens-per-gpu 64 --rollout-max-prompt-len 40 --rollout-max-response-len 24",
        "--hard-token-budget --max-tokens-per-gpu 32 --rollout-max-prompt-len 40 --rollout-max-response-len 24 "
        "--context-parallel-size 2 --actor-num-nodes 2",
        "--hard-token-budget --max-tokens-per-gpu 32 --rollout-max-prompt-len 40 --rollout-max-response-len 24 "
        "--context-parallel-size 2 --actor-num-nodes 2 --critic-num-gpus 4 --critic-context-parallel-size 4",
        "--hard-token-budget --max-tokens-per-gpu 192 --micro-batch-size 3 --rollout-max-prompt-len 40 "
        "--rollout-max-response-len 24",
    ],
)
def test_valid_settings_break_no_rule(line):
    assert broken_rules(line) == []


def model(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": ["Toy"], **fields}))
    return folder


def test_a_model_without_numbers_is_not_balanced_by_its_work(tmp_path):
    found = broken_rules(f"--hf-checkpoint {model(tmp_path, hidden_size=8)} --balance-by-flops")
    assert found == [
        f"balance_by_flops: {tmp_path}/config.json does not say num_hidden_layers, num_attention_heads, "
        "intermediate_size, vocab_size; leave it out, and ranks are balanced by tokens"
    ]


def test_a_hard_budget_needs_a_longest_prompt(tmp_path):
    found = broken_rules(f"--hf-checkpoint {model(tmp_path)} --hard-token-budget")
    assert found == [
        "hard_token_budget = true, but the length of prompts has no limit; add --rollout-max-prompt-len, or leave "
        "out --hard-token-budget"
    ]
