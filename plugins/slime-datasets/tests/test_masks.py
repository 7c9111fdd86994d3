"""Loss masks of conversations, compared with the messages, for templates of every family of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder
from slime_datasets.masks import conversations
from tests.chat_families import ASKS, FAMILIES, PLAIN, Family, asks, encoder_of, mask_column

THOUGHT = "<think>\nhm\n</think>\n\n"

Make = Callable[..., PromptEncoder]


def turns_of(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes the encoder of a family, each once."""
    found: dict[str, PromptEncoder] = {}

    def make(family: str | Family, **arguments: Any) -> PromptEncoder:
        key = f"{family} {arguments}"
        if key not in found:
            of = FAMILIES[family] if isinstance(family, str) else family
            found[key] = encoder_of(of, tmp_path_factory.mktemp("model"), **arguments)
        return found[key]

    return make


def trained(encoder: PromptEncoder, messages: list[dict[str, Any]], **more: Any) -> list[list[str]]:
    """For each sequence, what its trained tokens decode to, run by run."""
    return [_runs(encoder, one.token_ids, one.mask) for one in conversations(encoder, messages, **more)]


def _runs(encoder: PromptEncoder, ids: list[int], mask: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for place, (one, trains) in enumerate(zip(ids, mask, strict=True)):
        if trains and not (place and mask[place - 1]):
            runs.append([])
        if trains:
            runs[-1].append(one)
    return [encoder.decode_all(run) for run in runs]


def templated(name: str, template: str) -> Family:
    return replace(FAMILIES[name], template=template)


# --- The cases of users ----------------------------------------------------------------------------------------------


def test_r1_distill_trains_thoughts_and_answer_and_never_the_question(made: Make) -> None:
    content = "<think>\nTwo and two make four.\n</think>\n\nIt is 4."
    encoder = made("r1-distill")
    assert trained(encoder, turns_of("What is 2 + 2?", content)) == [
        ["Two and two make four.\n</think>\n\nIt is 4.<｜end▁of▁sentence｜>"]
    ]
    (found,) = conversations(encoder, turns_of("What is 2 + 2?", content))
    prompt = encoder.encode(turns_of("What is 2 + 2?"))
    assert found.token_ids[: found.prompt_length] == prompt
    assert encoder.decode_all(prompt).endswith("What is 2 + 2?<｜Assistant｜><think>\n")


@pytest.mark.parametrize("family", ["qwen3-thinking-2507", "qwq"])
def test_a_prompt_that_opens_thoughts_is_continued_in_every_turn(made: Make, family: str) -> None:
    encoder = made(family)
    assert trained(encoder, turns_of("2 + 2?", "4")) == [["\n</think>\n\n4<|im_end|>"]]
    first, second = "<think>\nadd\n</think>\n\n4", "<think>\nadd again\n</think>\n\n6"
    assert trained(encoder, turns_of("What is 2 + 2?", first, "3 + 3?", second)) == [
        ["add\n</think>\n\n4<|im_end|>"],
        ["add again\n</think>\n\n6<|im_end|>"],
    ]
    last = conversations(encoder, turns_of("What is 2 + 2?", first, "3 + 3?", second))[1]
    assert last.token_ids[: last.prompt_length] == encoder.encode(turns_of("What is 2 + 2?", first, "3 + 3?"))


def test_glm_trains_the_token_that_opens_the_next_turn(made: Make) -> None:
    encoder = made("glm4.5")
    found = trained(encoder, turns_of("2 + 2?", "4", "3 + 3?", "6"))
    assert found == [["\n<think></think>\n4<|user|>", "\n<think></think>\n6<|user|>"]]
    assert encoder.tokenizer.convert_tokens_to_ids("<|user|>") in encoder.end_ids


def test_glm_ends_a_call_with_the_token_of_the_result(made: Make) -> None:
    call = {"function": {"name": "calculator", "arguments": {"x": 2}}}
    messages = [
        *turns_of("2 + 2?"),
        {"role": "assistant", "content": "<think>add</think>", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    asked = "\n<think>add</think>\n<tool_call>calculator</tool_call><|observation|>"
    assert trained(made("glm4.5"), messages) == [[asked, "\n<think></think>\nIt is 4.<|user|>"]]
    assert trained(made("glm4.5"), messages[:2]) == [[asked]]


# --- Further inputs of the same kinds --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_answers_with_their_end_and_nothing_of_others(made: Make, name: str) -> None:
    encoder = made(name)
    messages = turns_of("ask one", "the answer", "ask two", "is 4\n\nthe end. \u00e9 \U0001f600")
    runs = [run for one in trained(encoder, messages) for run in one]
    for run, content in zip(runs, ("the answer", "is 4\n\nthe end. \u00e9 \U0001f600"), strict=True):
        assert run.endswith(content + FAMILIES[name].end)
        assert "ask" not in run
        assert "assistant" not in run.lower()
    assert mask_column(encoder) == "yes"


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_of_every_turn_are_trained(made: Make, name: str) -> None:
    runs = [run for one in trained(made(name), turns_of("a", f"{THOUGHT}one", "b", f"{THOUGHT}two")) for run in one]
    assert [("hm" in run, run.removesuffix(FAMILIES[name].end)[-3:]) for run in runs] == [(True, "one"), (True, "two")]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("content", ["\n\nthe answer", "  the answer", "\tthe answer\n", "the answer "])
def test_white_space_around_a_message_breaks_nothing(made: Make, name: str, content: str) -> None:
    ((run,),) = trained(made(name), turns_of("hi", content))
    assert run.endswith(FAMILIES[name].end)
    assert "the answer" in run


@pytest.mark.parametrize("name", FAMILIES)
def test_a_user_who_repeats_the_answer_is_not_trained(made: Make, name: str) -> None:
    end = FAMILIES[name].end
    for messages in (turns_of("4", "4", "4", "4"), turns_of("the answer", "the answer", "the answer", "no")):
        runs = [run for one in trained(made(name), messages) for run in one]
        assert [run.count(message["content"]) for run, message in zip(runs, messages[1::2], strict=True)] == [1, 1]
        assert all(run.endswith(end) for run in runs)


@pytest.mark.parametrize("name", ["r1-distill", "qwen3", "qwen3-thinking-2507", "qwq", "glm4.5", "glm4.7"])
def test_reasoning_content_is_trained_as_thoughts(made: Make, name: str) -> None:
    messages = [*turns_of("hi"), {"role": "assistant", "reasoning_content": "so be it", "content": "yes"}]
    ((run,),) = trained(made(name), messages)
    before, end, answer = run.partition("</think>")
    assert before.removeprefix("\n").removeprefix("<think>").strip() == "so be it"
    assert (end, answer.strip()) == ("</think>", f"yes{FAMILIES[name].end}")


@pytest.mark.parametrize("name", ["r1-distill", "qwen3-thinking-2507", "qwq"])
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("<think>\n\n</think>\n\nyes", "\n</think>\n\nyes"),
        ("</think>\n\nyes", "</think>\n\nyes"),
        ("already thinking</think>\n\nyes", "already thinking</think>\n\nyes"),
        ("<think>\nnever ends", "never ends"),
    ],
)
def test_empty_and_unfinished_thoughts_continue_the_prompt(made: Make, name: str, content: str, wanted: str) -> None:
    ((run,),) = trained(made(name), turns_of("hi", content))
    assert run.removesuffix(FAMILIES[name].end).replace("\n", "").endswith(wanted.replace("\n", ""))
    assert run.count("</think>") <= 2
    if name != "qwen3-thinking-2507":
        assert run == wanted + FAMILIES[name].end


def test_thoughts_are_kept_in_one_sequence_where_the_template_keeps_them(made: Make) -> None:
    call = {"function": {"name": "calculator", "arguments": {"x": 2}}}
    messages = [
        *turns_of("2 + 2?"),
        {"role": "assistant", "content": f"{THOUGHT}Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": f"{THOUGHT}It is 4."},
    ]
    (one,) = trained(made("qwen3"), messages)
    assert one[0].startswith(f"{THOUGHT}Hm.\n<tool_call>\n")
    assert one[0].endswith("</tool_call><|im_end|>")
    assert one[1] == f"{THOUGHT}It is 4.<|im_end|>"
    (one,) = trained(made("qwen2.5"), turns_of("hi", f"{THOUGHT}one", "more", f"{THOUGHT}two"))
    assert one == [f"{THOUGHT}one<|im_end|>", f"{THOUGHT}two<|im_end|>"]


def test_a_prompt_that_closes_thoughts_is_continued_with_the_answer(made: Make) -> None:
    closes = ASKS.replace("assistant\\n'", "assistant\\n<think>\\n\\n</think>\\n\\n'")
    encoder = made(templated("qwen3", FAMILIES["qwen3"].template.replace(ASKS, closes)))
    assert trained(encoder, turns_of("hi", "yes")) == [["yes<|im_end|>"]]
    (found,) = conversations(encoder, turns_of("hi", f"{THOUGHT}yes"))
    assert ([turn.trained for turn in found.turns], found.turns[0].lacks_thoughts) == (["yes<|im_end|>"], True)


def test_turns_of_others_after_the_last_answer_are_left_out(made: Make) -> None:
    (found,) = conversations(made("qwen2.5"), turns_of("hi", "yes", "thanks"))
    assert (found.mask[-1], "thanks" in made("qwen2.5").decode_all(found.token_ids)) == (1, False)


def test_tools_stand_in_the_tokens_and_are_not_trained(made: Make) -> None:
    tools = [{"name": "calculator"}]
    encoder = made("qwen2.5")
    assert trained(encoder, turns_of("hi", "yes"), tools=tools) == [["yes<|im_end|>"]]
    (found,) = conversations(encoder, turns_of("hi", "yes"), tools=tools)
    assert "calculator" in encoder.decode_all(found.token_ids)


def test_a_message_that_the_row_leaves_out_of_the_loss_is_only_read(made: Make) -> None:
    messages = turns_of("hi", "one", "more", "two", "last", "three")
    messages[3]["step_loss_mask"] = 0
    assert trained(made("qwen2.5"), messages) == [["one<|im_end|>", "three<|im_end|>"]]
    for message in messages:
        message["step_loss_mask"] = 0
    with pytest.raises(DataError, match="step_loss_mask"):
        conversations(made("qwen2.5"), messages)


def test_a_turn_that_changes_how_earlier_ones_are_written_is_found(made: Make) -> None:
    marks = "{% if m.role == 'assistant' and not loop.last %}{{ 'old ' }}{% endif %}"
    template = PLAIN.replace("+ (m.content or '') }}", "}}" + marks + "{{ m.content or '' }}") + ASKS
    messages = [*turns_of("hi", "one"), {"role": "assistant", "content": "two"}]
    assert trained(made(templated("qwen2.5", template)), messages) == [["one<|im_end|>", "two<|im_end|>"]]


@pytest.mark.parametrize("calls", ["calculator", [1], [{"function": "calculator"}], [{}]])
def test_what_is_no_tool_call_is_refused(made: Make, calls: Any) -> None:
    messages = [*turns_of("hi"), {"role": "assistant", "content": "yes", "tool_calls": calls}]
    with pytest.raises(DataError, match="message 2 of 2"):
        conversations(made("llama3"), messages)


def test_an_answer_may_start_with_the_words_of_a_header(made: Make) -> None:
    words = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}" + asks("assistant:")
    encoder = made(templated("qwen2.5", words))
    assert trained(encoder, turns_of("hi", "assistant: yes")) == [[" assistant: yes<|im_end|>"]]


