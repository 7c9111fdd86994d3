"""Agents in the sampler of a run, with its scheduler, rewards and shards, and a fake engine in place of the model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.cli.activation import resolve
from slime_core.cli.run import options_of
from slime_core.rollout.sampler import Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from slime_testing.fake_engine import FakeEngine

REPO = Path(__file__).parents[3]
MODEL = next(REPO.glob("slime_core/**/model/model.safetensors")).parent
END, USER, TOOL, ASSISTANT = 1, 3, 2, 4

CODE = """
import asyncio
from openai import AsyncOpenAI

def note(what):
    with open("{here}/calls", "a") as file:
        print(what, file=file)

async def add(a: int, b: int) -> int:
    "The sum."
    note(f"add{a}")
    try:
        await asyncio.sleep(60 if a == 9 else 0)
    except asyncio.CancelledError:
        note("cancelled")
        raise
    if a == 8:
        raise KeyError("gone")
    return a + b

async def solve(task, base_url, api_key, model):
    note("evaluated" if task.evaluation else "trained")
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": task.prompt}]
        for _ in range(2):
            reply = (await client.chat.completions.create(model=model, messages=messages)).choices[0].message
            messages += [reply, {"role": "user", "content": task.prompt}]
    return [0.0, float(reply.content == task.label)]
