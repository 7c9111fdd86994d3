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


def test_text_is_encoded_as_it_is(plain):
    assert plain.encode("37+45") == [8, 12, 15, 9, 10]


def test_the_template_makes_text_a_user_message_that_the_assistant_answers(chat):
    assert chat.encode("37+45") == [USER, 8, 12, 15, 9, 10, ASSISTANT]


def test_messages_are_rendered_whole(chat):
    turns = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    assert chat.encode(turns) == [USER, 6, 15, 6, ASSISTANT, 7, END, USER, 8, ASSISTANT]


def test_messages_without_the_template_are_refused(plain):
    with pytest.raises(DataError, match="--apply-chat-template"):
        plain.encode([{"role": "user", "content": "1+1"}])


def test_a_prompt_without_tokens_is_refused(plain):
    with pytest.raises(DataError, match="the prompt '' has no tokens"):
        plain.encode("")


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


def test_a_tokenizer_without_a_template_is_refused_at_once(tmp_path):
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(FOLDER / name, tmp_path)
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="has no chat template"):
        PromptEncoder(tmp_path, apply_chat_template=True)