def test_a_turn_in_parts_is_trained_as_the_template_writes_it(made: Make) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [*turns_of("hi"), {"role": "assistant", "content": parts}]
    assert trained(made("qwen2.5"), messages) == [["one\ntwo<|im_end|>"]]


def test_two_turns_of_the_assistant_in_a_row_are_both_trained(made: Make) -> None:
    messages = [*turns_of("hi", "one"), {"role": "assistant", "content": "two"}]
    assert trained(made("qwen2.5"), messages) == [["one<|im_end|>", "two<|im_end|>"]]


def test_the_turn_ends_at_the_first_stop_token(made: Make) -> None:
    twice = FAMILIES["qwen2.5"].template + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
    assert trained(made(templated("qwen2.5", twice)), turns_of("hi", "one", "more", "two")) == [
        ["one<|im_end|>", "two<|im_end|>"]
    ]


def test_a_template_without_an_end_token_trains_what_was_written_and_says_so(made: Make) -> None:
    bare = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}{% endfor %}" + ASKS
    (found,) = conversations(made(templated("qwen2.5", bare)), turns_of("hi", "yes", "more", "no"))
    assert [(turn.trained, turn.stops) for turn in found.turns] == [("yes", False), ("no", False)]


def test_an_end_token_at_which_no_engine_stops_is_trained_and_reported(made: Make) -> None:
    base = replace(FAMILIES["qwen2.5"], stops=("<|endoftext|>",))
    (found,) = conversations(made(base), turns_of("hi", "yes"))
    assert [(turn.trained, turn.end, turn.stops) for turn in found.turns] == [("yes<|im_end|>", "<|im_end|>", False)]
    assert mask_column(made(base)) == "no stop token"


