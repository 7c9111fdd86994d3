"""The rules of micro-batches and budgets."""

from __future__ import annotations

from tests.unit.config.broken import blames, broken, described


def test_a_model_without_numbers_is_not_balanced_by_its_work(tmp_path):
    found = broken(f"{described(tmp_path, hidden_size=8)} --balance-by-flops")
    missing = "num_hidden_layers, num_attention_heads, intermediate_size, vocab_size"
    blames(found, "balance_by_flops", f"{tmp_path}/config.json", missing)


def test_a_hard_budget_needs_a_longest_prompt(tmp_path):
    blames(broken(f"{described(tmp_path)} --hard-token-budget"), "hard_token_budget", "--rollout-max-prompt-len")
