"""Requests of agents in all forms of OpenAI's API, through a real tokenizer with a template that reads text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_agents.openai_agent import OpenAIAgent
from slime_agents.options import AgentsOptions
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.harness import default_run_view
from slime_core.harness.engines import connect
from slime_core.prompts.chat import PromptEncoder
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine

TEMPLATE = (
    "{% for tool in tools or [] %}{{ '{' + tool.function.name + '}' }}{% endfor %}"
    "{% for message in messages %}{% set content = message.content if message.content is string else '' %}"
    "{% if message.role in ('system', 'user', 'assistant', 'tool') %}{{ '[' + message.role[0] + ':' + content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "{{ eos_token if message.role == 'assistant' else ']' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '>' }}{% endif %}"
)
"""Leaves out content in parts and the role developer, as the template of Qwen3 does."""

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({chr(at): at for at in range(1, 256)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="\x01", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    config = {"model_type": "qwen3", "vocab_size": 256, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return PromptEncoder(Path(folder), apply_chat_template=True)


async def run(engine: FakeEngine, encoder: PromptEncoder, *requests: Any, **fields: Any) -> list[Sample]:
    """The samples of an agent that sends ``requests``, each after the answers so far; None stands for an answer."""
    answers: list[Any] = []

    async def agent(task: Any, base_url: str, api_key: str, model: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            for request in requests:
                given = iter(answers)
                messages = [next(given) if message is None else message for message in request]
                answer = await client.chat.completions.create(model=model, messages=messages, **fields)
                answers.append(answer.choices[0].message.model_dump(exclude_none=True))
        return 1.0

    function = OpenAIAgent(AgentsOptions(), default_run_view())
    function._agent = agent
    async with connect(engine.url, vocab_size=256) as client:
        context = GenerateContext(client, encoder, max_response_len=2000, context_length=4000)
        return await function(context, Sample(prompt="q", index=3, group_index=1), SamplingParams(max_new_tokens=500))


def read(engine: FakeEngine) -> str:
    """What the engine read in the last request."""
    return "".join(map(chr, engine.sampled[-1][0]))


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        pytest.param(user(text("Are you sure?")), "Are you sure?", id="parts-agent"),
        pytest.param(user(text("Are you"), text("sure?")), "Are you\nsure?", id="two parts"),
        pytest.param(user("Are you sure?"), "Are you sure?", id="a text"),
    ],
)
async def test_a_message_in_parts_reaches_the_model(engine, says, encoder, second, expected) -> None:
    says("42", "yes")
    (sample,) = await run(engine, encoder, [user("q")], [user("q"), None, second])
    assert read(engine) == f"[u:q]>42\x01[u:{expected}]>"
    assert sample.status is Status.COMPLETED


async def test_the_instructions_of_a_developer_reach_the_model(engine, says, encoder) -> None:
    says("42")
    await run(engine, encoder, [{"role": "developer", "content": [text("Be brief.")]}, user("q")])
    assert read(engine) == "[s:Be brief.][u:q]>"


async def test_the_result_of_a_tool_in_parts_reaches_the_model(engine, says, encoder) -> None:
    says(CALL, "3")
    result = {"role": "tool", "tool_call_id": "x", "content": [text("the sum is 3")]}
    await run(engine, encoder, [user("q")], [user("q"), None, result], tools=[ADD])
    assert read(engine) == f"{{add}}[u:q]>{CALL}\x01[t:the sum is 3]>"


@pytest.mark.parametrize("content", [None, "", [text("")]])
async def test_calls_in_an_edited_history_have_arguments_as_an_object_and_no_null(
    engine, says, encoder, content
) -> None:
    says("3")
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [user("q"), {"role": "assistant", "content": content, "tool_calls": [call]}]
    await run(engine, encoder, [*history, {"role": "tool", "tool_call_id": "x", "content": "3"}], tools=[ADD])
    assert read(engine) == '{add}[u:q][a:add{"a": 1}\x01[t:3]>'


async def test_a_message_that_the_template_leaves_out_is_refused_and_named_by_the_sample(engine, says, encoder) -> None:
    says("42")
    observation = {"role": "observation", "content": "It rains."}
    (sample,) = await run(engine, encoder, [user("q")], [user("q"), None, observation, user("r")])
    assert (sample.status, sample.failure_cause) == (Status.FAILED, "agent_error")
    assert "400" in str(sample.error)
    assert "observation" in str(sample.error)
    assert len(engine.sampled) == 1