def test_a_header_is_not_trained_where_the_template_has_no_generation_prompt(made: Make) -> None:
    encoder = made(templated("qwen2.5", PLAIN))
    assert trained(encoder, turns_of("hi", "yes", "more", "no")) == [["yes<|im_end|>", "no<|im_end|>"]]


def test_thoughts_that_no_template_reads_are_reported(made: Make) -> None:
    messages = [*turns_of("hi"), {"role": "assistant", "reasoning_content": "hm", "content": "yes"}]
    (found,) = conversations(made("qwen2.5"), messages)
    assert [(turn.trained, turn.lacks_thoughts) for turn in found.turns] == [("yes<|im_end|>", True)]


# --- The check against the messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assistant", "words"),
    [
        ("{{ '<|im_start|>assistant\\n' + messages[0].content + m.content }}", "holds message 0"),
        ("{{ '<|im_start|>assistant\\n' + m.content + ' ' + messages[0].content }}", "holds message 0"),
        ("{{ '<|im_start|>assistant\\n<|im_start|>assistant\\n' + m.content }}", "header"),
        ("{{ '<|im_start|>assistant\\n' + m.content[:2] }}", "'yes'"),
        ("{{ '<|im_start|>assistant\\n' }}", "'yes'"),
    ],
)
def test_a_turn_that_is_not_its_message_is_refused(made: Make, assistant: str, words: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + assistant
        + "{% else %}{{ '<|im_start|>user\\n' + m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        + ASKS
    )
    with pytest.raises(DataError, match=f"^message 1: .*{words}"):
        conversations(made(templated("qwen2.5", template)), turns_of("who?", "yes"))


