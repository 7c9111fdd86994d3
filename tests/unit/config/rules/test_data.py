"""The rules of where prompts come from, each with its whole message."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load

HERE = Path(__file__)


def broken(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config, purpose="run", broken=frozenset())]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"--prompt-data {HERE}@[5:5]",
            f"prompt_data: {HERE}@[5:5]: the slice holds no rows; accepted: @[a:b] with 0 <= a < b",
        ),
        (
            '--apply-chat-template --apply-chat-template-kwargs {"tokenize":true,"tools":[]}',
            """apply_chat_template_kwargs = '{"tokenize":true,"tools":[]}' holds tokenize, tools, which the run """
            "itself decides at each prompt; accepted: what the template reads besides, such as enable_thinking",
        ),
        (
            "--apply-chat-template --apply-chat-template-kwargs [1]",
            "apply_chat_template_kwargs = '[1]' is no JSON object; accepted: text such as "
            """'{"enable_thinking": false}'""",
        ),
        (
            """--multimodal-keys {"image":3}""",
            """multimodal_keys = '{"image":3}' does not name fields; accepted: a JSON object of kinds and the fields """
            """that hold them, such as '{"image": "images"}'""",
        ),
        (
            "--multimodal-keys image",
            "multimodal_keys = 'image' does not name fields; accepted: a JSON object of kinds and the fields "
            """that hold them, such as '{"image": "images"}'""",
        ),
    ],
)
def test_a_broken_rule_says_what_was_found_and_what_is_accepted(line: str, message: str) -> None:
    assert message in broken(line)


@pytest.mark.parametrize(
    "line",
    [
        "--rollout-max-prompt-len 64 --num-data-workers 2",
        """--apply-chat-template --apply-chat-template-kwargs {"a":1} --multimodal-keys {"image":"images"}""",
    ],
)
def test_what_goes_together_is_accepted(line: str) -> None:
    about = ("prompt_", "num_data", "apply_", "multimodal_")
    assert not [message for message in broken(line) if message.startswith(about)]
