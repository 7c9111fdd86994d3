from __future__ import annotations

import asyncio
import copy
import json
import re
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_core.config.learning import AlgorithmConfig, LearnerConfig
from slime_core.config.sampling import DataConfig, EvalConfig, EvalDataset, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.config.secrets import add_key, key_of_run
from slime_core.errors import ConfigError, DataError, EngineError, PluginError, RequestRefused, RunError
from slime_core.generation import GenerateContext, Generation, Kept, SamplingParams
from slime_core.plugins.activation import activate
from slime_core.plugins.component import Kind
from slime_core.plugins.registry import Registry
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout import sampler as sampling
from slime_core.rollout import sampler_components
from slime_core.rollout.components import ComponentRouter, RoutedComponent
from slime_core.rollout.evaluation import Evaluation
from slime_core.rollout.group_generator import GroupGenerator
from slime_core.rollout.reward_scoring import InProcessScorer
from slime_core.rollout.sampler import EvalSampler, Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine

FOLDER = Path(__file__).parents[3] / "slime_core" / "builtin" / "arithmetic" / "model"
END = 1


def digits(text: str) -> list[int]:
    return [int(digit) + 5 for digit in text]


def answer(text: str, reason: Any = "stop") -> Generation:
    ids = [*digits(text), *([END] if reason == "stop" else [])]
    alone = Kept(array("i", ids), array("i", range(len(ids) + 1)))
    return Generation(array("i", ids), array("f", [-0.5] * len(ids)), reason, ("3",), kept=alone)


@dataclass
class FakeClient:
    """Answers with the texts that ``answers`` holds for a prompt; a prompt without an entry fails."""

    answers: dict[str, list[Generation]]
    requests: list[tuple[str, SamplingParams, int]] = field(default_factory=list)
    made_with: dict[str, Any] = field(default_factory=dict)
    closed: bool = False
    num_in_flight: int = 0

    async def generate(
        self, input_ids: list[int], *, sampling: SamplingParams, n: int = 1, session: None = None
    ) -> list[Generation]:
        prompt = "".join("+" if one == 15 else str(one - 5) for one in input_ids)
        self.requests.append((prompt, sampling, n))
        if prompt not in self.answers:
            raise EngineError(f"no engine answered {prompt}")
        return self.answers[prompt][:n]

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def registry() -> Registry:
    return activate(["grpo", "ppo"]).registry


@pytest.fixture(scope="module")
def shared_encoder() -> PromptEncoder:
    return PromptEncoder(FOLDER, apply_chat_template=False)


@pytest.fixture
def build(tmp_path, registry, shared_encoder, monkeypatch):
    """Builds a sampler over two prompts, 1+1 and 2+2 of two samples each, and the client that answers it."""

    def make(answers: dict[str, list[Generation]], *, num_ranks: int = 1, **overrides) -> tuple[Sampler, FakeClient]:
        chosen, manifest = overrides.pop("registry", registry), overrides.pop("manifest", None)
        kind = overrides.pop("kind", Sampler)
        client = FakeClient(answers)
        monkeypatch.setattr(
            sampler_components, "GenerateClient", lambda url, **options: client.made_with.update(options) or client
        )
        monkeypatch.setattr(sampler_components, "PromptEncoder", lambda folder, **_: shared_encoder)
        data = tmp_path / "train.jsonl"
        rows = [{"prompt": "1+1", "label": "2", "metadata": {"carries": 0}}]
        rows.append({"prompt": "2+2", "label": "4", "metadata": {"carries": 1}})
        data.write_text("\n".join(map(json.dumps, rows)))
        config = RunConfig(
            data=DataConfig(rollout_shuffle=False),
            rollout=overrides.pop("rollout", RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2)),
            algorithm=AlgorithmConfig(advantage_estimator=overrides.pop("estimator", "grpo")),
            eval=EvalConfig(
                **{"eval_prompt_data": (("sums", data),), "eval_max_response_len": 5, **overrides.pop("eval", {})}
            ),
            **overrides,
        )
        settings = SamplerSettings(
            config,
            FOLDER,
            data,
            "http://unused",
            num_ranks=num_ranks,
            samples_folder=tmp_path / "samples",
            num_engines=3,
        )
        return kind(settings, chosen, manifest=manifest), client

    return make


