"""The hooks of plugin ``agents``; imports nothing heavy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slime_agents.options import AGENT, AgentsOptions, AgentsSetup
from slime_core import Component, FunctionSource, GenerateTraits, RunPlan, hookimpl
from slime_core.types import JsonValue, Sample

__all__: list[str] = []


@hookimpl
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component(
        "tool_agent",
        target="slime_agents.tool_agent:ToolAgent",
        # Tool answers are kept when a response is resumed, so no tool runs twice.
        traits=GenerateTraits(scope="sample", resumes=True),
        summary="A conversation of the model with the tools of --tools; what they answer is not trained",
    )
    yield Component(
        "openai_agent",
        target="slime_agents.openai_agent:OpenAIAgent",
        traits=GenerateTraits(scope="sample", rewards=True),
        summary="The agent of --agent, which reaches the model by OpenAI's chat completions API",
    )


@hookimpl
def slime_log_rollout(samples: Sequence[Sample], metrics: dict[str, float]) -> None:
    """Add ``agents/branches``, ``agents/edited`` and ``agents/truncated`` if agents have run."""
    found = [one for one in (sample.metadata.get(AGENT) for sample in samples) if isinstance(one, dict)]
    for name in ("branches", "edited", "truncated") if found else ():
        metrics[f"agents/{name}"] = sum(float(str(one.get(name, 0))) for one in found) / len(found)


@hookimpl
def slime_options() -> type[AgentsOptions]:
    return AgentsOptions


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
    from slime_core.prompts.screen import writes_tools

    folder = settings.get("hf_checkpoint")
    return writes_tools(
        Path(str(folder)) if folder else None, json.loads(str(settings.get("apply_chat_template_kwargs") or "{}"))
    )


_TURN_ON = "set apply_chat_template (--apply-chat-template)"


def _uses(settings: Mapping[str, JsonValue]) -> Iterator[tuple[str, Mapping[str, JsonValue]]]:
    """Yield a message prefix and the settings for each place that generates: the run, then its evaluation sets."""
    yield "", settings
    sets = settings.get("eval_datasets")
    for one in sets if isinstance(sets, Sequence) else ():
        if isinstance(one, Mapping):
            own = {name: value for name, value in one.items() if value is not None}
            yield f"evaluation set {own.get('name')}: ", {**settings, **own}


@hookimpl
def slime_prepare(options: AgentsOptions, code: Mapping[str, Sequence[FunctionSource]]) -> AgentsSetup:
    from slime_agents.checks import check_code  # here: only a run has code to check

    check_code(code)
    return AgentsSetup(options, {option: tuple(found) for option, found in code.items()})
