"""Functions of ``--agent`` and ``--tools`` that cannot be called are refused before a run, from their text."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_agents.checks import check_code
from slime_core.cli.main import main
from slime_core.components.functions import find_function
from slime_core.errors import PluginError

CODE = """
import asyncio
from functools import partial

raise SystemExit("checking runs nothing")

async def solve(task, base_url, api_key, model): ...
async def solve_all(task, **access): ...
def only_task(task): ...
async def other_names(task, url, key, name): ...
async def needs_more(task, base_url, api_key, model, tools): ...
async def optional(task, base_url, api_key, model, tools=()): ...
async def streams(task, base_url, api_key, model):
    yield 1
ANSWER = 42
bound = partial(solve_all)

def add(a: int, b: int) -> int: ...
def by_position(a, /): ...
def all_of(*numbers: int): ...
tools = [add]

class Agent:
    async def __call__(self, task, base_url, api_key, model): ...

agent = Agent()
"""


def check(folder: Path, option: str, name: str, code: str = CODE) -> None:
    path = folder / "code.py"
    path.write_text(code)
    check_code({option: (find_function(f"{path}:{name}", setting=option),)})


def test_functions_that_can_be_called_are_accepted(tmp_path: Path) -> None:
    for name in ("solve", "solve_all", "optional", "bound", "agent", "partial"):
        check(tmp_path, "agent", name)
    for name in ("add", "tools"):
        check(tmp_path, "tools", name)
    check(tmp_path, "agent", "solve", "from somewhere import *")  # which may define any name


@pytest.mark.parametrize(
    ("option", "name", "named"),
    [
        ("agent", "typo", "typo"),
        ("agent", "solv", "did you mean solve"),
        ("agent", "only_task", "base_url"),
        ("agent", "other_names", "url"),
        ("agent", "needs_more", "tools"),
        ("agent", "streams", "generator"),
        ("agent", "ANSWER", "42"),
        ("tools", "typo", "typo"),
        ("tools", "by_position", "a by position"),
        ("tools", "all_of", r"\*numbers"),
        ("tools", "ANSWER", "42"),
    ],
)
def test_others_are_refused_with_the_flag_and_the_mistake(tmp_path: Path, option: str, name: str, named: str) -> None:
    with pytest.raises(PluginError, match=rf"--{option} .*code.py:{name}: .*{named}"):
        check(tmp_path, option, name)


def test_a_file_that_is_no_python_and_a_missing_name_of_a_module_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="--agent"):
        check(tmp_path, "agent", "solve", "def solve(:")
    with pytest.raises(PluginError, match=r"--agent slime_agents.checks:nonesuch"):
        check_code({"agent": (find_function("slime_agents.checks:nonesuch", setting="agent"),)})


@pytest.mark.parametrize("words", ["--agent code.py:typo", "--agent code.py:solve --tool-call-parser nonesuch"])
def test_slime_check_refuses_them(tmp_path: Path, monkeypatch, capsys, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n' * 8)
    line = "check --plugin grpo --prompt-data sums.jsonl --apply-chat-template --num-rollout 1"
    assert main([*line.split(), "--generate-function", "openai_agent", *words.split()]) == 2
    assert words.split()[-1].rpartition(":")[2] in capsys.readouterr().err