GOOD = {"1+1": [answer("2"), answer("3")], "2+2": [answer("4"), answer("44", "length")]}


async def test_a_rollout_becomes_a_shard_with_group_relative_advantages(build):
    sampler, client = build(GOOD)
    sampled = await sampler.sample(5)
    (shard,) = sampled.shards
    assert shard.rollout == 5
    assert shard.tokens_T.tolist() == [6, 15, 6, 7, 1, 6, 15, 6, 8, 1, 7, 15, 7, 9, 1, 7, 15, 7, 9, 9]
    assert shard.response_lengths_B.tolist() == [2, 2, 2, 2]
    assert shard.rollout_log_probs_U.tolist() == [-0.5] * 8
    assert shard.columns_B["advantages"].tolist() == pytest.approx([0.70711, -0.70711] * 2, abs=1e-4)
    assert shard.columns_B["rewards"].tolist() == [1, 0, 1, 0]
    cursor = sampler.cursor()["source"]
    assert (cursor["next"], cursor["returned"]) == (2, [])
    assert [(prompt, n) for prompt, _, n in client.requests] == [("1+1", 2), ("2+2", 2)]


async def test_an_estimator_of_scope_token_is_left_to_the_learner(build):
    sampler, _ = build(GOOD, estimator="reinforce_plus_plus")
    (shard,) = (await sampler.sample(0)).shards
    assert shard.columns_B.keys() == {"rewards"}
    assert shard.columns_B["rewards"].tolist() == [1, 0, 1, 0]


async def test_metrics_describe_the_samples(build):
    sampler, _ = build({"1+1": [answer("2"), answer("2")], "2+2": [answer("4"), answer("44", "length")]})
    metrics = (await sampler.sample(0)).metrics
    assert metrics.pop("perf/tokens_per_gpu_per_sec") > 0
    assert metrics.pop("perf/ledger_time") > 0
    assert {name: value for name, value in metrics.items() if name.startswith("ledger/") and value} == {
        "ledger/taken": 2.0,
        "ledger/trained": 2.0,
    }
    assert {name: value for name, value in metrics.items() if not name.startswith("ledger/")} == {
        "rollout/raw_reward": 0.75,
        "rollout/response_len/mean": 2.0,
        "rollout/response_len/max": 2.0,
        "rollout/truncated_ratio": 0.25,
        "rollout/failed_ratio": 0.0,
        "train/token_imbalance": 1.0,
        "train/padding_ratio": 0.0,
        "train/micro_batches_per_rank": 1.0,
        "rollout/tokens": 20.0,
        "rollout/response_tokens": 8.0,
        "rollout/zero_std_groups": 0.5,
    }


