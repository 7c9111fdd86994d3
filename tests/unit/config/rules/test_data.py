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
            f"--prompt-data {HERE} --prompt-mix {HERE} 1",
            f"prompt_data = {HERE} and prompt_mix of 1 both say where prompts come from; give one of them, the former "
            "as one of the latter with a weight",
        ),
        (
            f"--prompt-mix {HERE} 1 {HERE.parent}/../rules/{HERE.name} 2",
            f"prompt_mix names {HERE} 2 times, and its prompts would come as often in one batch; name it once, with "
            "the sum of its weights",
        ),
        ("--prompt-mix /absent 1", "prompt_mix: /absent does not exist; accepted: a prompt file"),
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
            "--shuffle-window 8",
            "shuffle_window = 8 is for prompts that are read as they are needed; add --streaming-data, or leave the "
            "window out: prompts in memory are shuffled among all",
        ),
        (
            "--shuffle-window 8 --streaming-data --no-rollout-shuffle",
            "shuffle_window = 8 and rollout_shuffle = false; give one of them",
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
        f"--prompt-mix {HERE} 0.7 {HERE.parent / 'test_layout.py'} 0.3 --streaming-data --shuffle-window 8",
        "--rollout-max-prompt-len 64 --num-data-workers 2",
        """--apply-chat-template --apply-chat-template-kwargs {"a":1} --multimodal-keys {"image":"images"}""",
    ],
)
def test_what_goes_together_is_accepted(line: str) -> None:
    about = ("prompt_", "shuffle_", "num_data", "apply_", "multimodal_")
    assert not [message for message in broken(line) if message.startswith(about)]


def test_a_mix_has_paths_and_weights_from_flags_and_from_a_file(tmp_path: Path) -> None:
    wanted = ((tmp_path / "a.jsonl@[:9]", 0.7), (tmp_path / "b", 0.3))
    words = [str(word) for pair in wanted for word in pair]
    assert load(["--prompt-mix", *words], check_rules=False).config.data.prompt_mix == wanted
    file = tmp_path / "run.toml"
    file.write_text('[data]\nprompt_mix = [["a.jsonl@[:9]", 0.7], ["b", 0.3]]\n')
    config = load(["--config", str(file)], check_rules=False).config
    assert config.data.prompt_mix == wanted
    assert config.rollout.num_rollout != 80  # the embedded run's own settings are not for other prompts
