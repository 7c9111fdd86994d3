"""The hooks of plugin ``agents``; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime_agents.options import AGENT, AgentsOptions, AgentsSetup
from slime_core import Component, FunctionSource, GenerateTraits, RunPlan, hookimpl
from slime_core.types import Sample

__all__: list[str] = []


@hookimpl
def slime_register_generate_functions() -> Iterator[Component]:
    yield Component(
        "tool_agent",
        target="slime_agents.tool_agent:ToolAgent",
        traits=GenerateTraits(scope="sample"),
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
    """Adds ``agents/branches``, ``agents/edited`` and ``agents/truncated`` where agents have run."""
    found = [one for one in (sample.metadata.get(AGENT) for sample in samples) if isinstance(one, dict)]
    for name in ("branches", "edited", "truncated") if found else ():
        metrics[f"agents/{name}"] = sum(float(str(one.get(name, 0))) for one in found) / len(found)


@hookimpl
def slime_options() -> type[AgentsOptions]:
    return AgentsOptions


@hookimpl
def slime_check(plan: RunPlan) -> Iterator[str]:
    settings = plan.settings
    name = str(settings.get("generate_function")).rpartition(":")[2]
    if name in ("tool_agent", "openai_agent") and not settings.get("apply_chat_template"):
        yield (f"generate function {name} continues conversations by the chat template; add --apply-chat-template")


@hookimpl
def slime_prepare(options: AgentsOptions, code: Mapping[str, Sequence[FunctionSource]]) -> AgentsSetup:
    return AgentsSetup(options, {option: tuple(found) for option, found in code.items()})