def test_a_call_that_the_template_does_not_write_is_refused(made: Make) -> None:
    call = {"function": {"name": "calculator", "arguments": {"x": 2}}}
    messages = [*turns_of("hi", "yes", "2 + 2?"), {"role": "assistant", "content": "Hm.", "tool_calls": [call]}]
    with pytest.raises(DataError, match=r"^message 3: .*calculator"):
        conversations(made("llama3"), messages)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([{"role": "user", "content": "hi"}], "has no message"),
        ([{"role": "assistant", "content": "hi"}], "starts with a message"),
    ],
)
def test_a_conversation_without_an_answer_is_refused(made: Make, messages: Any, found: str) -> None:
    with pytest.raises(DataError, match=found):
        conversations(made("qwen2.5"), messages)


def test_a_template_that_refuses_the_messages_is_reported_with_its_words(made: Make) -> None:
    strict = "{% if messages | length > 2 %}{{ raise_exception('take turns') }}{% endif %}" + PLAIN + ASKS
    with pytest.raises(DataError, match=r"^message 3"):
        conversations(made(templated("qwen2.5", strict)), turns_of("a", "b", "c", "d"))


# --- Tokens ----------------------------------------------------------------------------------------------------------


def test_prompt_and_turn_are_the_tokens_that_engines_read_and_sample(made: Make) -> None:
    encoder = made("qwen2.5")
    (found,) = conversations(encoder, turns_of("hi", "\n\nthe answer", "more", " no"))
    assert found.token_ids[: found.prompt_length] == encoder.encode(turns_of("hi"))
    assert encoder.decode_all(found.token_ids) == encoder.render(
        turns_of("hi", "\n\nthe answer", "more", " no"), asks=False
    ).removesuffix("\n")