async def test_a_group_that_failed_is_counted_recorded_and_not_trained_on(build, tmp_path):
    sampler, _ = build({"1+1": GOOD["1+1"]})
    sampled = await sampler.sample(0)
    assert sampled.shards[0].indices_B.tolist() == [0, 1]
    assert sampled.metrics["rollout/failed_ratio"] == 0.5
    rows = [json.loads(line) for line in (tmp_path / "samples" / "train-000000.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["completed", "completed", "failed", "failed"]
    assert rows[2]["error"] == "no engine answered 2+2"


async def test_what_a_generate_function_warns_of_is_told_once_in_a_run(build):
    sampler, _ = build(GOOD)
    told = []
    for rollout in (0, 1):
        for text in ("odd", "odd", f"odd in {rollout}"):
            sampler._components.context(rollout, evaluation=False).warn(text)
        told.append((await sampler.sample(rollout)).warnings)
    assert told == [["odd", "odd in 0"], ["odd in 1"]]


async def test_a_group_with_an_aborted_sample_comes_again_and_is_only_then_trained_on(build):
    sampler, client = build({**GOOD, "2+2": [answer("4"), answer("4", "abort")]})
    sampled = await sampler.sample(0)
    assert sampled.shards[0].indices_B.tolist() == [0, 1]
    assert sampled.metrics["rollout/failed_ratio"] == 0.25
    assert len(sampled.warnings) == 1
    assert re.search("1 of 4 .* aborted, reward None", sampled.warnings[0])
    client.answers["2+2"] = GOOD["2+2"]
    again = await sampler.sample(1)
    assert {2, 3} <= set(again.shards[0].indices_B.tolist())


async def test_a_refused_request_ends_the_run(build):
    sampler, client = build(GOOD)

    async def refuse(*_: Any, **__: Any) -> list[Generation]:
        raise RequestRefused("too long")

    client.generate = refuse  # type: ignore[method-assign]
    with pytest.raises(RequestRefused, match="too long"):
        await sampler.sample(0)


@pytest.mark.parametrize("reward", [None, float("nan"), {"other": 1.0}])
async def test_a_reward_that_is_no_finite_number_is_refused_with_the_name_of_the_model(build, reward):
    sampler, _ = build(GOOD)

    class Odd:
        async def score(self, samples: list[Sample]) -> list[Any]:
            return [reward] * len(samples)

    sampler._collector._rewards._made["exact_match"] = RoutedComponent("exact_match", Odd(), takes_groups=False)
    with pytest.raises(RunError, match=r"0 of 4 .* reward model 'exact_match' returned .*; accepted: a finite"):
        await sampler.sample(0)


@pytest.mark.parametrize("shape", [(4, 1), (5,), ()])
async def test_advantages_of_another_shape_are_refused_with_the_name_of_the_estimator(build, shape):
    sampler, _ = build(GOOD)

    class Odd:
        def estimate(self, batch: Any) -> Any:
            return np.zeros(shape, np.float32)

    sampler._estimator = replace(sampler._estimator, component=Odd())
    with pytest.raises(RunError, match=r"advantage estimator 'grpo' of plugin 'grpo' .* returned shape"):
        await sampler.sample(0)


@pytest.mark.parametrize(
    ("estimate", "message"),
    [
        (lambda batch: 1 / 0, ".*ZeroDivisionError"),
        (lambda batch: ["high"], ".*ValueError"),
    ],
)
async def test_an_estimator_that_fails_is_named_with_its_plugin(build, estimate, message):
    sampler, _ = build(GOOD)
    sampler._estimator = replace(sampler._estimator, component=SimpleNamespace(estimate=estimate))
    with pytest.raises(RunError, match=f"advantage estimator 'grpo' of plugin 'grpo' .*: {message}"):
        await sampler.sample(0)


async def test_a_component_that_cannot_be_made_is_named_with_its_plugin(build, monkeypatch):
    sampler, _ = build(GOOD)

    def broken(options: Any, run: Any) -> Any:
        raise KeyError("weight")

    monkeypatch.setattr(Registry, "load", lambda self, kind, name: broken)
    message = "plugin 'grpo' .*: making advantage estimator 'grpo' failed with KeyError: 'weight'"
    with pytest.raises(PluginError, match=message):
        sampler._components.make_estimator()


async def test_samples_that_come_back_from_the_data_source_start_over(build):
    sampler, _ = build({**GOOD, "2+2": [answer("4"), answer("4", "abort")]})
    held: list[list[Sample]] = []
    source = sampler._rollouts.prompts._source  # type: ignore[attr-defined]
    fresh = source.next_groups
    source.put_back = held.extend
    source.next_groups = lambda n: [*held, *fresh(n - len(held))]
    await sampler.sample(0)
    assert [sample.status for sample in held[0]] == [Status.COMPLETED, Status.ABORTED]
    held[0][0].metadata["tries"] = 1
    seen = []

    async def look(context: Any, samples: list[Sample], sampling: Any) -> list[Sample]:
        seen.extend(copy.deepcopy(samples))
        for sample in samples:
            sample.tokens, sample.response_length, sample.rollout_log_probs = [6, 7], 1, [-0.1]
            sample.status = Status.COMPLETED
        return samples

    sampler._collector._generators._made["single_turn"] = RoutedComponent("single_turn", look, takes_groups=True)
    await sampler.sample(1)
    assert seen[0] == Sample(group_index=1, index=2, prompt="2+2", label="4", metadata={"carries": 1, "tries": 1})


async def test_samples_of_a_fan_out_inherit_group_and_index(registry):
    async def fan_out(context: Any, sample: Sample, sampling: Any) -> list[Sample]:
        return [Sample(status=Status.COMPLETED, rollout_id=7), Sample(status=Status.COMPLETED, rollout_id=7, index=9)]

    class Flat:
        async def score(self, samples: list[Sample]) -> list[float]:
            return [1.0] * len(samples)

    def choice(kind: Kind, component: Any) -> ComponentRouter:
        name = registry.names(kind)[0]
        chosen = ComponentRouter(kind, default=name, registry=registry, offered={}, make=lambda _: component)
        chosen._made[name] = RoutedComponent(name, component, takes_groups=False)
        return chosen

    generators, rewards = choice(Kind.GENERATE_FUNCTION, fan_out), choice(Kind.REWARD_MODEL, Flat())
    collector = GroupGenerator(generators, rewards, rollout=RolloutConfig())
    group = await collector.collect(GenerateContext(None, None), [Sample(group_index=3, index=4)], SamplingParams())
    assert [(one.group_index, one.index, one.reward) for one in group] == [(3, 4, 1.0), (3, 4, 1.0)]


async def test_a_fan_out_that_renumbers_its_siblings_is_not_lost(build):
    sampler, _ = build(GOOD)

    async def fan_out(context: Any, sample: Sample, sampling: Any) -> list[Sample]:
        own = {"tokens": [5, 6], "response_length": 1, "rollout_log_probs": [-0.5], "status": Status.COMPLETED}
        return [replace(sample, **own, index=turn, rollout_id=50 + (sample.index or 0)) for turn in range(3)]

    fanning = RoutedComponent("single_turn", fan_out, takes_groups=False)
    sampler._collector._generators._made["single_turn"] = fanning
    sampled = await sampler.sample(0)
    assert sampled.shards[0].indices_B.tolist() == [index for index in range(4) for _ in range(3)]
    assert (sampled.metrics["ledger/trained"], sampled.metrics["ledger/failed"]) == (2.0, 0.0)
    assert not [name for name in sampled.metrics if "not_returned" in name]


async def test_a_rollout_with_nothing_to_train_on_ends_the_run_with_the_cause(build):
    sampler, _ = build({})
    with pytest.raises(RunError, match=r"rollout 0: 0 of 4 .* 1 .*1\+1; no engine"):
        await sampler.sample(0)


async def test_a_reward_model_that_skips_a_sample_is_refused(build):
    sampler, _ = build(GOOD)

    class Short:
        async def score(self, samples: list[Sample]) -> list[float]:
            return [1.0] * (len(samples) - 1)

    sampler._collector._rewards._made["exact_match"] = RoutedComponent(
        "exact_match", InProcessScorer("exact_match", Short()), takes_groups=False
    )
    with pytest.raises(RunError, match="'exact_match' returned 1 rewards for 2 samples"):
        await sampler.sample(0)


MOODY = """
import math, os, time
from slime_core import Component, hookimpl

@hookimpl
def slime_register_reward_models():
    yield Component("moody", target=f"{__name__}:Moody")

class Moody:
    def __init__(self, options, run):
        pass
    async def score(self, samples):
        return [self.one(sample.index) for sample in samples]
    def one(self, index):
        match index:
            case 0: time.sleep(600)
            case 2: return math.nan
            case 3: os._exit(1)
        return 0.5
"""


async def test_rewards_that_hang_crash_or_return_nan_cost_their_own_samples(build, tmp_path):
    plugin = tmp_path / "moody.py"
    plugin.write_text(MOODY)
    active = activate(["grpo", str(plugin)])
    rollout = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2, rm_type="moody", reward_timeout_s=1.5)
    sampler, _ = build(GOOD, registry=active.registry, manifest=active.manifest, rollout=rollout)
    sampled = await sampler.sample(0)
    scores = await sampler.evaluate(0)
    await sampler.close()
    assert sampled.shards[0].indices_B.tolist() == [1]
    failures = {name.rpartition("/")[2]: value for name, value in sampled.metrics.items() if "reward_failures" in name}
    assert failures == {"timeout": 1.0, "invalid": 1.0, "crash": 1.0}
    # An evaluation goes on: a response without a reward counts as wrong. Its samples have the indices 0 and 1.
    assert (scores["eval/sums"], scores["eval/sums-failed/timeout"]) == (0.25, 1.0)


async def test_two_ranks_and_two_steps_share_the_samples(build):
    sampler, _ = build(GOOD, num_ranks=2, learner=LearnerConfig(num_steps_per_rollout=2))
    first, second = (await sampler.sample(0)).shards
    assert sorted([*first.indices_B, *second.indices_B]) == [0, 1, 2, 3]
    assert len(first.steps) == len(second.steps) == 2
    assert first.loss_weights_B.tolist() == [0.25, 0.25]


async def test_training_and_evaluation_ask_for_different_sampling(build):
    rollout = RolloutConfig(
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        rollout_temperature=0.7,
        rollout_top_p=0.9,
        rollout_top_k=8,
        rollout_max_response_len=11,
        rollout_stop_token_ids=(13,),
    )
    sampler, client = build(GOOD, rollout=rollout)
    (shard,) = (await sampler.sample(0)).shards
    await sampler.evaluate(0)
    training, greedy = client.requests[0][1], client.requests[1][1]
    assert training == SamplingParams(0.7, 0.9, 8, 11, stop_token_ids=(13, END))
    assert greedy == SamplingParams(0.0, 1.0, -1, 5, stop_token_ids=(13, END), max_kept=None)
    assert shard.kept_ids_S.tolist() == [7, END, 8, END]
    assert shard.temperature == pytest.approx(0.7)


async def test_the_client_has_room_for_all_engines_and_knows_the_vocabulary(build):
    _, client = build(GOOD)
    assert client.made_with == {
        "max_in_flight": 3 * 512,
        "timeout_s": 300.0,
        "vocab_size": 16,
        "routes": None,
        "engines": (),
        "num_engines": 3,
        "restart_s": 0.0,
        "first_answer_s": 0.0,
        "masks_up_to": 0,
    }


async def test_an_evaluation_is_the_mean_reward_overall_and_by_metadata(build, tmp_path):
    sampler, client = build({"1+1": [answer("2")], "2+2": [answer("44", "length")]})
    assert await sampler.evaluate(8) == {
        "eval/sums": 0.5,
        "eval/sums-truncated_ratio": 0.5,
        "eval/sums-pass@1": 0.5,
        "eval/sums/response_len/mean": 2.0,
        "eval/sums/response_len/max": 2.0,
        "eval/sums/carries=0": 1.0,
        "eval/sums/carries=1": 0.0,
    }
    assert [n for _, _, n in client.requests] == [1, 1]
    assert (tmp_path / "samples" / "eval-sums-000008.jsonl").is_file()


@pytest.mark.parametrize(("size", "seconds"), [(1, 10.0), (0, 2.0)])
async def test_the_first_rollout_ahead_is_generated_from_the_first_publication_on(build, monkeypatch, size, seconds):
    class Clock:
        now_s, step_s = 100.0, 0.0

        def monotonic(self) -> float:
            self.now_s += self.step_s
            return self.now_s

    clock = Clock()
    monkeypatch.setattr(sampling, "time", clock)
    rollout = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2, async_buffer_size=size)
    sampler, _ = build(GOOD, rollout=rollout)
    sampler.published(0)
    clock.now_s, clock.step_s = 108.0, 2.0
    metrics = (await sampler.sample(0)).metrics
    assert metrics["perf/tokens_per_gpu_per_sec"] == metrics["rollout/response_tokens"] / seconds
    await sampler.close()


