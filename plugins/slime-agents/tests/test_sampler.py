"""Agents in the sampler of a run, with its scheduler, rewards and shards, and a fake engine instead of the model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_core.cli.activation import resolve
from slime_core.cli.run import options_of
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.sampler import TrainSampler
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
    return [15 if letter == "+" else 5 + int(letter) for letter in text]


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
        question, is_second, num_sampled = self._read(prompt)
        turn = ids(str(sum(map(int, question.split("+"))))) if is_second else ids(question)
        self.answers = [[*turn[num_sampled:], END]]
        return super()._respond(prompt, sampling)

    @staticmethod
    def _read(prompt: list[int]) -> tuple[str, bool, int]:
        """The question, whether the request is for the second turn, and the ids that the turn has already."""
        question_ids = prompt[prompt.index(USER) + 1 : prompt.index(ASSISTANT)]
        question = "".join("+" if token == 15 else str(token - 5) for token in question_ids)
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
    write_sums(tmp_path, range(1, 10))
    (tmp_path / "code.py").write_text(CODE.replace("{here}", str(tmp_path)))
    words = f"""--plugin grpo --advantage-estimator dr_grpo --prompt-data {tmp_path}/sums.jsonl --n-samples-per-prompt 2
        --rollout-max-response-len 40 --apply-chat-template --no-rollout-shuffle --num-rollout 4"""

    @asynccontextmanager
    async def make(more: str) -> AsyncIterator[TrainSampler]:
        resolved, active = resolve([*words.split(), *more.format(here=tmp_path).split()])
        settings = SamplerSettings(
            resolved.config,
            MODEL,
            tmp_path / "sums.jsonl",
            engine.url,
            num_ranks=1,
            samples_folder=tmp_path / "samples",
            options=options_of(resolved, active),
        )
        sampler = TrainSampler(settings, active.registry)
        try:
            yield sampler
        finally:
            await sampler.close()

    return make


def write_sums(folder: Path, numbers: Iterable[int], *, name: str = "sums", label: str | None = None) -> None:
    rows = [{"prompt": f"{n}+{n}", "label": label or str(2 * n)} for n in numbers]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


TOOLS = "--generate-function tool_agent --tools {here}/code.py:add"
AGENT = "--generate-function openai_agent --agent {here}/code.py:solve"


def conversation(n: int) -> list[int]:
    """The tool's name, of unknown characters, the prompt n+n, a call, the tool's answer and the sum."""
    call, total = ids(f"{n}+{n}"), ids(str(2 * n))
    # The built-in template has no role of tools: its name is unknown characters, too.
    result = [*[TOOL] * len("<|tool|>"), *total, ASSISTANT]
    return [*[TOOL] * len("add"), USER, *call, ASSISTANT, *call, END, *result, *total, END]


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
    async with sampler(f"{TOOLS} --rollout-batch-size 1 --over-sampling-batch-size 2 --partial-rollout") as running:
        first = await running.sample(0)
        assert responses(first.shards[0]) == [conversation(1)] * 2
        engine.slow, engine.sampled[:] = set(), []
        engine._version = "1"
        running.published(1)
        second = await running.sample(1)
    assert responses(second.shards[0]) == [conversation(2)] * 2
    # The engine read the tool's answer and the first token of the second turn; it sampled only the end of the turn.
    resumed = [request for request in engine.sampled if first_digit(request[0]) == ids("2")[0]]
    assert resumed == [(conversation(2)[:-1], [END])] * 2
    assert calls()["add2"] == 2


@pytest.mark.parametrize("function", [TOOLS, AGENT])
async def test_conversations_run_ahead_of_the_training_and_keep_their_versions(sampler, engine, function) -> None:
    words = "--rollout-batch-size 1 --async-buffer-size 1 --max-staleness 1 --stale-samples evict"
    engine._version = "0"
    async with sampler(f"{function} {words}") as running:
        running.published(0)
        first = await running.sample(0)
        # Of the first two prompts, that whose responses are complete first is the first rollout.
        (ahead,) = {ids("1")[0], ids("2")[0]} - set(map(first_digit, responses(first.shards[0])))
        while [first_digit(prompt) for prompt, _ in engine.sampled].count(ahead) < 4:  # two turns of two responses
            await asyncio.sleep(0.01)
        engine._version = "1"
        running.published(1)
        second = await running.sample(1)
    (shard,) = second.shards
    assert list(map(first_digit, responses(shard))) == [ahead] * 2
    assert shard.weight_version_B is not None
    assert shard.weight_version_B.tolist() == [0, 0]
    assert second.metrics["rollout/staleness/max"] == 1


@pytest.mark.parametrize("function", [TOOLS, AGENT])
async def test_an_evaluation_set_may_name_another_agent(sampler, tmp_path, calls, function) -> None:
    name = function.split()[1]
    label = {"tool_agent": "5+51010", "openai_agent": "10"}[name]  # the whole response; the agent's newest answer
    write_sums(tmp_path, (4, 5), name="held_out", label=label)
    table = f'[[eval.eval_datasets]]\nname = "other"\npath = "held_out.jsonl"\ngenerate_function = "{name}"\n'
    code = '[agents]\ntools = ["code.py:add"]\nagent = "code.py:solve"\n'
    (tmp_path / "run.toml").write_text(code + table)
    async with sampler("--config {here}/run.toml --eval-interval 1") as running:
        metrics = await running.evaluate(0)
    assert metrics["eval/other"] == 0.5
    assert calls() == ({"add4": 1, "add5": 1} if name == "tool_agent" else {"evaluated": 2})


async def test_tools_in_flight_are_cancelled_when_the_run_ends(sampler, calls, tmp_path) -> None:
    write_sums(tmp_path, [9])
    async with sampler(f"{TOOLS} --rollout-batch-size 1") as running:
        sampling = asyncio.create_task(running.sample(0))
        while not (tmp_path / "calls").exists() or calls()["add9"] < 2:
            await asyncio.sleep(0.01)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    assert calls() == {"add9": 2, "cancelled": 2}


async def test_a_tool_that_fails_or_hangs_costs_only_its_samples(sampler, tmp_path, calls) -> None:
    write_sums(tmp_path, (1, 8, 9))
    words = "--rollout-batch-size 3 --agents.tool-timeout-s 0.2 --failed-samples drop_sample"
    async with sampler(f"{TOOLS} {words}") as running:
        rollout = await running.sample(0)
    assert responses(rollout.shards[0]) == [conversation(1)] * 2
    assert [rollout.metrics[f"rollout/failures/tool_{cause}"] for cause in ("error", "timeout")] == [2, 2]
    assert calls()["cancelled"] == 2


async def test_a_reward_of_each_answer_becomes_its_advantage(sampler, engine) -> None:
    """By hand: the rollouts of 1+1 have the rewards (0, 1) and (0, 1), so the mean of their means is 0.5."""
    async with sampler(f"{AGENT} --rollout-batch-size 1 --agents.turn-rewards own") as running:
        (shard,) = (await running.sample(0)).shards
    lengths = map(len, responses(shard))
    # Question and first answer have 5 + 4 tokens, the question again and the second answer 5 + 2.
    assert (
        sorted(zip(lengths, shard.columns_B["advantages"].tolist(), strict=True)) == [(9, -0.5)] * 2 + [(16, 0.5)] * 2
    )
    # Each token is trained once, and a rollout counts once: its weight is shared by its two trained answers.
    assert shard.loss_weights_B.tolist() == pytest.approx([1 / 2 / (4 + 2)] * 4)


@pytest.mark.parametrize(("example", "rewards"), [("python_tool", [0.0, 1.0]), ("solve_and_select", [0.0] * 5)])
async def test_the_agents_of_the_examples_run(sampler, tmp_path, example, rewards) -> None:
    """The engine's first answers are no numbers; its second one in a conversation is right."""
    async with sampler(f"--config {REPO / 'examples' / example / 'run.toml'} --rollout-batch-size 1") as running:
        await running.sample(0)
    rows = list(map(json.loads, (tmp_path / "samples" / "train-000000.jsonl").read_text().splitlines()))
    assert [row["error"] for row in rows if row["status"] == "failed"] == []
    assert sorted(row["reward"] for row in rows) == sorted(rewards * 2)
