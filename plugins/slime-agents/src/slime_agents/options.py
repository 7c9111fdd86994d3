"""The settings of the plugin, in TOML ``[agents]``, and what its components are handed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from slime_core import Flag, FunctionSource, NamesCode, PluginOptions, RunView, UsedBy, load_function

__all__ = ["AGENT", "AgentsOptions", "AgentsSetup"]

AGENT = "agent"
"""Key of a sample's metadata: what metrics count of the rollout of an agent; the first sample of a rollout has it."""

CodePath = Annotated[str, Field(min_length=1)]
"""``file.py:name``, ``package.module.name`` or ``package.module:name``."""


class AgentsOptions(PluginOptions):
    """Tools, agents and their limits."""

    tools: Annotated[
        tuple[CodePath, ...],
        Flag("--tools", value="MODULE:OBJECT ..."),
        NamesCode(),
        UsedBy("tool_agent", required=True),
    ] = ()
    """Tools that the model may call: functions with typed arguments, or lists of them."""
    agent: Annotated[
        CodePath | None, Flag("--agent", value="MODULE:FUNCTION"), NamesCode(), UsedBy("openai_agent", required=True)
    ] = None
    """fn(task, base_url, api_key, model): solves a task by OpenAI's API. A number that it returns is the reward."""
    turn_rewards: Annotated[Literal["last", "own", "following"], UsedBy("openai_agent")] = "last"
    """What an answer is trained on where an agent returns a list of rewards, one for each answer that it has requested.

    last: the last reward, for all answers. own: its own reward. following: the sum of its own and all later ones.
    """
    tool_call_parser: Annotated[
        Annotated[str, Field(min_length=1)], Flag("--tool-call-parser"), UsedBy("tool_agent", "openai_agent")
    ] = "qwen25"
    """How the model writes tool calls: a name of SGLang's --tool-call-parser, such as qwen25, llama3 or glm45."""
    tool_timeout_s: Annotated[float, Field(gt=0), UsedBy("tool_agent")] = 60.0
    """Seconds that the calls of one turn may take; then the sample fails with the cause tool_timeout."""
    tool_max_chars: Annotated[int, Field(ge=1), UsedBy("tool_agent")] = 10_000
    """Characters of a tool's answer that the model gets; the rest is left out, and the answer says so."""
    agent_timeout_s: Annotated[float, Field(gt=0), UsedBy("openai_agent")] = 600.0
    """Seconds that an agent may take for one task; then its sample fails with the cause agent_timeout."""


@dataclass(frozen=True, slots=True)
class AgentsSetup:
    """What components are handed in a run.

    Arguments:
        options: of the plugin.
        code: option -> the functions that it names.
    """

    options: AgentsOptions = field(default_factory=AgentsOptions)
    code: Mapping[str, tuple[FunctionSource, ...]] = field(default_factory=dict)

    @staticmethod
    def max_turns(run: RunView) -> float:
        """The limit of ``--max-turns``; infinite without."""
        limit = run.settings.get("max_turns")
        return limit if isinstance(limit, int) else math.inf

    def load(self, option: str) -> list[object]:
        """What ``option`` names, imported now.

        Raises:
            PluginError: an import failed, or a name is not there.
        """
        return [load_function(source) for source in self.code.get(option, ())]