async def test_an_evaluation_has_the_engines_to_itself_unless_it_has_a_sampler_of_its_own(build):
    ahead = RolloutConfig(rollout_batch_size=1, n_samples_per_prompt=2, async_buffer_size=1)
    sampler, client = build(GOOD, rollout=ahead)
    under_way = 0

    class Slow(FakeClient):
        async def generate(self, *arguments: Any, **options: Any) -> list[Generation]:
            nonlocal under_way
            under_way += options["n"]
            for _ in range(20):
                await asyncio.sleep(0)
            in_flight.append((options["n"], under_way))
            under_way -= options["n"]
            return await client.generate(*arguments, **options)

    in_flight: list[tuple[int, int]] = []
    sampler._components.client = Slow(GOOD)
    sampler.published(0)
    await sampler.evaluate(0)
    # A group of two ahead alone, then the two evaluation prompts, one response each.
    assert in_flight == [(2, 2), (1, 2), (1, 1)]
    await sampler.close()


async def test_an_evaluation_says_what_every_part_of_a_weighted_sum_gave(build):
    rollout = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2, rm_type="0.5*exact_match+0.25*random")
    sampler, _ = build({"1+1": [answer("2")], "2+2": [answer("44", "length")]}, rollout=rollout)
    scores = await sampler.evaluate(0)
    await sampler.close()
    assert {name: scores[name] for name in scores if "reward_parts" in name} == {
        "eval/sums/reward_parts/exact_match": 0.5,
        "eval/sums/reward_parts/random": 0.5,
    }
    assert scores["eval/sums"] == 0.375


