"""Plugin ``agents``: its generate functions, options and checks; imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core import Registration, hookimpl

if TYPE_CHECKING:
    from slime_agents.options import AgentsOptions, AgentsSetup
    from slime_core import RunPlan
    from slime_core.provisional import FunctionSource
    from slime_core.types import JsonValue, Sample

__all__: list[str] = []


@hookimpl
def slime_register(add: Registration) -> None:
    add.options("slime_agents.options:AgentsOptions")
    # The tools' answers are kept when a response is resumed, so no tool runs twice.
    add.generate_function("tool_agent", "slime_agents.tool_agent:ToolAgent", resumes=True)
    add.generate_function("openai_agent", "slime_agents.openai_agent:OpenAIAgent", rewards=True)


@hookimpl
def slime_log_rollout(samples: Sequence[Sample], metrics: dict[str, float]) -> None:
    """Add ``agents/branches``, ``agents/edited`` and ``agents/truncated`` if agents have run."""
    from slime_agents.options import AGENT

    counters = [value for value in (sample.metadata.get(AGENT) for sample in samples) if isinstance(value, dict)]
    for name in ("branches", "edited", "truncated") if counters else ():
        metrics[f"agents/{name}"] = sum(float(str(counter.get(name, 0))) for counter in counters) / len(counters)


@hookimpl
def slime_check(plan: RunPlan) -> Iterator[str]:
    for where, settings in _uses(plan.settings):
        name = str(settings.get("generate_function")).rpartition(":")[2]
        if name in ("tool_agent", "openai_agent") and not settings.get("apply_chat_template"):
            yield f"{where}generate function {name} continues conversations by the chat template; {_TURN_ON}"
        elif name == "tool_agent" and not _writes_tools(settings):
            yield (
                f"{where}--tools: the chat template of the checkpoint leaves tools out, so the model cannot know them; "
                "take a checkpoint whose template writes tools"
            )


def _writes_tools(settings: Mapping[str, JsonValue]) -> bool:
    from slime_core.prompts.chat import writes_tools

    folder = settings.get("hf_checkpoint")  # None: the model of the demo, whose template writes tools
    arguments = json.loads(str(settings.get("apply_chat_template_kwargs") or "{}"))
    return folder is None or writes_tools(Path(str(folder)), arguments)


_TURN_ON = "set apply_chat_template (--apply-chat-template)"


def _uses(settings: Mapping[str, JsonValue]) -> Iterator[tuple[str, Mapping[str, JsonValue]]]:
    """Yield a message prefix and the settings for each place that generates: the run, then its evaluation sets."""
    yield "", settings
    tables = settings.get("eval_datasets")
    for table in tables if isinstance(tables, Sequence) else ():
        if isinstance(table, Mapping):
            values = {name: value for name, value in table.items() if value is not None}
            yield f"evaluation set {values.get('name')}: ", {**settings, **values}


@hookimpl
def slime_prepare(options: AgentsOptions, code: Mapping[str, Sequence[FunctionSource]]) -> AgentsSetup:
    from slime_agents.checks import check_code
    from slime_agents.options import AgentsSetup

    check_code(code)
    return AgentsSetup(options, {option: tuple(sources) for option, sources in code.items()})
