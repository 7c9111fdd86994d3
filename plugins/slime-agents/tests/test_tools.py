"""Tools: their descriptions, the answers to calls, and the Python tool of ``examples/python_tool``."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from slime_agents.tools import Tool, Toolbox, ToolCall, ToolError
from slime_core.errors import PluginError

FILE = Path(__file__).parents[3] / "examples" / "python_tool" / "tool.py"


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


def opaque(what: Tool) -> str:
    return str(what)


def box(*tools: object, max_chars: int = 100) -> Toolbox:
    return Toolbox(tools or (add, [greet, broken]), max_chars=max_chars)


def test_a_description_has_the_name_the_first_paragraph_and_the_schema_of_the_arguments() -> None:
    function: Any = Tool(add).description["function"]
    assert (function["name"], function["description"]) == ("add", "The sum of two numbers.")
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["a"]["type"] == "integer"


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


async def test_an_exception_propagates_and_a_long_answer_is_cut() -> None:
    with pytest.raises(KeyError, match="gone"):
        await box().call(ToolCall("broken", "{}"))
    answer = await box(max_chars=7).call(ToolCall("greet", '{"name": "Hannibal"}'))
    assert answer == "hello H\n[7 characters left out]"


@pytest.mark.parametrize(("tools", "named"), [((add, (add,)), "--tools"), ((3,), "3"), ((opaque,), "opaque")])
def test_tools_have_different_names_and_typed_arguments(tools: tuple[object, ...], named: str) -> None:
    with pytest.raises(PluginError, match=named):
        box(*tools)


# --- The Python tool --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("python_tool", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(37 + 45)", "82"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = [0] * 10**9", "MemoryError"),
        ("import socket; socket.create_connection(('127.0.0.1', {port}))", "OSError"),
        ("open('large', 'wb').write(b'0' * 2**21); print('written')", "File too large"),
        ("import os; print(sorted({*os.environ} - {'LC_CTYPE'}))", "['PATH']"),
    ],
)
async def test_a_program_has_what_it_needs_and_no_more(example, code, answer) -> None:
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert answer in await example.run_python(code.replace("{port}", str(port)))


async def test_programs_that_flood_are_cut(example) -> None:
    """Several, because one alone seldom fills the pipe after its last part was read."""
    for answer in await asyncio.gather(*[example.run_python("while True: print('x' * 1000)") for _ in range(16)]):
        assert len(answer) < example.OUTPUT_CHARS + 20
        assert answer.endswith("[cut here]")


async def test_a_program_that_computes_for_too_long_is_ended(example, monkeypatch) -> None:
    monkeypatch.setattr(example, "PROGRAM", example.PROGRAM.replace("RLIMIT_CPU, (5,)", "RLIMIT_CPU, (1,)"))
    with pytest.raises(ToolError, match="512 MiB"):
        await example.run_python("while True: pass")


async def test_a_program_that_hangs_ends_with_all_that_it_started(example, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(example, "LIMIT_S", 1.0)
    mark = f"{os.getpid()}{tmp_path.name}"
    code = f"import os, time\nfor _ in range(3): os.fork()\nos.getpid() == 1 or os.setsid()\ntime.sleep(60) # {mark}"
    with pytest.raises(ToolError, match="1 s"):
        await example.run_python(code)
    while mark in "".join(map(_command, Path("/proc").glob("[0-9]*"))):  # until the kernel has ended them
        await asyncio.sleep(0.02)


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


async def test_a_model_calls_it_by_name_and_reads_its_limits(example) -> None:
    tools = box(example.run_python)
    assert await tools.call(ToolCall("run_python", '{"code": "print(6 * 7)"}')) == "42"
    description: Any = tools.descriptions[0]
    assert description["function"]["description"].startswith("Run a Python program")
