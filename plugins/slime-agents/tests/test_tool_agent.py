"""Conversations of a model with tools: what is sampled, what is called, and what fails a sample."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from slime_agents.options import AgentsOptions, AgentsSetup
from slime_agents.tool_agent import ToolAgent
from slime_core.components.functions import find_function
from slime_core.errors import PluginError
from slime_core.generation import SamplingParams
from slime_core.types import Sample, Status
from slime_testing import GenerateFunctionSuite
from slime_testing.fake_engine import FakeEngine
from slime_testing.harness import default_run_view

TOOLS = """
import asyncio
from slime_agents import ToolError

async def add(a: int, b: int) -> int:
    "The sum."
    return a + b

async def hang() -> str:
    await asyncio.sleep(60)

def broken() -> str:
    raise KeyError("gone")

async def flood() -> str:
    return "x" * 5_000_000

tools = [add, hang, broken, flood]
"""

SAMPLING = SamplingParams(max_new_tokens=1000)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 37, "b": 45}}\n</tool_call>'


class TestToolAgent(GenerateFunctionSuite):
    component = "tool_agent"


def called(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


UNKNOWN = called("sum", '{"a": 2, "b": 2}')


@pytest.fixture
def converse(tmp_path, context) -> Callable[..., Any]:
    """Returns the finished conversation, for a prompt and the options of the agent."""
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)

    async def converse(prompt: str = "37+45", *, sampling: SamplingParams = SAMPLING, **options: Any) -> Sample:
        run = replace(default_run_view(), settings={"max_turns": options.pop("max_turns", None)})
        setup = AgentsSetup(AgentsOptions(**options), {"tools": (find_function(f"{path}:tools", setting="tools"),)})
        sample = Sample(prompt=prompt, index=3, group_index=1)
        return await asyncio.wait_for(ToolAgent(setup, run)(context, sample, sampling), 60)

    return converse


async def test_answers_of_tools_continue_the_conversation_and_are_not_trained(converse, says) -> None:
    says(f"Let me see.\n{CALL}\n{CALL}", "82")
    sample = await converse()
    first, added, last = f"Let me see.\n{CALL}\n{CALL}\x01", "[t:82][t:82]>", "82\x01"
    assert bytes(list(sample.tokens)).decode() == "{addhangbrokenflood}[u:37+45]>" + first + added + last
    assert list(sample.loss_mask or ()) == [1] * len(first) + [0] * len(added) + [1] * len(last)
    assert sample.status is Status.COMPLETED
    assert sample.non_generation_time > 0


async def test_a_conversation_has_a_limit_of_turns_and_a_turn_that_a_budget_cut_calls_nothing(
    converse, says, engine: FakeEngine
) -> None:
    says(CALL, CALL, CALL)
    sample = await converse(max_turns=2)
    assert (len(engine.sampled), sample.status) == (2, Status.COMPLETED)
    assert sample.response.endswith("</tool_call>")
    sample = await converse(sampling=SamplingParams(max_new_tokens=len(CALL)))
    assert (len(engine.sampled), sample.status) == (3, Status.TRUNCATED)


@pytest.mark.parametrize(
    ("call", "limit_s", "cause", "error"),
    [("broken", 20.0, "tool_error", r"tools\.py:\d+, in broken"), ("hang", 0.2, "tool_timeout", "sample 3 of group 1")],
)
async def test_a_tool_that_fails_or_hangs_ends_its_sample(converse, says, call, limit_s, cause, error) -> None:
    says(called(call))
    sample = await converse(tool_timeout_s=limit_s)
    assert (sample.status, sample.failure_cause) == (Status.FAILED, cause)
    assert re.search(error, str(sample.error))


@pytest.mark.parametrize(
    ("most", "status"), [(100, Status.COMPLETED), (10_000_000, Status.TRUNCATED)], ids=["cut", "outgrows the context"]
)
async def test_a_tool_that_returns_megabytes_is_cut_and_a_full_conversation_ends(converse, says, most, status) -> None:
    says(called("flood"), "done")
    sample = await converse(tool_max_chars=most)
    assert sample.status is status
    assert len(sample.tokens) <= 4000
    assert sample.response.endswith("done") is (most == 100)


async def test_a_parser_that_the_engine_refuses_is_an_error_of_the_settings(converse, says) -> None:
    says("x")
    with pytest.raises(PluginError, match="--tool-call-parser hunyuan"):
        await converse(tool_call_parser="hunyuan")


@pytest.mark.parametrize("name", ["nonesuch", "qwen2.5", ""])
def test_an_unknown_parser_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValidationError, match=r"hermes.*qwen25"):
        AgentsOptions(tool_call_parser=name)


@pytest.mark.parametrize(
    ("turn", "answers"),
    [
        pytest.param(f"The answer is 4.{UNKNOWN}", ["error: there is no tool 'sum'"], id="unknown name"),
        pytest.param(f"{UNKNOWN}\n{CALL}", ["error: there is no tool 'sum'", "82"], id="one of two"),
        pytest.param(f"{CALL}\n{called('web search')}", ["82", "error: there is no tool 'web search'"], id="a space"),
        pytest.param(CALL.replace("37", "37,,"), ["error: 1 "], id="broken JSON"),
        pytest.param(f"{CALL}<tool_call>\n{{", ["82", "error: 1 "], id="no end"),
        pytest.param(CALL.replace("37", '"<think>"'), ["error: add: a"], id="a mark of thoughts in an argument"),
        pytest.param(f"<think>{UNKNOWN}</think>{CALL}", ["82"], id="after thoughts"),
    ],
)
async def test_a_call_that_the_parser_drops_is_answered_and_the_conversation_continues(
    converse, says, engine: FakeEngine, turn, answers
) -> None:
    says(turn, "4")
    sample = await converse()
    shown = sample.response.removeprefix(turn).removesuffix("4").split("[t:")[1:]
    assert [text[: len(start)] for text, start in zip(shown, answers, strict=True)] == answers
    assert (len(engine.sampled), sample.status) == (2, Status.COMPLETED)


@pytest.mark.parametrize(
    ("turn", "prompt"),
    [
        (f"<think>I could write {CALL.replace('37', '1')} but need not</think>\nThe answer is 4.", "q"),
        (f"{CALL}</think>\nThe answer is 4.", "q"),
        (f"{CALL}</think>\nThe answer is 4.", "q<think>\n"),
        (f"{CALL} and so on", "q<think>\n"),
        (f"<think>{UNKNOWN} and so on", "q"),
        (f"[THINK]{CALL}[/THINK]4", "q"),
    ],
    ids=["thoughts", "only the end", "opened by the prompt", "without end", "unknown tool, without end", "mistral"],
)
async def test_nothing_inside_thoughts_is_called(converse, says, engine: FakeEngine, turn, prompt) -> None:
    says(turn, "no more")
    sample = await converse(prompt)
    assert (len(engine.sampled), sample.response, sample.status) == (1, turn, Status.COMPLETED)
