"""Agents of other projects, as they come from PyPI, against the endpoint: ``make agents``.

They run as programs of an environment of their own (SLIME_AGENTS_PYTHON), which get a URL and a key and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from slime_agents.openai_agent import AgentTask, OpenAIAgent
from slime_agents.options import AgentsOptions
from slime_core.generation import Client, GenerateContext, Generation, SamplingParams
from slime_core.harness import default_run_view
from slime_core.harness.engines import connect
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine

PYTHON = os.environ["SLIME_AGENTS_PYTHON"]
LIMIT_S = 120
ROOM = 40_000
"""Characters of a conversation: mini-swe-agent's first prompt has 5,000."""


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(vocab_size=256, context_length=ROOM) as engine:
        yield engine


@pytest.fixture
async def context(engine: FakeEngine, letters: Any) -> AsyncIterator[GenerateContext]:
    async with connect(engine.url, vocab_size=256) as client:
        yield GenerateContext(client, letters, max_response_len=ROOM // 2, context_length=ROOM)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def run(context: GenerateContext, folder: Path, program: str, how: str) -> tuple[list[Sample], str]:
    """What the rollout of ``program`` becomes, and what it printed."""
    printed: list[str] = []

    def agent(task: AgentTask, base_url: str, api_key: str, model: str) -> float:
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "MODEL": model, "HOME": str(folder)}
        own |= {"PATH": os.environ["PATH"], "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        path = Path(__file__).with_name(program)
        words = [PYTHON, str(path), str(task.prompt), how]
        done = subprocess.run(words, env=own, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.strip())
        return 1.0

    made = OpenAIAgent(AgentsOptions(), default_run_view())
    made._agent = agent
    context = replace(context)
    samples = await made(context, Sample(prompt="37+45", index=3, group_index=1), SamplingParams(max_new_tokens=2000))
    assert [one.error for one in samples] == [None] * len(samples)
    return samples, printed[0]


def trained(sample: Sample) -> list[str]:
    """The texts of a sample that are trained."""
    mask = list(sample.loss_mask or [1] * sample.response_length)
    text = bytes(list(sample.tokens)[sample.prompt_length :]).decode()
    return "".join(one if on else "\0" for one, on in zip(text, mask, strict=True)).replace("\x01", "").split("\0")


async def one_conversation(
    context: GenerateContext, engine: FakeEngine, folder: Path, program: str, how: str, turns: list[str]
) -> str:
    """What ``program`` printed; all its turns were trained in one conversation, on the ids that the engine sampled."""
    (sample,), printed = await run(context, folder, program, how)
    assert [one for one in trained(sample) if one] == turns
    assert [*engine.sampled[-1][0], *engine.sampled[-1][1]] == list(sample.tokens)
    assert (sample.status, sample.reward, sample.metadata["agent"]) == (Status.COMPLETED, 1.0, {"branches": 1})
    return printed


@pytest.mark.parametrize("how", ["plain", "streamed"])
async def test_openai_agents_with_a_tool(context, says: Callable[..., None], engine, tmp_path, how) -> None:
    turns = [f"So.\n{call('add', a=37, b=45)}", "82"]
    says(*turns)
    assert await one_conversation(context, engine, tmp_path, "with_openai_agents.py", how, turns) == "82"


async def test_an_agent_to_which_another_one_hands_over_is_a_conversation_of_its_own(context, says, tmp_path) -> None:
    says(call("transfer_to_adder"), call("add", a=37, b=45), "82")
    samples, printed = await run(context, tmp_path, "with_openai_agents.py", "handoff")
    assert printed == "82"
    assert len(samples) == 2
    assert [one for sample in samples for one in trained(sample) if one] == [
        call("transfer_to_adder"),
        call("add", a=37, b=45),
        "82",
    ]


async def test_mini_swe_agent_with_its_bash_tool(context, says, engine, tmp_path) -> None:
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer"
    turns = [call("bash", command="echo $((37+45)) > answer"), call("bash", command=submit)]
    says(*turns)
    assert await one_conversation(context, engine, tmp_path, "with_mini_swe_agent.py", "tools", turns) == "82"


async def test_mini_swe_agent_without_tools(context, says, engine, tmp_path) -> None:
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer"
    turns = [f"THOUGHT: I\n```mswea_bash_command\n{one}\n```" for one in ("echo 82 > answer", submit)]
    says(*turns)
    assert await one_conversation(context, engine, tmp_path, "with_mini_swe_agent.py", "text", turns) == "82"


@dataclass(slots=True)
class Recorder:
    """The client of the engines, and what they were sent and answered: ids of the prompt and of the response, and the
    log-probabilities of the latter."""

    client: Client
    turns: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.client.url

    async def engine_url(self) -> str:
        return await self.client.engine_url()

    async def generate(self, input_ids: Any, **more: Any) -> list[Generation]:
        found = await self.client.generate(input_ids, **more)
        self.turns += [(list(input_ids), list(one.token_ids), list(one.log_probs)) for one in found]
        return found


def turns_of(sample: Sample) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """The spans that are trained, as :class:`Recorder` has them."""
    ids, end = list(sample.tokens), sample.prompt_length
    log_probs = [0.0] * end + list(sample.rollout_log_probs or ())
    for trains, span in groupby(sample.loss_mask or [1] * sample.response_length):
        start, end = end, end + len(list(span))
        if trains:
            yield ids[:start], ids[start:end], log_probs[start:end]


@pytest.mark.parametrize(
    ("program", "how", "script"),
    [
        ("with_openai_agents.py", "plain", "add"),
        ("with_openai_agents.py", "streamed", "add"),
        ("with_mini_swe_agent.py", "tools", "bash"),
        ("with_mini_swe_agent.py", "text", "blocks"),
    ],
)
async def test_on_a_real_engine_what_is_trained_is_what_it_sampled(scripted, tmp_path, program, how, script) -> None:
    encoder = PromptEncoder(scripted.model, apply_chat_template=True, template_arguments={"script": script})
    async with connect(scripted.url, vocab_size=encoder.vocab_size) as client:
        recorder = Recorder(client)
        context = GenerateContext(recorder, encoder, max_response_len=100, context_length=200)
        (sample,), printed = await run(context, tmp_path, program, how)
    assert printed == "82"
    assert (sample.status, sample.reward, sample.metadata["agent"]) == (Status.COMPLETED, 1.0, {"branches": 1})
    assert list(turns_of(sample)) == recorder.turns
    assert [encoder.decode(ids) for _, ids, _ in recorder.turns] == list(scripted.turns[script])
