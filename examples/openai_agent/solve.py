"""An agent that does not know of the training: it queries a model through OpenAI's API, twice if the first is wrong."""

from __future__ import annotations

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from slime_agents.openai_agent import AgentTask

# One client for all tasks, because each new client loads the certificates of this machine, about 20 ms.
CLIENT = AsyncOpenAI(api_key="given for each task")


async def solve(task: AgentTask, base_url: str, api_key: str, model: str) -> float:
    """Return 1 if the first answer is right, 0.5 if the second one is, else 0."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": str(task.prompt)}]
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    for reward in (1.0, 0.5):
        reply = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
        if (reply.content or "").strip() == task.label:
            return reward
        messages.append({"role": "assistant", "content": reply.content or ""})
        messages.append({"role": "user", "content": str(task.prompt)})
    return 0.0
