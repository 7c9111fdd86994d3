"""The settings of the plugin, in TOML ``[agents]``, and the record that its components receive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from slime_agents.formats import FORMATS
from slime_core import Flag, NamesCode, PluginOptions, RunView, UsedBy
from slime_core.errors import nearest
from slime_core.provisional import FunctionSource, load_function

__all__ = ["AGENT", "AgentsOptions", "AgentsSetup"]

AGENT = "agent"
"""Metadata key of an agent's counters (branches, edited, truncated); set on the first sample of each rollout."""

CodePath = Annotated[str, Field(min_length=1)]
"""``file.py:name``, ``package.module.name`` or ``package.module:name``."""


def _known_parser(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(
            f"{name!r} is no parser of SGLang{nearest(name, FORMATS)}; accepted: {', '.join(sorted(FORMATS))}"
        )
    return name


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
    """fn(task, base_url, api_key, model): solves a task through OpenAI's API. If it returns a number, this is the
    reward."""
    turn_rewards: Annotated[Literal["last", "own", "following"], UsedBy("openai_agent")] = "last"
    """Reward of each answer if an agent returns a list of rewards, one for each requested answer.

    last: the last reward, for all answers. own: the reward of that answer. following: the sum of it and all later ones.
    """
    tool_call_parser: Annotated[
        Annotated[str, AfterValidator(_known_parser)],
        Flag("--tool-call-parser"),
        UsedBy("tool_agent", "openai_agent"),
    ] = "qwen25"
    """Format of tool calls: a name of SGLang's --tool-call-parser, such as qwen25, llama3 or glm45."""
    tool_timeout_s: Annotated[float, Field(gt=0), UsedBy("tool_agent")] = 60.0
    """Time limit for the tool calls of one turn, in seconds; beyond it the sample fails with the cause tool_timeout."""
    tool_max_chars: Annotated[int, Field(ge=1), UsedBy("tool_agent")] = 10_000
    """Limit on a tool's answer, in characters. A longer answer is cut, with a note at its end."""
    agent_timeout_s: Annotated[float, Field(gt=0), UsedBy("openai_agent")] = 600.0
    """Time limit of an agent for one task, in seconds; beyond it the sample fails with the cause agent_timeout."""


@dataclass(frozen=True, slots=True)
class AgentsSetup:
    """The options and the user code that the plugin's components receive.

    Arguments:
        options: options of the plugin.
        code: option -> the functions that it names.
    """

    options: AgentsOptions = field(default_factory=AgentsOptions)
    code: Mapping[str, tuple[FunctionSource, ...]] = field(default_factory=dict)

    @staticmethod
    def max_turns(run: RunView) -> float:
        """Return the limit of ``--max-turns``; infinite if it is not set."""
        limit = run.settings.get("max_turns")
        return limit if isinstance(limit, int) else math.inf

    def load(self, option: str) -> list[object]:
        """Import and return the objects that ``option`` names.

        Raises:
            PluginError: an import failed, or a name does not exist.
        """
        return [load_function(source) for source in self.code.get(option, ())]
