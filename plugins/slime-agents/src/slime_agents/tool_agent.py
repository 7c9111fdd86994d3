"""Conversations of a model with tools: a turn, the tools that it calls, their answers, the next turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from slime_agents.options import AgentsOptions, AgentsSetup
from slime_agents.parsing import CallParser, Parsed, prompt_end, turn_text
from slime_agents.tools import Toolbox, unreadable
from slime_core import RunView, Sample
from slime_core.generation import GenerateContext, SamplingParams, Trajectory
from slime_core.provisional import describe
from slime_core.types import JsonValue, Status

__all__ = ["ToolAgent"]

TOOLS = "tools"
"""Metadata key of the tool descriptions for the chat template."""

BROKEN, TIMEOUT = "tool_error", "tool_timeout"
"""Failure causes: a tool raised, or a tool timed out."""


class ToolAgent:
    """A conversation of the model with the tools of ``--tools``, whose answers are not trained.

    A conversation ends with a turn that calls no tool, after ``--max-turns`` turns, or when the response is full. An
    invalid call gets an error message as its answer, also if the parser drops it; nothing inside thoughts is a call. If
    a tool raises or times out, the sample becomes ``FAILED``, because a response to a broken tool teaches the model
    nothing.
    """

    def __init__(self, options: AgentsOptions | AgentsSetup, run: RunView) -> None:
        setup = options if isinstance(options, AgentsSetup) else AgentsSetup(options)
        self._options = setup.options
        self._tools = Toolbox(setup.load("tools"), max_chars=self._options.tool_max_chars)
        self._parser = CallParser(self._options.tool_call_parser)
        self._max_turns = setup.max_turns(run)

    async def __call__(self, context: GenerateContext, sample: Sample, sampling: SamplingParams) -> Sample:
        """Return the finished conversation.

        Raises:
            Interrupted: a turn was aborted.
            EngineError: no engine answered.
        """
        sample.metadata.setdefault(TOOLS, self._tools.descriptions)
        trajectory = context.start(sample)
        while not trajectory.is_full:
            turn = await trajectory.generate(sampling)
            if turn.finish_reason == "length" or trajectory.num_turns >= self._max_turns:
                break
            text = turn_text(turn.token_ids, context.encoder)
            prompt = prompt_end(trajectory.token_ids[: -len(turn.token_ids) or None], context.encoder)
            parsed = await self._parser.parse(context.client, text, self._tools.descriptions, prompt=prompt)
            if not parsed.calls and not parsed.unreadable:
                break
            try:
                answers = await self._answers(trajectory, parsed)
            except Exception as problem:
                return _failed(trajectory.finish(), problem)
            trajectory.append_message(*answers)
        return trajectory.finish()

    async def _answers(self, trajectory: Trajectory, parsed: Parsed) -> list[dict[str, JsonValue]]:
        """Run the calls concurrently; return one message for each call, in order, and one for all unreadable calls."""
        async with trajectory.tool_time(self._options.tool_timeout_s):
            texts = await asyncio.gather(*map(self._tools.call, parsed.calls))
        names = [call.name for call in parsed.calls]
        if parsed.unreadable:
            names.append("unreadable")
            texts.append(f"error: {unreadable(parsed.unreadable, self._tools.names)}")
        return [{"role": "tool", "name": name, "content": text} for name, text in zip(names, texts, strict=True)]


def _failed(sample: Sample, problem: Exception) -> Sample:
    cause = TIMEOUT if isinstance(problem, TimeoutError) else BROKEN
    what = "a tool gave no answer in time" if cause == TIMEOUT else f"a tool raised {describe(problem)}"
    error = f"sample {sample.index} of group {sample.group_index}: {what}"
    changes: dict[str, Any] = {"status": Status.FAILED, "error": error, "failure_cause": cause}
    return replace(sample, **changes)