async def test_each_set_is_sampled_rewarded_and_read_by_its_own_settings(build, tmp_path):
    rows = [{"q": "1+1", "a": "3"}, {"q": "2+2", "a": "4"}, {"q": "1+1+1", "a": "3"}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = EvalDataset(
        name="own",
        path=tmp_path / "own.jsonl",
        n_samples_per_eval_prompt=2,
        temperature=0.5,
        max_response_len=3,
        max_context_len=5,
        max_prompt_len=4,
        input_key="q",
        label_key="a",
        rm_type="random",
    )
    sampler, client = build(GOOD, eval={"eval_datasets": (own,)})
    scores = await sampler.evaluate(0)
    assert [(prompt, n) for prompt, _, n in client.requests] == [("1+1", 1), ("2+2", 1), ("1+1", 2), ("2+2", 2)]
    greedy, random = client.requests[0][1], client.requests[2][1]
    assert (greedy.temperature, greedy.max_new_tokens) == (0.0, 5)
    # A prompt of 3 tokens leaves 2 of 5 for its response.
    assert random == SamplingParams(0.5, max_new_tokens=2, stop_token_ids=(END,), max_kept=None)
    # One prompt has 5 tokens.
    assert scores["eval/own-left_out"] == 1.0
    assert "eval/own-pass@2" in scores
    assert "eval/sums-left_out" not in scores
    assert (scores["eval/sums"], scores["eval/sums-pass@1"]) == (1.0, 1.0)


async def test_a_row_decides_how_its_responses_are_sampled_in_training_and_evaluation(build, tmp_path):
    sampler, client = build(GOOD)
    rows = [{"prompt": "1+1", "label": "2", "metadata": {"sampling_params": {"temperature": 0.7, "min_p": 0.1}}}]
    (tmp_path / "own.jsonl").write_text(json.dumps(rows[0]))
    config = RunConfig(eval=EvalConfig(eval_prompt_data=(("own", tmp_path / "own.jsonl"),)))
    await Evaluation(config, sampler.evaluation._components).run(sampler._components.context(0, evaluation=True), None)
    assert client.requests[-1][1] == SamplingParams(
        0.7, max_new_tokens=1024, stop_token_ids=(END,), extra={"min_p": 0.1}, max_kept=None
    )
    groups = sampler._rollouts.prompts.next_groups(2)
    for sample in groups[0]:
        sample.metadata["sampling_params"] = {"max_new_tokens": 2, "stop_token_ids": [9]}
    context = sampler._components.context(0, evaluation=False)
    for group in groups:
        await sampler._collector.collect(context, group, SamplingParams(stop_token_ids=(END,)))
    own, usual = [sampling for _, sampling, _ in client.requests[-2:]]
    assert (own.max_new_tokens, own.stop_token_ids) == (2, (9, END))
    assert (usual.max_new_tokens, usual.stop_token_ids) == (1024, (END,))
    groups[1][0].metadata["sampling_params"] = {"temperature": 0.5}
    with pytest.raises(DataError, match=r"sample 2 of group 1: metadata sampling_params: temperature = 0\.5, but"):
        await sampler._collector.collect(context, groups[1], SamplingParams())


async def test_an_auxiliary_model_answers_a_set_that_names_it(build, tmp_path, monkeypatch):
    sampler, client = build(GOOD)
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "1+1", "label": "2"}))

    def evaluation(model: str, models: dict[str, str]) -> Evaluation:
        own = EvalDataset(name="own", path=tmp_path / "own.jsonl", model=model, max_response_len=8, rm_type="random")
        components = copy.copy(sampler._components)
        components.models = models
        return Evaluation(RunConfig(eval=EvalConfig(eval_datasets=(own,))), components)

    with FakeEngine() as engine, FakeEngine(key="of-theirs") as theirs, key_of_run():
        monkeypatch.setenv("THEIR_KEY", "of-theirs")
        add_key(theirs.url, "THEIR_KEY")
        for model, models in ((engine.url, {}), ("judge", {"judge": engine.url}), (theirs.url, {})):
            made = evaluation(model, models)
            await made.run(sampler._components.context(0, evaluation=True), None)
            await made.close()
        assert engine.calls.count("/generate") == 2
        assert theirs.calls.count("/generate") == 1
        assert "Authorization" not in engine.headers[0]
    assert client.requests == []
    with pytest.raises(ConfigError, match=r" own: model = 'juge', .*judge\?"):
        evaluation("juge", {"judge": "http://x"})


