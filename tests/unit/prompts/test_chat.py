from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
USER, ASSISTANT, END = 3, 4, 1


@pytest.fixture(scope="module")
def plain() -> PromptEncoder:
    return PromptEncoder(FOLDER, apply_chat_template=False)


@pytest.fixture(scope="module")
def chat() -> PromptEncoder:
    return PromptEncoder(FOLDER, apply_chat_template=True)


def test_messages_are_rendered_whole(chat):
    turns = [{"role": role, "content": text} for role, text in (("user", "1+1"), ("assistant", "2"), ("user", "3"))]
    assert chat.encode(turns) == [USER, 6, 15, 6, ASSISTANT, 7, END, USER, 8, ASSISTANT]


def test_messages_without_the_template_are_refused(plain):
    with pytest.raises(DataError, match="--apply-chat-template"):
        plain.encode([{"role": "user", "content": "1+1"}])


def test_decoding_leaves_special_tokens_out(plain):
    assert plain.decode([13, 7, END]) == "82"
    assert plain.end_of_sequence == END


def test_ends_are_those_of_tokenizer_config_and_generation_config(plain, tmp_path):
    assert plain.end_ids == (END,)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    config = json.loads((FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 9}))
    assert PromptEncoder(tmp_path, apply_chat_template=False).end_ids == (END, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 7]}))
    assert PromptEncoder(tmp_path, apply_chat_template=False).end_ids == (END, 9, 7)


def test_a_checkpoint_whose_config_is_code_of_its_own_says_how_to_trust_it(tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    with pytest.raises(DataError, match=r"(?s)kimi_k2.*--trust-remote-code"):
        PromptEncoder(folder, apply_chat_template=False)


def test_a_tokenizer_without_a_template_is_refused_at_once(tmp_path):
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="--apply-chat-template"):
        PromptEncoder(tmp_path, apply_chat_template=True)


@pytest.mark.parametrize("content", ["2", "2+3"])
def test_messages_continue_a_conversation_as_the_template_renders_it_whole(chat, content):
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": content}]
    more = [{"role": "user", "content": "3"}]
    # As an engine ends a turn: with the end token, or without it at a stop text.
    sampled = [*chat.encode(turns[:1]), *chat.encode_text(content)]
    assert [*sampled, *chat.encode_messages(more)] == chat.encode([*turns, *more])
    assert [*sampled, END, *chat.encode_messages(more, after=END)] == chat.encode([*turns, *more])


def with_template(tmp_path: Path, template: str) -> PromptEncoder:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return PromptEncoder(tmp_path, apply_chat_template=True)


def test_earlier_turns_that_a_template_rewrites_stay_out_of_what_follows(tmp_path):
    # Only the last answer is written in full, as templates do that leave reasoning out.
    encoder = with_template(
        tmp_path,
        "{% for m in messages %}{{ '+' if m.role == 'assistant' and not loop.last else '' }}{{ m.content }}"
        "{{ eos_token }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}",
    )
    assert encoder.encode_messages([{"role": "tool", "content": "7"}], after=END) == [12, END, ASSISTANT]


def test_a_template_that_changes_the_assistants_turn_is_refused(tmp_path):
    encoder = with_template(tmp_path, "{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(DataError):
        encoder.encode_messages([{"role": "user", "content": "3"}])


def test_messages_do_not_continue_a_conversation_without_a_template(plain):
    with pytest.raises(DataError, match="--apply-chat-template"):
        plain.encode_messages([{"role": "user", "content": "3"}])