def test_the_tokens_of_a_usual_conversation_are_those_of_its_text(made: Make) -> None:
    encoder = made("qwen2.5")
    messages = turns_of("hi", "the answer", "more", "no")
    (found,) = conversations(encoder, messages)
    whole = encoder.render(messages, asks=False).removesuffix("\n")
    assert found.token_ids == encoder.encode_text(whole)


def test_a_tokenizer_that_starts_every_text_with_a_space_is_read_at_once(tmp_path: Path) -> None:
    """As Llama 2's: a piece that is tokenized alone would begin with a space that is not there."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=90, show_progress=False)
    tokenizer.train_from_iterator(["abcdefghijklmnopqrstuvwxyz [INST] yes no [/INST] one two </s>"] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content "
        "+ ' </s>' }}{% endfor %}"
    )
    fast.save_pretrained(tmp_path)
    config = json.loads((ARITHMETIC / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": fast.eos_token_id}))
    encoder = PromptEncoder(tmp_path, apply_chat_template=True)
    (found,) = conversations(encoder, turns_of("yes no", "one two"))
    assert found.token_ids == encoder.encode_text("[INST] yes no [/INST] one two </s>")
    (run,) = _runs(encoder, found.token_ids, found.mask)
    assert run.split() == ["one", "two", "</s>"]


def test_a_tokenizer_without_offsets_is_enough(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = made("kimi-k2")
    monkeypatch.setattr(type(encoder.tokenizer), "is_fast", property(lambda self: False))
    assert trained(encoder, turns_of("hi", "yes", "more", "no")) == [["yes<|im_end|>", "no<|im_end|>"]]


def test_further_arguments_of_the_template_change_what_is_rendered(made: Make) -> None:
    loud = templated("qwen2.5", "{% if loud %}{{ '<|endoftext|>' }}{% endif %}" + PLAIN + ASKS)
    mark = made(loud).tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert made(loud, template_arguments={"loud": True}).encode("x")[0] == mark
    assert made(loud).encode("x")[0] != mark


def test_the_embedded_template_is_read() -> None:
    encoder = PromptEncoder(ARITHMETIC / "model", apply_chat_template=True)
    (found,) = conversations(encoder, turns_of("1+1", "2", "3+4", "7"))
    assert json.dumps(found.mask) == "[0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1]"
    assert [turn.trained for turn in found.turns] == ["2<eos>", "7<eos>"]
    assert found.prompt_length == 5


# --- Any conversation ------------------------------------------------------------------------------------------------

THE_USERS = st.text("QWXYZ \n", min_size=1, max_size=12).filter(str.strip)
THE_ASSISTANTS = st.text("abcdef .\n\u00e9\u4e2d", min_size=1, max_size=12).filter(str.strip)
LETTERS_OF_USERS = set("QWXYZ")


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Conversations of users in capitals; answers with and without thoughts, which stand in the content or beside."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(THE_USERS)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(THE_USERS)})
        content = draw(THE_ASSISTANTS)
        if draw(st.booleans()):
            content = f"<think>\n{draw(THE_ASSISTANTS)}\n</think>\n\n{content}"
        messages.append({"role": "assistant", "content": content})
    return messages


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(messages=talks())
def test_what_is_trained_is_every_answer_and_nothing_of_a_user(made: Make, name: str, messages: Any) -> None:
    encoder = made(name)
    found = conversations(encoder, messages)
    runs = [run for one in found for run in _runs(encoder, one.token_ids, one.mask)]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    for run, content in zip(runs, answers, strict=True):
        thoughts, closed, answer = content.rpartition("</think>")
        assert run.endswith(FAMILIES[name].end)
        assert run.removesuffix(FAMILIES[name].end).rstrip().endswith(answer.strip())
        assert not closed or thoughts.removeprefix("<think>").strip() in run
        assert not LETTERS_OF_USERS & set(run.replace(FAMILIES[name].end, ""))
    for one in found:
        turn = one.turns[0]
        assert one.token_ids[: one.prompt_length] == encoder.encode_text(turn.prompt)