async def test_pass_rates_of_a_rollout_are_of_what_came_and_only_where_requested(build):
    rollout = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2, log_passrate=True)
    sampler, _ = build(GOOD, rollout=rollout)
    metrics = (await sampler.sample(0)).metrics
    assert {name: value for name, value in metrics.items() if "pass@" in name} == {
        "rollout/pass@1": 0.5,
        "rollout/pass@2": 1.0,
    }
    sampler, _ = build(GOOD)
    assert not [name for name in (await sampler.sample(0)).metrics if "pass@" in name]


async def test_a_sampler_that_only_measures_takes_no_prompts_and_needs_no_estimator(build, tmp_path):
    sampler, client = build(GOOD, kind=EvalSampler, estimator="none of these")
    assert (await sampler.evaluate(3))["eval/sums"] == 1.0
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["eval-sums-000003.jsonl"]
    await sampler.close()
    assert client.closed


async def test_an_evaluation_starts_from_clean_samples_every_time(build):
    sampler, client = build({"1+1": [answer("2")], "2+2": [answer("4")]})
    assert (await sampler.evaluate(0))["eval/sums"] == 1.0
    client.answers["2+2"] = [answer("5")]
    assert (await sampler.evaluate(1))["eval/sums"] == 0.5


async def test_changes_in_place_do_not_reach_the_next_evaluation(build):
    sampler, _ = build(GOOD)
    seen = []

    async def in_place(context: Any, samples: list[Sample], sampling: Any) -> list[Sample]:
        (sample,) = samples
        seen.append(
            (list(sample.tokens), dict(sample.metadata), list(sample.weight_versions), sample.spec_info.spec_verify_ct)
        )
        sample.tokens += [5]
        sample.append_response_tokens(
            tokens=[6], log_probs=[-0.1], text="1", meta_info={"finish_reason": "stop", "weight_version": "7"}
        )
        sample.metadata["seen"] = "yes"
        sample.spec_info.spec_verify_ct += 1
        return samples

    sampler._collector._generators._made["single_turn"] = RoutedComponent("single_turn", in_place, takes_groups=True)
    await sampler.evaluate(0)
    first, seen[:] = list(seen), []
    await sampler.evaluate(1)
    assert seen == first
    assert first[0] == ([], {"carries": 0}, [], 0)


