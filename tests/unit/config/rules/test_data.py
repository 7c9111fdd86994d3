"""The rules of where prompts come from."""

from __future__ import annotations

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load


def broken(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config, purpose="run", broken=frozenset())]


@pytest.mark.parametrize(
    "line",
    [
        "--rollout-max-prompt-len 64 --num-data-workers 2",
        """--apply-chat-template --apply-chat-template-kwargs {"a":1} --multimodal-keys {"image":"images"}""",
    ],
)
def test_valid_settings_are_accepted(line: str) -> None:
    about = ("prompt_", "num_data", "apply_", "multimodal_")
    assert not [message for message in broken(line) if message.startswith(about)]
