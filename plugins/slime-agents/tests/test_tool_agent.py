from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from slime_agents.options import AgentsOptions, AgentsSetup
from slime_agents.tool_agent import ToolAgent
from slime_core import FunctionSource
from slime_core.errors import PluginError
from slime_core.generation import SamplingParams
from slime_core.harness import default_run_view
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine

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

tools = [add, hang, broken]
"""

SAMPLING = SamplingParams(max_new_tokens=1000)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 37, "b": 45}}\n</tool_call>'


@pytest.fixture
def agent(tmp_path) -> Callable[..., ToolAgent]:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)

    def make(**options: Any) -> ToolAgent:
        from slime_core.plugins.loading import find_function

        code: Mapping[str, tuple[FunctionSource, ...]] = {"tools": (find_function(f"{path}:tools", setting="tools"),)}
        run = replace(default_run_view(), settings={"max_turns": options.pop("max_turns", None)})
        return ToolAgent(AgentsSetup(AgentsOptions(**options), code), run)

    return make


def sample(**more: Any) -> Sample:
    return Sample(prompt="37+45", index=3, group_index=1, **more)


async def test_answers_of_tools_continue_the_conversation_and_are_not_trained(agent, context, says) -> None:
    says(f"Let me see.\n{CALL}\n{CALL}", "82")
    made = await agent()(context, sample(), SAMPLING)
    first, added, last = f"Let me see.\n{CALL}\n{CALL}\x01", "[t:82][t:82]>", "82\x01"
    assert bytes(list(made.tokens)).decode() == "{addhangbroken}[u:37+45]>" + first + added + last
    assert list(made.loss_mask or ()) == [1] * len(first) + [0] * len(added) + [1] * len(last)
    assert made.status is Status.COMPLETED
    assert made.non_generation_time > 0


async def test_a_conversation_has_so_many_turns(agent, context, says, engine: FakeEngine) -> None:
    says(CALL, CALL, CALL)
    made = await agent(max_turns=2)(context, sample(), SAMPLING)
    assert len(engine.sampled) == 2
    assert made.response.endswith("</tool_call>")
    assert made.status is Status.COMPLETED


async def test_a_turn_that_a_budget_cut_calls_nothing(agent, context, says, engine: FakeEngine) -> None:
    says(CALL)
    made = await agent()(context, sample(), SamplingParams(max_new_tokens=len(CALL)))
    assert (made.status, len(engine.sampled)) == (Status.TRUNCATED, 1)


@pytest.mark.parametrize(
    ("call", "cause", "error"),
    [
        ("broken", "tool_error", "sample 3 of group 1: a tool raised KeyError: 'gone'"),
        ("hang", "tool_timeout", "sample 3 of group 1: a tool gave no answer in time"),
    ],
)
async def test_a_tool_that_fails_or_hangs_ends_its_sample(agent, context, says, call, cause, error) -> None:
    says(f'<tool_call>\n{{"name": "{call}"}}\n</tool_call>')
    limit_s = 0.2 if call == "hang" else 20.0
    made = await asyncio.wait_for(agent(tool_timeout_s=limit_s)(context, sample(), SAMPLING), 30)
    assert (made.status, made.failure_cause, made.error) == (Status.FAILED, cause, error)


async def test_a_parser_that_the_engine_does_not_know_is_an_error_of_the_settings(agent, context, says) -> None:
    says("x")
    with pytest.raises(PluginError, match=r"--tool-call-parser nonesuch: (?s:.*)Accepted are the names of SGLang's"):
        await agent(tool_call_parser="nonesuch")(context, sample(), SAMPLING)