async def test_an_evaluation_does_not_move_the_training_data(build):
    sampler, _ = build(GOOD)
    await sampler.evaluate(0)
    assert (await sampler.sample(0)).shards[0].indices_B.tolist() == [0, 1, 2, 3]


async def test_an_evaluation_sample_that_no_engine_answered_counts_as_wrong(build, tmp_path):
    sampler, _ = build({"1+1": [answer("2")]})
    found = await sampler.evaluate(0)
    assert (found["eval/sums"], found["eval/sums-failed/engine"]) == (0.5, 1.0)
    rows = [json.loads(line) for line in (tmp_path / "samples" / "eval-sums-000000.jsonl").read_text().splitlines()]
    assert (rows[1]["status"], rows[1]["reward"], rows[1]["error"]) == ("failed", 0.0, "no engine answered 2+2")


async def test_an_aborted_response_of_a_concurrent_evaluation_resumes(build):
    sampler, client = build({"1+1": [answer("2")], "2+2": [answer("4", "abort")], "2+24": [answer("")]})
    found = await sampler.evaluate(0)
    assert [(prompt, sampling.max_new_tokens) for prompt, sampling, _ in client.requests[2:]] == [("2+24", 4)]
    assert (found["eval/sums"], "eval/sums-failed/engine" in found) == (1.0, False)


