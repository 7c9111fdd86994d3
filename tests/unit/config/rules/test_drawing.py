"""The rules of how tokens are drawn: their texts."""

from __future__ import annotations

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize("line", ["--rollout-top-k 2", "--rollout-top-p 0.9", "--rollout-max-kept-tokens 1"])
def test_what_leaves_a_choice_is_accepted(line: str) -> None:
    assert broken_rules(line) == []


def test_one_token_is_no_choice() -> None:
    assert broken_rules("--rollout-top-k 1") == [
        "rollout_top_k = 1 leaves one token to draw at every place; its probability is 1, so nothing can be learnt "
        "from it; accepted is 2 and more, or -1 for all"
    ]
    assert broken_rules("--rollout-top-p 0.9 --rollout-max-kept-tokens 1") == [
        "rollout_max_kept_tokens = 1 leaves one of the tokens that rollout_top_p = 0.9 keeps; its probability is 1, so "
        "nothing can be learnt from it; accepted is 2 and more"
    ]
