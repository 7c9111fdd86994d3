"""Loss masks of conversations, compared with the messages, for templates of every family of models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder
from slime_datasets.masks import Conversation, conversations
from tests.chat_families import ASKS, FAMILIES, PLAIN, Family, asks, encoder_of, mask_column

THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = {"function": {"name": "calculator", "arguments": {"x": 2}}}

Messages = list[dict[str, Any]]
Make = Callable[..., PromptEncoder]


def turns_of(*contents: Any) -> Messages:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


def says(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def qwen(template: str) -> Family:
    return replace(FAMILIES["qwen2.5"], template=template)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes the encoder of a family, each once."""
    encoders: dict[str, PromptEncoder] = {}

    def make(family: str | Family, **arguments: Any) -> PromptEncoder:
        key = f"{family} {arguments}"
        if key not in encoders:
            of = FAMILIES[family] if isinstance(family, str) else family
            encoders[key] = encoder_of(of, tmp_path_factory.mktemp("model"), **arguments)
        return encoders[key]

    return make


def runs_of(encoder: PromptEncoder, conversation: Conversation) -> list[str]:
    """Return the text of each run of trained tokens."""
    ids, mask = conversation.token_ids, conversation.mask
    runs: list[list[int]] = []
    for place, (token, trains) in enumerate(zip(ids, mask, strict=True)):
        if trains and not (place and mask[place - 1]):
            runs.append([])
        if trains:
            runs[-1].append(token)
    return [encoder.decode_all(run) for run in runs]


def trained(encoder: PromptEncoder, messages: Messages, **more: Any) -> list[list[str]]:
    return [runs_of(encoder, conversation) for conversation in conversations(encoder, messages, **more)]


# --- By hand ----------------------------------------------------------------------------------------------------------

FIRST, SECOND = "<think>\nadd\n</think>\n\n4", "<think>\nadd again\n</think>\n\n6"
GLM_ASKED = "\n<think>add</think>\n<tool_call>calculator</tool_call><|observation|>"
GLM_CALLS = [*turns_of("2 + 2?"), says("<think>add</think>", tool_calls=[CALL]), {"role": "tool", "content": "4"}]
LEFT_OUT = turns_of("hi", "one", "more", "two", "last", "three")
LEFT_OUT[3]["step_loss_mask"] = 0
MARKS = "{% if m.role == 'assistant' and not loop.last %}{{ 'old ' }}{% endif %}"
OLDER_DIFFER = PLAIN.replace("+ (m.content or '') }}", "}}" + MARKS + "{{ m.content or '' }}") + ASKS
WORDS = "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}" + asks("assistant:")
TWICE = FAMILIES["qwen2.5"].template + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"
CLOSED = ASKS.replace("assistant\\n'", "assistant\\n<think>\\n\\n</think>\\n\\n'")
CLOSES = replace(FAMILIES["qwen3"], template=FAMILIES["qwen3"].template.replace(ASKS, CLOSED))
CASES: dict[str, tuple[str | Family, Messages, list[list[str]]]] = {
    "r1 trains thoughts and answer, never the question": (
        "r1-distill",
        turns_of("What is 2 + 2?", "<think>\nTwo and two make four.\n</think>\n\nIt is 4."),
        [["Two and two make four.\n</think>\n\nIt is 4.<｜end▁of▁sentence｜>"]],
    ),
    "glm trains the token that opens the next turn": (
        "glm4.5",
        turns_of("2 + 2?", "4", "3 + 3?", "6"),
        [["\n<think></think>\n4<|user|>", "\n<think></think>\n6<|user|>"]],
    ),
    "glm ends a call with the token of the result": (
        "glm4.5",
        [*GLM_CALLS, says("It is 4.")],
        [[GLM_ASKED, "\n<think></think>\nIt is 4.<|user|>"]],
    ),
    "glm ends a last call in the same way": ("glm4.5", GLM_CALLS[:2], [[GLM_ASKED]]),
}


def of_qwen(family: str | Family, messages: Messages, *runs: str, sequences: int = 1) -> Any:
    """A case in which each run is an answer and the end of its turn."""
    size = len(runs) // sequences
    ended = [f"{run}<|im_end|>" for run in runs]
    return family, messages, [ended[start : start + size] for start in range(0, len(runs), size)]


