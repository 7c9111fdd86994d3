"""Agents of other projects, as they come from PyPI, against the endpoint: ``make agents``.

They run as programs of a separate environment (SLIME_AGENTS_PYTHON), which get only a URL and a key.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from slime_agents.openai_agent import AgentTask, OpenAIAgent
from slime_agents.options import AgentsOptions
from slime_core.generation import Client, GenerateContext, Generation, SamplingParams
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import Sample, Status
from slime_testing.harness import default_run_view
from slime_testing.harness.engines import connect

PYTHON = os.environ["SLIME_AGENTS_PYTHON"]
LIMIT_S = 120


def call(name: str, **arguments: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def run(context: GenerateContext, folder: Path, program: str, how: str) -> tuple[list[Sample], str]:
    """Return the samples of the rollout of ``program``, and what it printed."""
    printed: list[str] = []

    def agent(task: AgentTask, base_url: str, api_key: str, model: str) -> float:
        variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "MODEL": model, "HOME": str(folder)}
        variables |= {"PATH": os.environ["PATH"], "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        words = [PYTHON, str(Path(__file__).with_name(program)), str(task.prompt), how]
        done = subprocess.run(
            words, env=variables, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stderr[-300:]
        printed.append(done.stdout.strip().splitlines()[-1])  # litellm prints hints before it
        return 1.0

    generate = OpenAIAgent(AgentsOptions(), default_run_view())
    generate._agent = agent
    sample = Sample(prompt="37+45", index=3, group_index=1)
    samples = await generate(context, sample, SamplingParams(max_new_tokens=2000))
    assert [sample.error for sample in samples] == [None] * len(samples)
    return samples, printed[0]


def trained(sample: Sample) -> str:
    """The text of a sample that is trained."""
    mask = list(sample.loss_mask or [1] * sample.response_length)
    text = bytes(list(sample.tokens)[sample.prompt_length :]).decode()
    return "".join(letter for letter, on in zip(text, mask, strict=True) if on and letter != "\x01")


async def test_an_agent_to_which_another_one_hands_over_has_another_conversation(context, says, tmp_path) -> None:
    turns = (call("transfer_to_adder"), call("add", a=37, b=45), "82")
    says(*turns)
    samples, printed = await run(context, tmp_path, "with_openai_agents.py", "handoff")
    assert printed == "82"
    assert [trained(sample) for sample in samples] == [turns[0], turns[1] + turns[2]]


@dataclass(slots=True)
class Recorder:
    """A client of the engines that records each turn: ids of prompt and response, and the response's
    log-probabilities."""

    client: Client
    turns: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.client.url

    async def engine_url(self) -> str:
        return await self.client.engine_url()

    async def generate(self, input_ids: Any, **more: Any) -> list[Generation]:
        answers = await self.client.generate(input_ids, **more)
        self.turns += [(list(input_ids), list(one.token_ids), list(one.log_probs)) for one in answers]
        return answers


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
