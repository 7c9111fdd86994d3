from __future__ import annotations

import pytest

from slime_agents.tools import Tool, Toolbox, ToolCall, ToolError
from slime_core.errors import PluginError


async def add(a: int, b: int = 1) -> int:
    """The sum of two numbers.

    More for people.
    """
    return a + b


def greet(name: str) -> str:
    """Greets."""
    if not name:
        raise ToolError("no name to greet")
    return f"hello {name}"


def broken() -> str:
    raise KeyError("gone")


def box(*given: object, max_chars: int = 100) -> Toolbox:
    return Toolbox(given or (add, [greet, broken]), max_chars=max_chars)


def test_a_description_has_the_name_the_first_paragraph_and_the_schema_of_the_arguments() -> None:
    function = Tool(add).description["function"]
    assert isinstance(function, dict)
    assert (function["name"], function["description"]) == ("add", "The sum of two numbers.")
    parameters = function["parameters"]
    assert isinstance(parameters, dict)
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["a"]["type"] == "integer"  # type: ignore[call-overload,index]


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("add", '{"a": 2, "b": 3}', "5"),
        ("add", '{"a": "2"}', "3"),
        ("greet", '{"name": "Ann"}', "hello Ann"),
        ("greet", '{"name": ""}', "error: no name"),
        ("add", '{"a": "x"}', "error: add: a: "),
        ("add", "{}", "error: add: a: "),
        ("add", '{"a": 1, "c": 2}', "error: add: c: "),
        ("add", "[1]", "add are no JSON"),
        ("add", "{", "add are no JSON"),
        pytest.param("add", "[" * 10_000, "add are no JSON", id="deep"),
        ("sub", "{}", "is no tool 'sub'"),
    ],
)
async def test_a_call_is_answered_with_the_result_or_with_what_is_wrong_with_it(name, arguments, answer) -> None:
    assert answer in await box().call(ToolCall(name, arguments))


async def test_an_exception_of_a_tool_propagates() -> None:
    with pytest.raises(KeyError, match="gone"):
        await box().call(ToolCall("broken", "{}"))


async def test_long_answers_are_cut_and_say_so() -> None:
    answer = await box(max_chars=7).call(ToolCall("greet", '{"name": "Hannibal"}'))
    assert answer == "hello H\n[7 characters left out]"


def test_tools_have_names_of_their_own_and_typed_arguments() -> None:
    with pytest.raises(PluginError, match="--tools names two"):
        box(add, (add,))
    with pytest.raises(PluginError, match="found 3"):
        box(3)
    with pytest.raises(PluginError, match="arguments have no JSON"):
        box(opaque)


def opaque(what: Tool) -> str:
    return str(what)