async def test_an_evaluation_that_is_ended_for_good_says_so(build):
    rollout = RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2, rollout_request_timeout_s=0.01)
    sampler, _ = build({"1+1": [answer("2")], "2+2": [answer("", "abort")] * 2}, rollout=rollout)
    found = await sampler.evaluate(0)
    assert (found["eval/sums"], found["eval/sums-failed/engine"]) == (0.5, 1.0)


async def test_an_evaluation_without_any_answer_ends_the_run(build):
    sampler, _ = build({})
    with pytest.raises(RunError, match=r"'sums': none of 2 .*1\+1; no engine"):
        await sampler.evaluate(0)


async def test_a_restored_sampler_continues_with_the_next_prompts(build):
    sampler, _ = build(GOOD)
    await sampler.sample(0)
    cursor = sampler.cursor()
    sampler.restore({**cursor, "source": {**cursor["source"], "next": 6}})
    assert (await sampler.sample(1)).shards[0].indices_B.tolist() == [12, 13, 14, 15]


async def test_closing_closes_the_client(build):
    sampler, client = build(GOOD)
    await sampler.close()
    assert client.closed


async def test_the_progress_of_a_rollout_counts_groups_and_what_the_others_wait_for(build, monkeypatch):
    sampler, client = build(GOOD)
    asked, answered = asyncio.Event(), asyncio.Event()
    generate = client.generate

    async def slow(input_ids: list[int], **options: Any) -> list[Generation]:
        if input_ids[0] == digits("2")[0]:
            client.num_in_flight += 1
            asked.set()
            await answered.wait()
            client.num_in_flight -= 1
        return await generate(input_ids, **options)

    monkeypatch.setattr(client, "generate", slow)
    assert sampler.progress() is None
    rollout = asyncio.create_task(sampler.sample(0))
    await asked.wait()
    while (progress := sampler.progress()) is not None and not progress.done:
        await asyncio.sleep(0)
    assert progress is not None
    assert (progress.done, progress.total, progress.unit) == (1, 2, "groups")
    assert progress.waiting_for["engines"] == client.num_in_flight
    assert progress.waiting_for["rewards"] == 0
    answered.set()
    await rollout
    assert sampler.progress() is None


async def test_the_progress_of_an_evaluation_counts_prompts(build, monkeypatch):
    sampler, client = build(GOOD, kind=EvalSampler)
    seen = []
    generate = client.generate

    async def looks(input_ids: list[int], **options: Any) -> list[Generation]:
        seen.append(sampler.progress())
        return await generate(input_ids, **options)

    monkeypatch.setattr(client, "generate", looks)
    assert sampler.progress() is None
    await sampler.evaluate(0)
    assert {(one.total, one.unit) for one in seen} == {(2, "prompts")}
    assert sampler.progress() is None
