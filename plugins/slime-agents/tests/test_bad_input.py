"""Mistakes of models, tools and clients: each ends its sample with a status and a cause, or nothing; never the run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from typing import Any

import aiohttp
import openai
import pytest

from slime_agents.openai_agent import OpenAIAgent
from slime_agents.options import AgentsOptions, AgentsSetup
from slime_agents.tool_agent import ToolAgent
from slime_agents.tools import Toolbox
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.harness import default_run_view
from slime_core.types import Sample, Status

SAMPLING = SamplingParams(max_new_tokens=500)
USER = {"role": "user", "content": "q"}


async def flood() -> str:
    """Floods."""
    return "x" * 5_000_000


def tool_agent(**options: Any) -> ToolAgent:
    made = ToolAgent(AgentsSetup(AgentsOptions(**options)), default_run_view())
    made._tools = Toolbox([flood], max_chars=made._options.tool_max_chars)
    return made


async def test_a_tag_that_the_model_never_closes_calls_nothing_and_is_answered(context, says) -> None:
    says('<tool_call>\n{"name": "flood", "arguments": {', "done")
    made = await tool_agent()(context, Sample(prompt="q", index=0), SAMPLING)
    assert (made.status, "[t:error: 1 " in made.response, made.response[-4:]) == (Status.COMPLETED, True, "done")


@pytest.mark.parametrize(
    ("most", "status"), [(100, Status.COMPLETED), (10_000_000, Status.TRUNCATED)], ids=["cut", "outgrows the context"]
)
async def test_a_tool_that_returns_megabytes_is_cut_and_a_full_conversation_ends(context, says, most, status) -> None:
    says('<tool_call>\n{"name": "flood", "arguments": {}}\n</tool_call>', "done")
    made = await tool_agent(tool_max_chars=most)(context, Sample(prompt="q", index=0), SAMPLING)
    assert made.status is status
    assert len(made.tokens) <= 4000
    assert ("characters left out" in made.response, made.response.endswith("done")) == (most == 100, most == 100)


async def run(context: GenerateContext, agent: Any) -> list[Sample]:
    made = OpenAIAgent(AgentsOptions(), default_run_view())
    made._agent = agent
    return await asyncio.wait_for(made(context, Sample(prompt="q", index=3, group_index=1), SAMPLING), 30)


async def post(access: Mapping[str, str], **request: Any) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {access['api_key']}"}
    url = f"{access['base_url']}/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, headers=headers, **request) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("request_fields", "status"),
    [
        ({"data": b"\xff{"}, 400),
        ({"data": b"[" * 100_000}, 400),
        ({"json": []}, 400),
        ({"json": {"messages": "q"}}, 400),
        ({"json": {"messages": [USER], "n": 10**30}}, 400),
        ({"json": {"messages": [USER], "max_tokens": -1}}, 400),
        ({"json": {"messages": [{"content": 5}]}}, 400),
        ({"json": {"messages": [{"role": "user"}, {"role": "assistant", "tool_calls": "add"}]}}, 400),
        ({"json": {"messages": [USER], "tools": [{"type": "function"}]}}, 400),
    ],
)
async def test_a_malformed_request_is_refused_and_the_rollout_goes_on(context, says, request_fields, status) -> None:
    says("one")
    found = []

    async def agent(task, **access: str) -> float:
        found.append(await post(access, **request_fields))
        assert (await post(access, json={"messages": [USER]}))[0] == 200
        return 0.5

    (sample,) = await run(context, agent)
    assert (found[0][0], sample.status, sample.reward, sample.response) == (status, Status.COMPLETED, 0.5, "one")


async def test_a_request_of_many_megabytes_is_not_read_and_the_rollout_goes_on(context, says) -> None:
    says("one")

    async def agent(task, **access: str) -> None:
        with suppress(aiohttp.ClientError):  # the connection may close before all is sent
            assert (await post(access, data=BytesIO(b"x" * (17 * 2**20))))[0] == 413
        assert (await post(access, json={"messages": [USER]}))[0] == 200

    (sample,) = await run(context, agent)
    assert (sample.error, sample.status, sample.response) == (None, Status.COMPLETED, "one")


async def test_a_client_that_hangs_up_may_ask_again(context, says, engine) -> None:
    says("one", "two")
    engine.holds = True

    async def agent(task, **access: str) -> None:
        given = {"base_url": access["base_url"], "api_key": access["api_key"], "max_retries": 0}
        async with openai.AsyncOpenAI(**given) as client:  # type: ignore[arg-type]
            asked = asyncio.create_task(client.chat.completions.create(model="any", messages=[USER]))  # type: ignore
            while not engine.bodies:
                await asyncio.sleep(0.01)
            asked.cancel()
            engine.holds = False
            await client.chat.completions.create(model="any", messages=[USER])  # type: ignore[list-item]

    samples = await run(context, agent)
    assert [one.status for one in samples] == [Status.COMPLETED] * len(samples)
    assert "two" in [one.response for one in samples]


async def test_a_client_that_hangs_up_and_ends_fails_its_sample_with_the_cause(context, engine) -> None:
    engine.holds = True

    async def agent(task, **access: str) -> None:
        async with openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"], max_retries=0) as client:
            try:
                await client.chat.completions.create(model="any", messages=[USER], timeout=0.1)  # type: ignore
            finally:
                engine.holds = False

    (sample,) = await run(context, agent)
    assert (sample.status, sample.failure_cause) == (Status.FAILED, "agent_error")
