"""Loss masks of conversations, held against the very tokens, for templates of several families."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder
from slime_datasets.masks import conversation

TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
TOOLS = "{% if tools %}{{ '<|im_start|>tools\\n' + tools[0]['name'] + '<|im_end|>\\n' }}{% endif %}"

CHATML = TOOLS + "{% for m in messages %}" + TURN + "{% endfor %}" + ASKS

SHORT = "{% set text = m['content'].split('</think>')[-1].lstrip('\\n') %}"
FORGETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
    + SHORT
    + "{{ '<|im_start|>assistant\\n' + text + '<|im_end|>\\n' }}{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + ASKS
)
"""Leaves thoughts out of all turns but the last message."""

DISTILLED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    + SHORT
    + "{{ '<|im_start|>' + text + '<|im_end|>' }}{% else %}{{ '<|user|>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|><think>\\n' }}{% endif %}"
)
"""Leaves thoughts out of all turns, and asks for an answer with the beginning of one."""

THOUGHT = "<think>\nhm\n</think>\n\n"


def turns_of(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Encoders whose tokenizer joins letters, spaces and line ends, and writes any text in bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_end|>", "<|im_start|>", "<|user|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["assistant\n\n\nthe answer is the answer\n\n"] * 9, trainer)

    def make(template: str, **given: Any) -> PromptEncoder:
        folder = tmp_path_factory.mktemp("model")
        shutil.copy(ARITHMETIC / "model" / "config.json", folder)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
        fast.add_special_tokens({"additional_special_tokens": special[1:]})
        fast.chat_template = template
        fast.save_pretrained(folder)
        return PromptEncoder(Path(folder), apply_chat_template=True, **given)

    return make


def trained(encoder: PromptEncoder, messages: list[dict[str, str]], **given: Any) -> list[str]:
    """What the trained tokens decode to, run by run; the tokens are those of the rendered whole."""
    found = conversation(encoder, messages, **{"family": "prefix", **given})
    whole = encoder.render(messages, tools=given.get("tools"), asks=False)
    assert encoder.decode_all(found.token_ids) == whole
    assert found.token_ids == encoder.tokenizer(whole, add_special_tokens=False)["input_ids"]
    runs: list[list[int]] = []
    for place, (one, trains) in enumerate(zip(found.token_ids, found.mask, strict=True)):
        if trains and not (place and found.mask[place - 1]):
            runs.append([])
        if trains:
            runs[-1].append(one)
    return [encoder.decode_all(run) for run in runs]


def test_the_trained_tokens_are_the_turns_of_the_assistant_with_their_end(made):
    turns = turns_of("hi", "the answer", "and then?", "is 4\n\nthe end. \u00e9 \U0001f600")
    assert trained(made(CHATML), turns) == ["the answer<|im_end|>", "is 4\n\nthe end. \u00e9 \U0001f600<|im_end|>"]


def test_turns_of_others_after_the_last_answer_are_not_trained(made):
    assert trained(made(CHATML), turns_of("hi", "yes", "thanks")) == ["yes<|im_end|>"]


def test_tools_stand_in_the_tokens_and_are_not_trained(made):
    tools = [{"name": "calculator"}]
    encoder = made(CHATML)
    assert trained(encoder, turns_of("hi", "yes"), tools=tools) == ["yes<|im_end|>"]
    assert "calculator" in encoder.render(turns_of("hi"), tools=tools, asks=True)


def test_a_template_without_an_end_token_trains_what_was_written(made):
    bare = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}{% endfor %}" + ASKS
    assert trained(made(bare), turns_of("hi", "yes", "more", "no")) == ["yes", "no"]


def test_thoughts_that_the_template_leaves_out_of_earlier_turns_are_not_trained(made):
    turns = turns_of("hi", THOUGHT + "one", "more", THOUGHT + "two")
    encoder = made(FORGETS)
    wanted = ["one<|im_end|>", THOUGHT + "two<|im_end|>"]
    assert trained(encoder, turns, family="qwen3") == wanted
    with pytest.raises(
        DataError, match=r"^message 1: the chat template renders the messages up to it differently .* need "
    ):
        trained(encoder, turns)


def test_thoughts_that_the_template_leaves_out_of_all_turns_are_not_trained(made):
    turns = turns_of("hi", THOUGHT + "one", "more", THOUGHT + "two")
    encoder = made(DISTILLED)
    assert trained(encoder, turns, family="distill_qwen") == ["one<|im_end|>", "two<|im_end|>"]
    with pytest.raises(DataError, match=r"^message 1: the chat template renders the messages before it differently"):
        trained(encoder, turns, family="qwen3")


def test_further_arguments_of_the_template_change_what_is_rendered(made):
    shouts = "{% if loud %}{{ '<|user|>' }}{% endif %}" + CHATML
    assert (
        made(shouts, template_arguments={"loud": True}).encode("x")[0]
        == made(shouts).tokenizer("<|user|>")["input_ids"][0]
    )
    assert made(shouts).encode("x")[0] != made(shouts).tokenizer("<|user|>")["input_ids"][0]


def test_letters_that_the_tokenizer_joins_over_the_border_of_a_turn_are_refused(made):
    with pytest.raises(
        DataError, match=r"the tokens of a turn of the assistant decode to .* Remove spaces and line ends"
    ):
        trained(made(CHATML), turns_of("hi", "\n\nthe answer"))


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([{"role": "user", "content": "hi"}], "has no message of the assistant"),
        ([{"role": "assistant", "content": "hi"}], "starts with a message of the assistant"),
    ],
)
def test_a_conversation_without_an_answer_is_refused(made, messages, found):
    with pytest.raises(
        DataError, match=f"^the conversation {found}; accepted: a user message, then at least one of the assistant$"
    ):
        trained(made(CHATML), messages)


def test_a_template_that_refuses_the_messages_is_reported_with_its_words(made):
    strict = "{{ raise_exception('roles must take turns') }}"
    with pytest.raises(DataError, match=r"the chat template in .*: rendering a conversation failed .* must take turns"):
        made(strict).encode("x")


def test_the_embedded_template_is_of_the_family_that_needs_no_name():
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=True)
    found = conversation(encoder, turns_of("1+1", "2", "3+4", "7"), family="prefix")
    assert json.dumps(found.mask) == "[0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]"
    assert found.turns == ["2<eos>", "7<eos>"]
    assert found.prompt_length == 5