FOUR = turns_of("hi", "one", "more", "two")
IN_A_ROW = [*turns_of("hi", "one"), says("two")]
THOUGHTFUL = turns_of("hi", f"{THOUGHT}one", "more", f"{THOUGHT}two")
PARTS = turns_of("hi", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
CONTINUED = ("add\n</think>\n\n4", "add again\n</think>\n\n6")
CASES |= {
    "turns after the last answer are left out": of_qwen("qwen2.5", FOUR[:3], "one"),
    "a message that the row leaves out of the loss": of_qwen("qwen2.5", LEFT_OUT, "one", "three"),
    "two turns in a row": of_qwen("qwen2.5", IN_A_ROW, "one", "two"),
    "a turn that changes how earlier ones are written": of_qwen(qwen(OLDER_DIFFER), IN_A_ROW, "one", "two"),
    "a turn in parts": of_qwen("qwen2.5", PARTS, "one\ntwo"),
    "thoughts that the template keeps": of_qwen("qwen2.5", THOUGHTFUL, f"{THOUGHT}one", f"{THOUGHT}two"),
    "a turn ends at the first stop token": of_qwen(qwen(TWICE), FOUR, "one", "two"),
    "a template without a generation prompt": of_qwen(qwen(PLAIN), FOUR, "one", "two"),
    "a prompt that closes thoughts": of_qwen(CLOSES, FOUR[:2], "one"),
    "the words of a header": of_qwen(qwen(WORDS), turns_of("hi", "assistant: yes"), " assistant: yes"),
}
for family in ("qwen3-thinking-2507", "qwq"):
    opened = of_qwen(family, turns_of("2 + 2?", FIRST, "3 + 3?", SECOND), *CONTINUED, sequences=2)
    CASES[f"a prompt that opens thoughts is continued, {family}"] = opened
    without = of_qwen(family, turns_of("2 + 2?", "4"), "\n</think>\n\n4")
    CASES[f"a prompt that opens thoughts is continued without any, {family}"] = without


@pytest.mark.parametrize("case", CASES)
def test_the_trained_tokens_by_hand(made: Make, case: str) -> None:
    family, messages, runs = CASES[case]
    encoder = made(family)
    assert trained(encoder, messages) == runs
    last = conversations(encoder, messages)[-1]
    assert last.mask[-1] == 1
    # The tokens of the prompt are those that an engine reads.
    assert last.token_ids[: last.prompt_length] == encoder.encode_text(last.turns[0].prompt)


def test_a_call_and_its_thoughts_stay_in_one_sequence(made: Make) -> None:
    messages = [
        *turns_of("2 + 2?"),
        says(f"{THOUGHT}Hm.", tool_calls=[CALL]),
        {"role": "tool", "content": "4"},
        says(f"{THOUGHT}It is 4."),
    ]
    ((call, answer),) = trained(made("qwen3"), messages)
    assert call.startswith(f"{THOUGHT}Hm.\n<tool_call>\n")
    assert call.endswith("</tool_call><|im_end|>")
    assert answer == f"{THOUGHT}It is 4.<|im_end|>"


def test_tools_are_in_the_tokens_and_are_not_trained(made: Make) -> None:
    encoder = made("qwen2.5")
    (conversation,) = conversations(encoder, turns_of("hi", "yes"), tools=[{"name": "calculator"}])
    assert runs_of(encoder, conversation) == ["yes<|im_end|>"]
    assert "calculator" in encoder.decode_all(conversation.token_ids)


@pytest.mark.parametrize("name", ["r1-distill", "qwen3", "qwen3-thinking-2507", "qwq", "glm4.5", "glm4.7"])
def test_reasoning_content_is_trained_as_thoughts(made: Make, name: str) -> None:
    ((run,),) = trained(made(name), [*turns_of("hi"), says("yes", reasoning_content="so be it")])
    before, end, answer = run.partition("</think>")
    assert before.removeprefix("\n").removeprefix("<think>").strip() == "so be it"
    assert (end, answer.strip()) == ("</think>", f"yes{FAMILIES[name].end}")


@pytest.mark.parametrize("name", ["r1-distill", "qwen3-thinking-2507", "qwq"])
@pytest.mark.parametrize(
    ("content", "run"),
    [
        ("<think>\n\n</think>\n\nyes", "\n</think>\n\nyes"),
        ("</think>\n\nyes", "</think>\n\nyes"),
        ("already thinking</think>\n\nyes", "already thinking</think>\n\nyes"),
        ("<think>\nnever ends", "never ends"),
    ],
)
def test_empty_and_unfinished_thoughts_continue_the_prompt(made: Make, name: str, content: str, run: str) -> None:
    ((text,),) = trained(made(name), turns_of("hi", content))
    assert text.removesuffix(FAMILIES[name].end).replace("\n", "").endswith(run.replace("\n", ""))
    assert text.count("</think>") <= 2
    if name != "qwen3-thinking-2507":
        assert text == run + FAMILIES[name].end


@pytest.mark.parametrize("name", FAMILIES)
def test_a_user_who_repeats_the_answer_is_not_trained(made: Make, name: str) -> None:
    for messages in (turns_of("4", "4", "4", "4"), turns_of("the answer", "the answer", "the answer", "no")):
        runs = [run for sequence in trained(made(name), messages) for run in sequence]
        assert [run.count(message["content"]) for run, message in zip(runs, messages[1::2], strict=True)] == [1, 1]


def test_the_table_of_templates_tells_what_is_trained(made: Make) -> None:
    columns = {name: mask_column(made(name)) for name in FAMILIES}
    assert columns == dict.fromkeys(FAMILIES, "yes")
    assert mask_column(made(OTHER_END)) == "no stop token"


# --- What is reported -------------------------------------------------------------------------------------------------

BARE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}{% endfor %}" + ASKS
OTHER_END = replace(FAMILIES["qwen2.5"], stops=("<|endoftext|>",))


