"""A task for `openai-agents`, which knows the model by the variables OPENAI_BASE_URL and OPENAI_API_KEY only."""

from __future__ import annotations

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def solve(task: str, how: str) -> str:
    """The answer; ``how`` is plain, or streamed, or handoff: another agent answers."""
    agent: Agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model="policy")
    if how == "handoff":
        agent = Agent(name="first", instructions="Hand over.", handoffs=[agent], model="policy")
    if how != "streamed":
        return str((await Runner.run(agent, task)).final_output)
    result = Runner.run_streamed(agent, task)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


print(asyncio.run(solve(sys.argv[1], sys.argv[2])))
