"""Messages as templates of each family read them: nothing is lost in silence. The templates are ours; each does what
that of the family does with parts, roles, nulls, calls and tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import DataError
from slime_core.prompts.chat import PromptEncoder, PromptTokenizer
from slime_core.prompts.messages import messages_in

FOLDER = ARITHMETIC / "model"

TURN = "{{ '<' + m.role + '>' + content + '<end>' }}"


def calls_as(arguments: str) -> str:
    """Return the part of a template that writes calls, with their ``arguments``."""
    return (
        """{% for call in m.tool_calls or [] %}
{{ '{"name": "' + call.function.name + '", ' }}"arguments": ARGUMENTS{{ '}' }}
{% endfor %}"""
    ).replace("ARGUMENTS", arguments)


ASKS = "{{ '<assistant>' if add_generation_prompt }}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"

QWEN3 = (
    TOOLS
    + """{% for m in messages %}{% set content = m.content if m.content is string else '' %}
{% if '</think>' in content and not loop.last %}
{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{% if m.role in ('user', 'system', 'assistant', 'tool') %}"""
    + TURN
    + calls_as(
        "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    )
    + "{% endif %}{% endfor %}"
    + ASKS
)
QWEN25 = (
    TOOLS
    + "{% for m in messages %}{% set content = m.content %}{% if m.role != 'developer' %}"
    + TURN
    + calls_as("{{ call.function.arguments | tojson }}")
    + "{% endif %}{% endfor %}"
    + ASKS
)
LLAMA = (
    TOOLS
    + """{% for m in messages %}{% if 'tool_calls' in m %}
{% if m.tool_calls | length != 1 %}{{ raise_exception('one') }}
{% endif %}<assistant>{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}<end>
{% elif m.role == 'tool' %}{{ '<tool>' + m.content | tojson }}{% else %}{{ '<' + m.role + '>' + m.content | trim }}<end>
{% endif %}{% endfor %}"""
    + ASKS
)
DEEPSEEK = (
    """{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' and not ns.system %}
{% set ns.system = m.content %}{% endif %}{% endfor %}{{ ns.system }}{% for m in messages %}{% if m.role == 'user' %}
{{ '<user>' + m.content }}{% elif m.role == 'tool' %}{{ '<tool>' + m.content }}
{% elif m.role == 'assistant' and 'tool_calls' in m %}{% for call in m.tool_calls %}
{{ call.type + call.function.name + '
```json
' + call.function.arguments }}{% endfor %}{% elif m.role == 'assistant' %}
{{ '<assistant>' + m.content.split('</think>')[-1] }}
{% endif %}{% endfor %}"""
    + ASKS
)
VISION = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% for p in m.content %}{% if p.type == 'image' %}<image>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}" + ASKS
)
BOTH = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}" + ASKS
)
GPT_OSS = (
    "{% for m in messages %}{{ '<' + ('developer' if m.role == 'system' else m.role) + '>' + m.content }}{% endfor %}"
    + ASKS
)
XML = (
    TOOLS + "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% for call in m.tool_calls or [] %}"
    "<function={{ call.function.name }}>{% for k, v in call.function.arguments | items %}<{{ k }}>"
    "{{ v if v is string else v | tojson }}</{{ k }}>{% endfor %}{% endfor %}{% endfor %}" + ASKS
)
FAMILIES = {
    **{"qwen3": QWEN3, "qwen2.5": QWEN25, "llama": LLAMA, "deepseek": DEEPSEEK},
    **{"vision": VISION, "both": BOTH, "gpt-oss": GPT_OSS, "xml": XML},
}


def renderer(template: str) -> PromptTokenizer:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    tokenizer.chat_template = template
    return PromptTokenizer(tokenizer, FOLDER, apply_chat_template=True)


def render(family: str, *messages: dict[str, Any], tools: list[Any] | None = None) -> str:
    """Return the rendered messages without the template's line ends."""
    return renderer(FAMILIES[family]).render(messages, tools=tools, asks=True).replace("\n", "")


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "name": "mul", "content": content}


def calls(arguments: Any, name: str = "mul") -> list[dict[str, Any]]:
    return [{"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}]


def text(words: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": words}


TOOL = {"type": "function", "function": {"name": "mul", "description": "Multiply.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "content",
    [[text("What is 2 + 2?")], ["What is 2 + 2?"], [text("What is 2 + 2?", "input_text")], "What is 2 + 2?"],
    ids=["part", "list of text", "input_text", "text"],
)
def test_a_question_in_parts_is_the_question(family: str, content: Any) -> None:
    assert render(family, user(content)).replace("<end>", "") == "<user>What is 2 + 2?<assistant>"


def test_parts_are_lines_of_a_template_that_reads_text_and_are_adjacent_in_one_that_reads_parts() -> None:
    parts = user([text("Look."), text("What?")])
    assert renderer(QWEN25).render([parts], asks=False) == "<user>Look.\nWhat?<end>"
    assert renderer(VISION).render([parts], asks=False) == "<user>Look.What?"


@pytest.mark.parametrize("family", ["qwen3", "llama", "deepseek"])
def test_an_image_for_a_template_that_reads_text_is_refused(family: str) -> None:
    with pytest.raises(DataError, match=r"message 1 of 1 .*'image'"):
        render(family, user([{"type": "image"}, text("What is it?")]))


@pytest.mark.parametrize("content", [[{"type": "text"}], [text("a"), 7], 7])
def test_content_that_is_no_text_and_no_part_is_refused(content: Any) -> None:
    with pytest.raises(DataError, match="message 2 of 2"):
        render("qwen3", assistant("hello"), user(content))


@pytest.mark.parametrize("family", ["qwen3", "qwen2.5", "llama", "deepseek", "both"])
def test_developer_is_system_if_the_template_lacks_it(family: str) -> None:
    developer = {"role": "developer", "content": "Answer in French."}
    assert render(family, developer, user("2 + 2?")) == render(
        family, {"role": "system", "content": "Answer in French."}, user("2 + 2?")
    )


def test_json_text_of_messages_is_messages() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("What is 2 + 2?")]
    encoder = renderer(QWEN3)
    assert encoder.text(json.dumps(messages)) == encoder.text(messages)
    assert messages_in(json.dumps(messages, indent=1)) == messages


@pytest.mark.parametrize(
    "question",
    [
        "[1, 2, 3]",
        "[]",
        '[{"role": "user"',
        '{"role": "user", "content": "a"}',
        '[{"name": "role"}]',
        '["role"]',
        "a [b]",
    ],
)
def test_other_text_with_brackets_is_a_question(question: str) -> None:
    assert messages_in(question) is None


NULLS = {"tool_calls": None, "name": None, "reasoning_content": None, "function_call": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_of_null_are_none(family: str) -> None:
    turns = [user("2 + 2?"), assistant("4"), user("And 3 + 3?")]
    assert render(family, *({**turn, **NULLS} for turn in turns)) == render(family, *turns)


@pytest.mark.parametrize("family", ["qwen3", "qwen2.5", "llama", "deepseek", "xml"])
@pytest.mark.parametrize("changed", [{"content": None}, {}], ids=["null", "absent"])
def test_no_content_beside_calls_is_empty_text(family: str, changed: dict[str, None]) -> None:
    turn = {"role": "assistant", "tool_calls": calls({"a": 3}), **changed}
    whole = [user("3 times 18?"), turn, tool("54")]
    assert render(family, *whole) == render(family, whole[0], {**turn, "content": ""}, whole[2])


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2.5", '{"name": "mul", "arguments": {"a": 3, "b": "x", "c": null}}'),
        ("qwen3", '{"name": "mul", "arguments": {"a": 3, "b": "x", "c": null}}'),
        ("deepseek", 'functionmul```json{"a": 3, "b": "x", "c": null}<tool>54'),
        ("xml", "<function=mul><a>3</a><b>x</b><c>null</c>"),
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": 3, "b": "x", "c": null}', {"a": 3, "b": "x", "c": None}])
def test_arguments_have_the_form_that_the_template_writes(family: str, arguments: Any, expected: str) -> None:
    content = None if family == "deepseek" else ""
    assert expected in render(family, user("3?"), assistant(content, tool_calls=calls(arguments)), tool("54"))


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
@pytest.mark.parametrize("family", ["qwen2.5", "deepseek"])
def test_a_call_without_arguments_has_an_empty_object(family: str, arguments: Any) -> None:
    assert "{}" in render(family, user("Time?"), assistant("", tool_calls=calls(arguments, "clock")), tool("12"))


def test_other_forms_of_calls_are_openais() -> None:
    expected = render("llama", user("a"), assistant("", tool_calls=calls({"a": 3})))
    flat = [{"name": "mul", "arguments": {"a": 3}}]
    assert render("llama", user("a"), assistant("", tool_calls=flat)) == expected
    old = {"role": "assistant", "content": None, "function_call": {"name": "mul", "arguments": '{"a": 3}'}}
    assert render("llama", user("a"), old) == expected


@pytest.mark.parametrize("arguments", ['{"a": 3', "[1]", "three"])
def test_arguments_that_are_no_object_are_refused_by_a_template_that_needs_one(arguments: str) -> None:
    with pytest.raises(DataError, match=r"message 2 of 3 .*'mul'"):
        render("qwen2.5", user("3 times 18?"), assistant("", tool_calls=calls(arguments)), tool("54"))


LOST = [
    ("deepseek", [user("2 + 2?"), {"role": "system", "content": "Be brief."}, user("a")], None),
    ("deepseek", [{"role": "system", "content": "Hi."}, user("2"), {"role": "system", "content": "4"}, user("4")], 3),
    ("qwen3", [user("4"), {"role": "observation", "content": "4"}, user("4")], 2),
    ("qwen2.5", [user("2 + 2?"), user("4"), {"role": "developer", "content": "French!"}], None),
    ("llama", [user("3 times 18?"), assistant("I multiply.", tool_calls=calls({"a": 3})), tool("54")], 2),
    ("vision", [user("mul?"), assistant("", tool_calls=calls({"mul": "mul"})), user("mul")], 2),
]


@pytest.mark.parametrize(("family", "messages", "number"), LOST)
def test_a_message_that_the_template_leaves_out_is_named(family: str, messages: list[Any], number: int | None) -> None:
    if number is None:
        render(family, *messages)
        return
    role = messages[number - 1]["role"]
    with pytest.raises(DataError, match=rf"message {number} of {len(messages)} \(role '{role}'\)"):
        render(family, *messages)


AWKWARD = [
    '  He said "a < b & c > d", it\'s\n\n\tdef f(x):\n    return {"k": [1, 2]}\n é 日本 \\n \\frac{1}{2} 😀 ',
    "   \n",
    "",
    '"',
    "{{ messages }}{% raw %}",
    "<think> is a tag",
    "a\r\nb\u2028c",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", AWKWARD)
def test_no_text_is_refused_that_is_in_the_result(family: str, words: str) -> None:
    conversation = [user(f"a{words}"), assistant(words), user(f"{words}b")]
    render(family, *conversation)
    if family in ("qwen3", "qwen2.5", "llama", "deepseek", "xml"):
        call = assistant("", tool_calls=calls(json.dumps({"words": words, "more": [{"deep": words}]})))
        render(family, user("a"), call, tool(words), user("b"))


ESCAPED = [
    "{% for m in messages %}{{ m.content | e }}{% endfor %}",
    "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "{% for m in messages %}{{ m.content | trim | replace('\n', ' ') }}{% endfor %}",
    "{{ messages | tojson }}",
]


@pytest.mark.parametrize("template", ESCAPED)
@pytest.mark.parametrize("words", AWKWARD)
def test_escaped_text_is_in_the_result(template: str, words: str) -> None:
    renderer(template).render([user(f"a{words}"), user(words)], asks=True)


@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_thoughts_of_earlier_turns_may_be_left_out(family: str) -> None:
    turns = [user("2 + 2?"), assistant("<think>\nTwo and two.\n</think>\n\nFour."), user("3 + 3?")]
    assert "Two and two" not in render(family, *turns)
    with pytest.raises(DataError, match="message 2 of 2"):
        renderer("{{ messages[0].content }}").render(turns[:2], asks=False)


@pytest.mark.parametrize("family", ["deepseek", "vision", "both", "gpt-oss"])
def test_tools_that_the_template_leaves_out_are_refused(family: str) -> None:
    encoder = renderer(FAMILIES[family])
    with pytest.raises(DataError, match="--tool-key"):
        encoder.text("mul?", tools=[TOOL])
    assert not encoder.template().shows_tools


def encoder_in(folder: Path, template: str) -> PromptEncoder:
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return PromptEncoder(folder, apply_chat_template=True)


def test_a_message_that_cannot_continue_a_conversation_is_named_by_its_own_number(tmp_path: Path) -> None:
    encoder = encoder_in(tmp_path, QWEN3)
    with pytest.raises(DataError, match=r"message 2 of 2 \(role 'observation'\)"):
        encoder.encode_messages([user("3"), {"role": "observation", "content": "4"}])


@pytest.mark.parametrize("family", ["vision", "both"])
def test_a_template_that_reads_images_gets_them(family: str) -> None:
    assert render(family, user([{"type": "image"}, text("What?")])) == "<user><image>What?<assistant>"


@pytest.mark.parametrize("family", ["qwen3", "qwen2.5", "llama", "xml"])
def test_tools_that_the_template_writes_are_in_the_result(family: str) -> None:
    assert '"name": "mul"' in render(family, user("3 times 18?"), tools=[TOOL])