@pytest.mark.parametrize(
    ("family", "message", "turn"),
    [
        (qwen(BARE), says("yes"), ("yes", "", False, False)),
        (OTHER_END, says("yes"), ("yes<|im_end|>", "<|im_end|>", False, False)),
        (FAMILIES["qwen2.5"], says("yes", reasoning_content="hm"), ("yes<|im_end|>", "<|im_end|>", True, True)),
        (
            CLOSES,
            says(f"{THOUGHT}yes"),
            ("yes<|im_end|>", "<|im_end|>", True, True),
        ),
    ],
    ids=["no end token", "an end token at which no engine stops", "thoughts that are not written", "thoughts closed"],
)
def test_a_turn_without_a_stop_token_or_its_thoughts_is_reported(made: Make, family: Family, message, turn) -> None:
    (conversation,) = conversations(made(family), [*turns_of("hi"), message])
    (found,) = conversation.turns
    assert (found.trained, found.end, found.stops, found.lacks_thoughts) == turn


# --- What is refused --------------------------------------------------------------------------------------------------

HEADER = "{{ '<|im_start|>assistant\\n"
STRICT = "{% if messages | length > 2 %}{{ raise_exception('take turns') }}{% endif %}" + PLAIN + ASKS


def writes(assistant: str) -> Family:
    """A family whose template writes turns of the assistant as ``assistant`` does."""
    others = "{% else %}{{ '<|im_start|>user\\n' + m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    return qwen("{% for m in messages %}{% if m.role == 'assistant' %}" + assistant + others + ASKS)


