from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

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
    [("broken", "tool_error", r"tools\.py:\d+, in broken"), ("hang", "tool_timeout", "sample 3 of group 1")],
)
async def test_a_tool_that_fails_or_hangs_ends_its_sample(agent, context, says, call, cause, error) -> None:
    says(f'<tool_call>\n{{"name": "{call}"}}\n</tool_call>')
    limit_s = 0.2 if call == "hang" else 20.0
    made = await asyncio.wait_for(agent(tool_timeout_s=limit_s)(context, sample(), SAMPLING), 30)
    assert (made.status, made.failure_cause) == (Status.FAILED, cause)
    assert re.search(error, str(made.error))


async def test_a_parser_that_the_engine_refuses_is_an_error_of_the_settings(agent, context, says) -> None:
    says("x")
    with pytest.raises(PluginError, match="--tool-call-parser hunyuan"):
        await agent(tool_call_parser="hunyuan")(context, sample(), SAMPLING)


@pytest.mark.parametrize("name", ["nonesuch", "qwen2.5", ""])
def test_an_unknown_parser_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValidationError, match=r"accepted: .*hermes.*qwen25"):
        AgentsOptions(tool_call_parser=name)


def called(name: str) -> str:
    return CALL.replace("add", name)


@pytest.mark.parametrize(
    ("turn", "answers"),
    [
        pytest.param(
            'The answer is 4.<tool_call>\n{"name": "sum", "arguments": {"a": 2, "b": 2}}\n</tool_call>',
            ["error: there is no tool 'sum'"],
            id="tool-unknown-name",
        ),
        pytest.param(f"{called('sum')}\n{CALL}", ["error: there is no tool 'sum'", "82"], id="one of two"),
        pytest.param(f"{CALL}\n{called('web search')}", ["82", "error: there is no tool 'web search'"], id="a space"),
        pytest.param(CALL.replace("37", "37,,"), ["error: 1 "], id="broken JSON"),
        pytest.param(f"{CALL}<tool_call>\n{{", ["82", "error: 1 "], id="no end"),
        pytest.param(CALL.replace("37", '"<think>"'), ["error: add: a"], id="a mark of thoughts in an argument"),
    ],
)
async def test_a_call_that_the_parser_drops_is_answered_and_the_conversation_goes_on(
    agent, context, says, engine: FakeEngine, turn, answers
) -> None:
    says(turn, "4")
    made = await agent()(context, sample(), SAMPLING)
    shown = made.response.removeprefix(turn).removesuffix("4")
    assert [text.startswith(start) for text, start in zip(shown.split("[t:")[1:], answers, strict=True)] == [
        True for _ in answers
    ]
    assert (len(engine.sampled), made.status) == (2, Status.COMPLETED)


@pytest.mark.parametrize(
    ("turn", "opens"),
    [
        pytest.param(
            f"<think>I could write {CALL.replace('37', '1')} but need not</think>\nThe answer is 4.",
            False,
            id="tool-in-thoughts",
        ),
        pytest.param(f"{CALL}</think>\nThe answer is 4.", False, id="only the end"),
        pytest.param(f"{CALL}</think>\nThe answer is 4.", True, id="opened by the prompt"),
        pytest.param(f"{CALL} and so on", True, id="without end"),
        pytest.param(f"<think>{called('sum')} and so on", False, id="without end, of an unknown tool"),
        pytest.param(f"[THINK]{CALL}[/THINK]4", False, id="mistral"),
    ],
)
async def test_nothing_inside_thoughts_is_called(agent, context, says, engine: FakeEngine, turn, opens) -> None:
    says(turn, "no more")
    made = await agent()(context, Sample(prompt="q<think>\n" if opens else "q", index=3), SAMPLING)
    assert (len(engine.sampled), made.response, made.status) == (1, turn, Status.COMPLETED)


async def test_a_call_after_thoughts_runs(agent, context, says, engine: FakeEngine) -> None:
    says(f"<think>{called('sum')}</think>{CALL}", "82")
    made = await agent()(context, sample(), SAMPLING)
    assert made.response.endswith("[t:82]>82")
    assert len(engine.sampled) == 2
