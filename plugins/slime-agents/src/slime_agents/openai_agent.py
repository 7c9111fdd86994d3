"""Runs an agent that needs no knowledge of the training: it gets a base URL and a key, as for OpenAI's API."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import cast

from slime_agents.conversations import Rollout
from slime_agents.endpoint import Access, Endpoint, Session
from slime_agents.options import AGENT, AgentsOptions, AgentsSetup
from slime_agents.parsing import CallParser
from slime_core import RunView, Sample
from slime_core.errors import EngineError, PluginError
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.provisional import describe
from slime_core.types import JsonValue, Status

__all__ = ["AgentTask", "OpenAIAgent"]

THREADS = 256
"""Limit on concurrent agents that are plain functions; any others wait for a thread."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of one agent run.

    Arguments:
        prompt: the row's prompt: text or chat messages.
        label: the row's label.
        metadata: the row's metadata.
        evaluation: True if the rollout belongs to an evaluation and is not trained.
    """

    prompt: str | list[dict[str, JsonValue]]
    label: str | None = None
    metadata: dict[str, JsonValue] = field(default_factory=dict)
    evaluation: bool = False


class OpenAIAgent:
    """The agent of ``--agent``, which reaches the model through OpenAI's chat completions API.

    It is called as ``fn(task, base_url=..., api_key=..., model=...)``: an async function is awaited, any other
    runs in a thread. Each of its conversations becomes a sample; all of them share one rollout id. If the agent returns
    a number, it is the reward of each sample; a list of numbers has one reward for each requested answer
    (``--agents.turn-rewards``); otherwise the reward model scores the samples. An agent that raises or times out fails
    its sample, unless one of its requests was refused because the rollout is full: then the sampled turns are trained.
    """

    def __init__(self, options: AgentsOptions | AgentsSetup, run: RunView) -> None:
        setup = options if isinstance(options, AgentsSetup) else AgentsSetup(options)
        self._options = setup.options
        self._agent = next((cast("Callable[..., object]", agent) for agent in setup.load("agent")), None)
        self._endpoint = Endpoint(CallParser(self._options.tool_call_parser))
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="agent")
        self._max_turns = setup.max_turns(run)

    async def __call__(self, context: GenerateContext, sample: Sample, sampling: SamplingParams) -> list[Sample]:
        """Return one sample for each conversation.

        Raises:
            Interrupted: a turn was aborted.
            EngineError: no engine answered.
            PluginError: no ``--agent`` was given.
        """
        if self._agent is None:
            raise PluginError("openai_agent runs the agent of --agent MODULE:FUNCTION; give one")
        rollout = Rollout(context, sample, sampling, max_turns=self._max_turns)
        session = Session(rollout, context)
        task = AgentTask(sample.prompt, sample.label, dict(sample.metadata), context.evaluation)
        async with self._endpoint.open(session) as access:
            result = await self._result(task, access, session)
        if isinstance(result, Exception) and not session.is_full:
            return [_failed(sample, result)]
        if not rollout.num_branches:
            refusal = f"; its last request was refused: {session.refusal}" if session.refusal else ""
            return [_failed(sample, ValueError(f"the agent made no request that was answered{refusal}"))]
        try:
            samples = self._rewarded(rollout, result)
        except ValueError as problem:
            return [_failed(sample, problem)]
        breaks: dict[str, JsonValue] = {str(cause): count for cause, count in rollout.breaks.items()}
        samples[0].metadata[AGENT] = {"branches": rollout.num_branches, **breaks}
        return samples

    def _rewarded(self, rollout: Rollout, result: object) -> list[Sample]:
        """Return the samples of ``rollout``, with the rewards that the agent returned, if any."""
        rewards = _numbers(result)
        if rewards is None:
            return rollout.finish()
        if isinstance(result, list | tuple):
            if len(rewards) != rollout.num_turns:
                raise ValueError(f"the agent returned {len(rewards)} rewards for {rollout.num_turns} answers")
            if self._options.turn_rewards == "own":
                return rollout.finish_turns(rewards)
            if self._options.turn_rewards == "following":
                return rollout.finish_turns(list(accumulate(reversed(rewards)))[::-1])
        samples = rollout.finish()
        for sample in samples:
            sample.reward = rewards[-1]
        return samples

    async def _result(self, task: AgentTask, access: Access, session: Session) -> object:
        """Return the agent's result, or the exception that it raised; raises the session's failure."""
        agent = asyncio.ensure_future(self._call(task, access))
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait(
                {agent, ended}, timeout=self._options.agent_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            failure = session.failure
            if failure is not None:
                raise _of(failure, session)
            if not agent.done():
                return TimeoutError(f"the agent took more than {self._options.agent_timeout_s:g} s")
            error = agent.exception()
            return error if isinstance(error, Exception) else agent.result()
        finally:
            for future in (agent, ended):
                future.cancel()
            await asyncio.gather(agent, ended, return_exceptions=True)

    async def _call(self, task: AgentTask, access: Access) -> object:
        assert self._agent is not None
        values = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        if inspect.iscoroutinefunction(self._agent):
            return await self._agent(task, **values)
        loop, agent = asyncio.get_running_loop(), self._agent
        return await loop.run_in_executor(self._threads, lambda: agent(task, **values))


def _numbers(result: object) -> list[float] | None:
    """Return the rewards that an agent returned; None if it returned something else.

    Raises:
        ValueError: a reward is not finite.
    """
    values = list(result) if isinstance(result, list | tuple) else [result]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if not values or len(numbers) < len(values):
        return None
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"the agent returned the reward {result}; a reward is a finite number")
    return numbers


def _of(failure: Interrupted | EngineError | PluginError, session: Session) -> Exception:
    """Return ``failure`` as a generate function raises it: agents cannot resume, so an aborted rollout restarts."""
    if not isinstance(failure, Interrupted):
        return failure
    return Interrupted(str(failure), replace(session.rollout.sample, status=Status.ABORTED))


def _failed(sample: Sample, problem: Exception) -> Sample:
    cause = "agent_timeout" if isinstance(problem, TimeoutError) else "agent_error"
    error = f"sample {sample.index} of group {sample.group_index}: {describe(problem)}"
    return replace(sample, status=Status.FAILED, error=error, failure_cause=cause)
