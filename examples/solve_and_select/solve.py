"""Four answers to a question, and a selector that reads the most frequent one and answers last."""

from __future__ import annotations

from collections import Counter

from openai import AsyncOpenAI

from slime_agents.openai_agent import AgentTask

CLIENT = AsyncOpenAI(api_key="given for each task")
SOLVERS = 4


async def solve(task: AgentTask, base_url: str, api_key: str, model: str) -> list[float]:
    """Return a reward for each solver, 1 if it is right, and one for the selector, 1 if it selects a right answer.

    The selector reads the most frequent answer as the model's own, and the question again. If its answer equals one of
    the solvers' answers, that is selected; else the most frequent one.
    """
    chat = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions
    question = {"role": "user", "content": str(task.prompt)}
    solved = await chat.create(model=model, messages=[question], n=SOLVERS)  # type: ignore[list-item]
    answers = [(choice.message.content or "").strip() for choice in solved.choices]
    frequent = Counter(answers).most_common(1)[0][0]
    read = [question, {"role": "assistant", "content": frequent}, question]
    selected = (await chat.create(model=model, messages=read)).choices[0].message.content or ""  # type: ignore[arg-type]
    selected = selected.strip() if selected.strip() in answers else frequent
    return [float(one == task.label) for one in (*answers, selected)]