@pytest.mark.parametrize(
    ("family", "messages", "named"),
    [
        (writes(HEADER + "' + messages[0].content + m.content }}"), turns_of("who?", "yes"), "message 1: .*message 0"),
        (writes(HEADER + "' + m.content + messages[0].content }}"), turns_of("who?", "yes"), "message 1: .*message 0"),
        (writes(HEADER + "<|im_start|>assistant\\n' + m.content }}"), turns_of("who?", "yes"), "message 1: .*header"),
        (writes(HEADER + "' + m.content[:2] }}"), turns_of("who?", "yes"), "message 1: .*'yes'"),
        (writes(HEADER + "' }}"), turns_of("who?", "yes"), "message 1: .*'yes'"),
        (qwen(STRICT), turns_of("a", "b", "c", "d"), "message 3"),
        ("llama3", [*turns_of("hi", "yes", "2?"), says("Hm.", tool_calls=[CALL])], "message 3: .*calculator"),
        *(
            ("llama3", [*turns_of("hi"), says("yes", tool_calls=calls)], "message 2 of 2")
            for calls in ("calculator", [1], [{"function": "calculator"}], [{}])
        ),
        ("qwen2.5", turns_of("hi"), "no message"),
        ("qwen2.5", [says("hi")], "starts with a message"),
        ("qwen2.5", [{**message, "step_loss_mask": 0} for message in turns_of("hi", "one")], "step_loss_mask"),
    ],
)
def test_a_conversation_whose_turns_cannot_be_found_is_refused(made: Make, family, messages, named: str) -> None:
    with pytest.raises(DataError, match=named):
        conversations(made(family), messages)


# --- Tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contents", [("hi", "\n\nthe answer", "more", " no"), ("hi", "the answer", "more", "no")])
def test_the_tokens_are_those_that_engines_read_and_sample(made: Make, contents: tuple[str, ...]) -> None:
    encoder = made("qwen2.5")
    (conversation,) = conversations(encoder, turns_of(*contents))
    text = encoder.render(turns_of(*contents), asks=False).removesuffix("\n")
    assert conversation.token_ids[: conversation.prompt_length] == encoder.encode(turns_of("hi"))
    assert encoder.decode_all(conversation.token_ids) == text
    if contents[1] == "the answer":
        assert conversation.token_ids == encoder.encode_text(text)


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
    (conversation,) = conversations(encoder, turns_of("yes no", "one two"))
    assert conversation.token_ids == encoder.encode_text("[INST] yes no [/INST] one two </s>")
    assert runs_of(encoder, conversation)[0].split() == ["one", "two", "</s>"]


def test_a_tokenizer_without_offsets_is_enough(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = made("kimi-k2")
    monkeypatch.setattr(type(encoder.tokenizer), "is_fast", property(lambda self: False))
    assert trained(encoder, turns_of("hi", "yes", "more", "no")) == [["yes<|im_end|>", "no<|im_end|>"]]


# --- Any conversation -------------------------------------------------------------------------------------------------

THE_USERS = st.text("QWXYZ \n", min_size=1, max_size=12).filter(str.strip)
THE_ASSISTANTS = st.text("abcdef .\n\u00e9\u4e2d", min_size=1, max_size=12).filter(str.strip)
LETTERS_OF_USERS = set("QWXYZ")


@st.composite
def talks(draw: st.DrawFn) -> Messages:
    """Conversations of users in capitals; answers with and without thoughts."""
    messages: Messages = [{"role": "system", "content": draw(THE_USERS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        content = draw(THE_ASSISTANTS)
        if draw(st.booleans()):
            content = f"<think>\n{draw(THE_ASSISTANTS)}\n</think>\n\n{content}"
        messages += turns_of(draw(THE_USERS), content)
    return messages


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(messages=talks())
@example(messages=turns_of("Q", "the answer", "W", "is 4\n\nthe end. \u00e9 \U0001f600"))
@example(messages=turns_of("Q", f"{THOUGHT}one", "W", f"{THOUGHT}two"))
@example(messages=turns_of("Q", "\n\nthe answer", "W", "\tthe answer\n", "X", "  the answer "))
def test_every_answer_is_trained_with_its_end_and_nothing_of_a_user(made: Make, name: str, messages: Any) -> None:
    encoder = made(name)
    sequences = conversations(encoder, messages)
    runs = [run for sequence in sequences for run in runs_of(encoder, sequence)]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    for run, content in zip(runs, answers, strict=True):
        thoughts, closed, answer = content.rpartition("</think>")
        assert run.endswith(FAMILIES[name].end)
        assert run.removesuffix(FAMILIES[name].end).rstrip().endswith(answer.strip())
        assert not closed or thoughts.removeprefix("<think>").strip() in run
        assert not LETTERS_OF_USERS & set(run.replace(FAMILIES[name].end, ""))
    for sequence in sequences:
        assert sequence.token_ids[: sequence.prompt_length] == encoder.encode_text(sequence.turns[0].prompt)
