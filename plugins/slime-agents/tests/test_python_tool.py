"""The Python tool of examples/python_tool: its limits, and that a model can call it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from slime_agents.tools import Toolbox, ToolCall, ToolError

FILE = Path(__file__).parents[3] / "examples" / "python_tool" / "tool.py"


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
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        found = await example.run_python(code.replace("{port}", str(server.sockets[0].getsockname()[1])))
    assert answer in found


async def test_programs_that_flood_are_cut(example) -> None:
    """Several, because one alone seldom fills the pipe after its last part was read."""
    for found in await asyncio.gather(*[example.run_python("while True: print('x' * 1000)") for _ in range(16)]):
        assert len(found) < example.OUTPUT_CHARS + 20
        assert found.endswith("[cut here]")


async def test_a_program_that_computes_for_too_long_is_ended(example, monkeypatch) -> None:
    monkeypatch.setattr(example, "PROGRAM", example.PROGRAM.replace("RLIMIT_CPU, (5,)", "RLIMIT_CPU, (1,)"))
    with pytest.raises(ToolError, match="time and 512 MiB"):
        await example.run_python("while True: pass")


async def test_a_program_that_hangs_ends_with_all_that_it_started(example, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(example, "LIMIT_S", 1.0)
    mark = f"{os.getpid()}{tmp_path.name}"
    code = f"import os, time\nfor _ in range(3): os.fork()\nos.getpid() == 1 or os.setsid()\ntime.sleep(60) # {mark}"
    with pytest.raises(ToolError, match="did not end in 1 s"):
        await example.run_python(code)
    while mark in "".join(map(_command, Path("/proc").glob("[0-9]*"))):  # until the kernel has ended them
        await asyncio.sleep(0.02)


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


async def test_a_model_calls_it_by_name_and_reads_its_limits(example) -> None:
    box = Toolbox([example.run_python], max_chars=100)
    assert await box.call(ToolCall("run_python", '{"code": "print(6 * 7)"}')) == "42"
    function: Any = box.descriptions[0]
    assert function["function"]["description"].startswith("Run a Python program")