"""


def ids(text: str) -> list[int]:
    """As the built-in tokenizer encodes digits and plus."""
    return [15 if one == "+" else 5 + int(one) for one in text]


class Engine(FakeEngine):
    """A first turn is a call of ``add`` with the numbers of the prompt; a second one is their sum.

    Attributes:
        slow: prompts whose second turn takes until it is aborted; it then has its first token.
    """

    def __init__(self) -> None:
        super().__init__(vocab_size=16)
        self.slow: set[str] = set()
        self._is_slow: ContextVar[bool] = ContextVar("is_slow", default=False)
        self.partial = 1

    async def _generate(self, body: dict[str, Any]) -> Any:
        question, is_second, _ = self._read(body["input_ids"])
        self._is_slow.set(is_second and question in self.slow)
        return await super()._generate(body)

    def _respond(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        question, is_second, have = self._read(prompt)
        whole = ids(str(sum(map(int, question.split("+"))))) if is_second else ids(question)
        self.answers = [[*whole[have:], END]]
        return super()._respond(prompt, sampling)

    @staticmethod
    def _read(prompt: list[int]) -> tuple[str, bool, int]:
        """The question, whether the request is for the second turn, and the ids that the turn has already."""
        asked = prompt[prompt.index(USER) + 1 : prompt.index(ASSISTANT)]
        question = "".join("+" if one == 15 else str(one - 5) for one in asked)
        return question, prompt.count(ASSISTANT) > 1, prompt[::-1].index(ASSISTANT)

    async def _work(self) -> None:
        await (asyncio.sleep(60) if self._is_slow.get() else super()._work())

    async def _parse_calls(self, body: dict[str, Any]) -> Any:
        first, plus, second = body["text"].partition("+")
        call = {"name": "add", "parameters": json.dumps({"a": first, "b": second})}
        return 200, {"normal_text": "", "calls": [call] if plus else []}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as engine:
        yield engine


@pytest.fixture
def sampler(tmp_path: Path, engine: Engine) -> Callable[..., Any]:
    """A sampler over the prompts 1+1, 2+2, ..., two responses to each, by the words of a command line."""
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+{n}", "label": str(2 * n)}) + "\n" for n in range(1, 10))
    )
    (tmp_path / "code.py").write_text(CODE.replace("{here}", str(tmp_path)))
    words = f"""--plugin grpo --advantage-estimator dr_grpo --prompt-data {tmp_path}/sums.jsonl --n-samples-per-prompt 2
        --rollout-max-response-len 40 --apply-chat-template --no-rollout-shuffle --num-rollout 4"""

    @asynccontextmanager
    async def make(more: str, **settings: Any) -> AsyncIterator[Sampler]:
        resolved, active = resolve([*words.split(), *more.format(here=tmp_path).split()])
        made = SamplerSettings(
            resolved.config,
            MODEL,
            tmp_path / "sums.jsonl",
            engine.url,
            num_ranks=1,
            samples_folder=tmp_path / "samples",
            options=options_of(resolved, active),
            **settings,
        )
        one = Sampler(made, active.registry)
        try:
            yield one
        finally:
            await one.close()

    return make


TOOLS = "--generate-function tool_agent --tools {here}/code.py:add"
AGENT = "--generate-function openai_agent --agent {here}/code.py:solve"


def conversation(n: int) -> list[int]:
    """The tool's name, of unknown characters, the prompt n+n, a call, the tool's answer and the sum."""
    return [
        *[TOOL] * len("add"),
        USER,
        *ids(f"{n}+{n}"),
        ASSISTANT,
        *ids(f"{n}+{n}"),
        END,
        *tool(n),
        *ids(str(2 * n)),
        END,
    ]


def tool(n: int) -> list[int]:
    # The built-in template has no role of tools: its name is unknown characters.
    return [TOOL] * len("<|tool|>") + ids(str(2 * n)) + [ASSISTANT]


def responses(shard: Any) -> list[list[int]]:
    """The ids of each sample of a shard."""
    ends = np.cumsum(shard.lengths_B)
    return [list(map(int, part)) for part in np.split(shard.tokens_T, ends[:-1])]


def first_digit(token_ids: list[int]) -> int:
    """The first id of the question."""
    return token_ids[token_ids.index(USER) + 1]


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], Counter[str]]:
    """What the tools and agents of ``CODE`` have noted."""
    return lambda: Counter((tmp_path / "calls").read_text().split())


async def test_a_conversation_that_was_aborted_resumes_in_its_turn_and_no_tool_runs_again(
    sampler, engine, calls
) -> None:
    engine.slow = {"2+2"}
    async with sampler(f"{TOOLS} --rollout-batch-size 1 --over-sampling-batch-size 2 --partial-rollout") as one:
        first = await one.sample(0)
        assert responses(first.shards[0]) == [conversation(1)] * 2
        engine.slow, engine.sampled[:] = set(), []
        engine._version = "1"
        one.published(1)
        second = await one.sample(1)
    assert responses(second.shards[0]) == [conversation(2)] * 2
    # The engine read the tool's answer and the first token of the second turn; it sampled nothing but the rest.
    assert [one for one in engine.sampled if first_digit(one[0]) == ids("2")[0]] == [(conversation(2)[:-1], [END])] * 2
    assert calls()["add2"] == 2


@pytest.mark.parametrize("function", [TOOLS, AGENT])
async def test_conversations_run_ahead_of_the_training_and_keep_their_versions(sampler, engine, function) -> None:
    words = "--rollout-batch-size 1 --async-buffer-size 1 --max-staleness 1 --stale-samples evict"
    engine._version = "0"
    async with sampler(f"{function} {words}") as one:
        one.published(0)
        first = await one.sample(0)
        # Of the first two prompts, that whose responses are complete first is the first rollout.
        (ahead,) = {ids("1")[0], ids("2")[0]} - set(map(first_digit, responses(first.shards[0])))
        while (
            sum(first_digit(prompt) == ahead for prompt, _ in engine.sampled) < 4
        ):  # the next rollout, two turns of two
            await asyncio.sleep(0.01)
        engine._version = "1"
        one.published(1)
        second = await one.sample(1)
    (shard,) = second.shards
    assert list(map(first_digit, responses(shard))) == [ahead] * 2
    assert shard.weight_version_B is not None
    assert shard.weight_version_B.tolist() == [0, 0]
    assert second.metrics["rollout/staleness/max"] == 1


@pytest.mark.parametrize("function", [TOOLS, AGENT])
async def test_an_evaluation_set_may_name_an_agent_of_its_own(sampler, tmp_path, calls, function) -> None:
    name = function.split()[1]
    label = {"tool_agent": "5+51010", "openai_agent": "10"}[name]  # the whole response; the agent's newest answer
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"{n}+{n}", "label": label}) + "\n" for n in (4, 5)))
    table = f'[[eval.eval_datasets]]\nname = "own"\npath = "held_out.jsonl"\ngenerate_function = "{name}"\n'
    code = '[agents]\ntools = ["code.py:add"]\nagent = "code.py:solve"\n'
    (tmp_path / "run.toml").write_text(code + table)
    async with sampler("--config {here}/run.toml --eval-interval 1") as one:
        found = await one.evaluate(0)
    assert found["eval/own"] == 0.5
    assert calls() == ({"add4": 1, "add5": 1} if name == "tool_agent" else {"evaluated": 2})


async def test_tools_in_flight_are_cancelled_when_the_run_ends(sampler, calls, tmp_path) -> None:
    only_nines(tmp_path)
    async with sampler(f"{TOOLS} --rollout-batch-size 1") as one:
        sampling = asyncio.create_task(one.sample(0))
        while not (tmp_path / "calls").exists() or calls()["add9"] < 2:
            await asyncio.sleep(0.01)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    assert calls() == {"add9": 2, "cancelled": 2}


def only_nines(folder: Path) -> None:
    (folder / "sums.jsonl").write_text(json.dumps({"prompt": "9+9", "label": "18"}) + "\n")


async def test_a_tool_that_fails_or_hangs_costs_its_own_samples(sampler, tmp_path, calls) -> None:
    rows = [{"prompt": f"{n}+{n}", "label": str(2 * n)} for n in (1, 8, 9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with sampler(
        f"{TOOLS} --rollout-batch-size 3 --agents.tool-timeout-s 0.2 --failed-samples drop_sample"
    ) as one:
        sampled = await one.sample(0)
    assert responses(sampled.shards[0]) == [conversation(1)] * 2
    assert sampled.metrics["rollout/failures/tool_error"] == 2
    assert sampled.metrics["rollout/failures/tool_timeout"] == 2
    assert calls()["cancelled"] == 2


async def test_a_reward_of_each_answer_becomes_its_advantage(sampler, engine) -> None:
    """By hand: the rollouts of 1+1 have the rewards (0, 1) and (0, 1), so the mean of their means is 0.5."""
    async with sampler(f"{AGENT} --rollout-batch-size 1 --agents.turn-rewards own") as one:
        sampled = await one.sample(0)
    (shard,) = sampled.shards
    found = sorted(zip(map(len, responses(shard)), shard.columns_B["advantages"].tolist(), strict=True))
    # Question and first answer have 5 + 4 tokens, the question again and the second answer 5 + 2.
    assert found == [(9, -0.5), (9, -0.5), (16, 0.5), (16, 0.5)]
    # Each token is trained once, and a rollout counts once: its weight is shared by its two trained answers.
    weights_B = shard.loss_weights_B.tolist()
    assert weights_B == pytest.approx([1 / 2 / (4 + 2)] * 4)


@pytest.mark.parametrize(("example", "rewards"), [("python_tool", [0.0, 1.0]), ("solve_and_select", [0.0] * 5)])
async def test_the_agents_of_the_examples_run(sampler, tmp_path, example, rewards) -> None:
    """The engine's first answers are no numbers; its second one in a conversation is right."""
    config = REPO / "examples" / example / "run.toml"
    async with sampler(f"--config {config} --rollout-batch-size 1") as one:
        await one.sample(0)
    rows = list(map(json.loads, (tmp_path / "samples" / "train-000000.jsonl").read_text().splitlines()))
    assert [row["error"] for row in rows if row["status"] == "failed"] == []
    assert sorted(row["reward"] for row in rows) == sorted(rewards * 2)
