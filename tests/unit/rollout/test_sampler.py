"""A sampler over the prompts 1+1 and 2+2, two samples each: shards, metrics, evaluations and failures."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_core.config.sampling import EvalConfig, EvalDataset
from slime_core.config.schema import RunConfig
from slime_core.config.secrets import add_key, key_of_run
from slime_core.errors import DataError, RunError
from slime_core.generation import Generation, SamplingParams
from slime_core.rollout.evaluation import Evaluation
from slime_core.rollout.routing import RoutedComponent
from slime_core.rollout.sampler import EvalSampler, TrainSampler
from slime_core.types import Sample, Status
from slime_testing.fake_engine import FakeEngine
from tests.unit.rollout.samplers import END, FakeClient, answer, written

GOOD = {"1+1": [answer("2"), answer("3")], "2+2": [answer("4"), answer("44", "length")]}
ROWS = [{"prompt": f"{n}+{n}", "label": str(2 * n), "metadata": {"carries": n - 1}} for n in (1, 2)]
Build = Callable[..., tuple[Any, FakeClient]]


@pytest.fixture
def build(make_sampler: Callable[..., Any], tmp_path: Path) -> Build:
    def make(answers: dict[str, list[Generation]], *, eval: Any = None, **options: Any) -> tuple[Any, FakeClient]:
        client = FakeClient(answers)
        sets = {"eval_prompt_data": (("sums", tmp_path / "train.jsonl"),), "eval_max_response_len": 5, **(eval or {})}
        options = {"rollout": {}, "eval": EvalConfig(**sets), **options}
        return make_sampler(client, ROWS, **options), client

    return make


def generates(sampler: TrainSampler, function: Any, *, takes_groups: bool) -> None:
    made = sampler._generator._generators._components  # type: ignore[union-attr]
    made["single_turn"] = RoutedComponent("single_turn", function, takes_groups=takes_groups)


async def test_a_rollout_becomes_a_shard_with_group_relative_advantages(build: Build) -> None:
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
    assert (client.made_with["max_in_flight"], client.made_with["vocab_size"]) == (3 * 512, 16)


async def test_an_estimator_of_scope_token_is_left_to_the_learner(build: Build) -> None:
    sampler, _ = build(GOOD, estimator="reinforce_plus_plus")
    (shard,) = (await sampler.sample(0)).shards
    assert {name: column.tolist() for name, column in shard.columns_B.items()} == {"rewards": [1, 0, 1, 0]}


async def test_metrics_describe_the_samples(build: Build) -> None:
    sampler, _ = build({**GOOD, "1+1": [answer("2")] * 2}, rollout={"log_passrate": True})
    metrics = (await sampler.sample(0)).metrics
    assert metrics.pop("perf/tokens_per_gpu_per_sec") > 0
    assert metrics.pop("perf/ledger_time") > 0
    assert {name: value for name, value in metrics.items() if value or not name.startswith("ledger/")} == {
        "ledger/taken": 2.0,
        "ledger/trained": 2.0,
        "rollout/raw_reward": 0.75,
        "rollout/response_len/mean": 2.0,
        "rollout/response_len/max": 2.0,
        "rollout/truncated_ratio": 0.25,
        "rollout/failed_ratio": 0.0,
        "rollout/pass@1": 0.75,
        "rollout/pass@2": 1.0,
        "train/token_imbalance": 1.0,
        "train/padding_ratio": 0.0,
        "train/micro_batches_per_rank": 1.0,
        "rollout/tokens": 20.0,
        "rollout/response_tokens": 8.0,
        "rollout/zero_std_groups": 0.5,
    }


async def test_a_group_that_failed_is_counted_recorded_and_not_trained_on(build: Build, tmp_path: Path) -> None:
    sampler, _ = build({"1+1": GOOD["1+1"]})
    sampled = await sampler.sample(0)
    assert sampled.shards[0].indices_B.tolist() == [0, 1]
    assert sampled.metrics["rollout/failed_ratio"] == 0.5
    rows = written(tmp_path)
    assert [row["status"] for row in rows] == ["completed", "completed", "failed", "failed"]
    assert rows[2]["error"] == "no engine answered 2+2"


async def test_what_a_generate_function_warns_of_is_told_once_in_a_run(build: Build) -> None:
    sampler, _ = build(GOOD)
    told = []
    for rollout in (0, 1):
        for text in ("odd", "odd", f"odd in {rollout}"):
            sampler._components.context(rollout, evaluation=False).warn(text)
        told.append((await sampler.sample(rollout)).warnings)
    assert told == [["odd", "odd in 0"], ["odd in 1"]]


@pytest.mark.parametrize("reward", [None, float("nan"), {"other": 1.0}])
async def test_a_reward_that_is_no_finite_number_is_refused_with_the_name_of_the_model(
    build: Build, reward: Any
) -> None:
    sampler, _ = build(GOOD)

    class Odd:
        async def score(self, samples: list[Sample]) -> list[Any]:
            return [reward] * len(samples)

    sampler._generator._rewards._components["exact_match"] = RoutedComponent("exact_match", Odd(), takes_groups=False)
    with pytest.raises(RunError, match="'exact_match'"):
        await sampler.sample(0)


@pytest.mark.parametrize(
    "estimate",
    [
        *(lambda _, shape=shape: np.zeros(shape, np.float32) for shape in [(4, 1), (5,), ()]),
        lambda _: 1 / 0,
        lambda _: ["high"],
    ],
)
async def test_an_estimator_that_fails_or_returns_another_shape_is_named_with_its_plugin(
    build: Build, estimate: Any
) -> None:
    sampler, _ = build(GOOD)
    sampler._estimator = replace(sampler._estimator, component=SimpleNamespace(estimate=estimate))
    with pytest.raises(RunError, match="'grpo' of plugin 'grpo'"):
        await sampler.sample(0)


async def test_a_fan_out_that_renumbers_its_siblings_is_not_lost(build: Build) -> None:
    sampler, _ = build(GOOD)

    async def fan_out(context: Any, sample: Sample, sampling: Any) -> list[Sample]:
        made: dict[str, Any] = {
            "tokens": [5, 6],
            "response_length": 1,
            "rollout_log_probs": [-0.5],
            "status": Status.COMPLETED,
        }
        return [replace(sample, **made, index=turn, rollout_id=50 + (sample.index or 0)) for turn in range(3)]

    generates(sampler, fan_out, takes_groups=False)
    sampled = await sampler.sample(0)
    assert sampled.shards[0].indices_B.tolist() == [index for index in range(4) for _ in range(3)]
    assert (sampled.metrics["ledger/trained"], sampled.metrics["ledger/failed"]) == (2.0, 0.0)
    assert not [name for name in sampled.metrics if "not_returned" in name]


@pytest.mark.parametrize("call", ["sample", "evaluate"])
async def test_a_call_that_no_engine_answers_ends_the_run_with_the_cause(build: Build, call: str) -> None:
    sampler, _ = build({})
    with pytest.raises(RunError, match=r"1\+1; no engine"):
        await getattr(sampler, call)(0)


MOODY = """
import math, os, time
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.reward_model("moody", Moody)

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


async def test_rewards_that_hang_crash_or_return_nan_cost_their_own_samples(build: Build, tmp_path: Path) -> None:
    plugin = tmp_path / "moody.py"
    plugin.write_text(MOODY)
    sampler, _ = build(GOOD, plugins=[plugin], in_processes=True, rollout={"rm_type": "moody", "reward_timeout_s": 1.5})
    sampled = await sampler.sample(0)
    scores = await sampler.evaluate(0)
    await sampler.close()
    assert sampled.shards[0].indices_B.tolist() == [1]
    failures = {name.rpartition("/")[2]: value for name, value in sampled.metrics.items() if "reward_failures" in name}
    assert failures == {"timeout": 1.0, "invalid": 1.0, "crash": 1.0}
    # In an evaluation a response without a reward counts as wrong. Its samples have the indices 0 and 1.
    assert (scores["eval/sums"], scores["eval/sums-failed/timeout"]) == (0.25, 1.0)


async def test_training_and_evaluation_ask_for_different_sampling(build: Build) -> None:
    rollout: dict[str, Any] = {"rollout_temperature": 0.7, "rollout_top_p": 0.9, "rollout_top_k": 8}
    rollout |= {"rollout_batch_size": 1, "rollout_max_response_len": 11, "rollout_stop_token_ids": (13,)}
    sampler, client = build(GOOD, rollout=rollout)
    (shard,) = (await sampler.sample(0)).shards
    await sampler.evaluate(0)
    training, greedy = client.requests[0][1], client.requests[1][1]
    assert training == SamplingParams(0.7, 0.9, 8, 11, stop_token_ids=(13, END))
    assert greedy == SamplingParams(0.0, 1.0, -1, 5, stop_token_ids=(13, END), max_kept=None)
    assert shard.kept_ids_S.tolist() == [7, END, 8, END]
    assert shard.temperature == pytest.approx(0.7)


async def test_an_evaluation_is_the_mean_reward_overall_and_by_metadata(build: Build, tmp_path: Path) -> None:
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
    assert written(tmp_path, 8, "eval-sums")


async def test_each_set_is_sampled_rewarded_and_read_by_its_own_settings(build: Build, tmp_path: Path) -> None:
    rows = [{"q": "1+1", "a": "3"}, {"q": "2+2", "a": "4"}, {"q": "1+1+1", "a": "3"}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = EvalDataset(
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
    sampler, client = build(GOOD, eval={"eval_datasets": (dataset,)})
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


async def test_a_row_decides_how_its_responses_are_sampled_in_training_and_evaluation(
    build: Build, tmp_path: Path
) -> None:
    sampler, client = build(GOOD)
    row = {"prompt": "1+1", "label": "2", "metadata": {"sampling_params": {"temperature": 0.7, "min_p": 0.1}}}
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
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
        await sampler._generator.collect(context, group, SamplingParams(stop_token_ids=(END,)))
    first, second = [sampling for _, sampling, _ in client.requests[-2:]]
    assert (first.max_new_tokens, first.stop_token_ids) == (2, (9, END))
    assert (second.max_new_tokens, second.stop_token_ids) == (1024, (END,))
    groups[1][0].metadata["sampling_params"] = {"temperature": 0.5}
    with pytest.raises(DataError, match=r"sample 2 of group 1: .*temperature = 0\.5"):
        await sampler._generator.collect(context, groups[1], SamplingParams())


async def test_an_auxiliary_model_answers_a_set_that_names_it(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, client = build(GOOD)
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": "1+1", "label": "2"}))

    def evaluation(model: str, models: dict[str, str]) -> Evaluation:
        path = tmp_path / "own.jsonl"
        dataset = EvalDataset(name="own", path=path, model=model, max_response_len=8, rm_type="random")
        components = copy.copy(sampler._components)
        components.models = models
        return Evaluation(RunConfig(eval=EvalConfig(eval_datasets=(dataset,))), components)

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


async def test_a_sampler_that_only_measures_takes_no_prompts_and_needs_no_estimator(
    build: Build, tmp_path: Path
) -> None:
    sampler, client = build(GOOD, kind=EvalSampler, estimator="none of these")
    seen = []
    generate = client.generate

    async def look(input_ids: list[int], **options: Any) -> list[Generation]:
        seen.append(sampler.progress())
        return await generate(input_ids, **options)

    client.generate = look  # type: ignore[method-assign]
    assert (await sampler.evaluate(3))["eval/sums"] == 1.0
    assert {(progress.total, progress.unit) for progress in seen} == {(2, "prompts")}
    assert sampler.progress() is None
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["eval-sums-000003.jsonl"]
    await sampler.close()
    assert client.closed


async def test_changes_in_place_do_not_reach_the_next_evaluation(build: Build) -> None:
    sampler, _ = build(GOOD)
    seen = []

    async def in_place(context: Any, samples: list[Sample], sampling: Any) -> list[Sample]:
        (sample,) = samples
        drafts = sample.spec_info.spec_verify_ct
        seen.append((list(sample.tokens), dict(sample.metadata), list(sample.weight_versions), drafts))
        sample.tokens += [5]
        meta = {"finish_reason": "stop", "weight_version": "7"}
        sample.append_response_tokens(tokens=[6], log_probs=[-0.1], text="1", meta_info=meta)
        sample.metadata["seen"] = "yes"
        sample.spec_info.spec_verify_ct += 1
        return samples

    generates(sampler, in_place, takes_groups=True)
    await sampler.evaluate(0)
    first, seen[:] = list(seen), []
    await sampler.evaluate(1)
    assert seen == first
    assert first[0] == ([], {"carries": 0}, [], 0)


async def test_an_evaluation_sample_that_no_engine_answered_counts_as_wrong(build: Build, tmp_path: Path) -> None:
    sampler, _ = build({"1+1": [answer("2")]})
    scores = await sampler.evaluate(0)
    assert (scores["eval/sums"], scores["eval/sums-failed/engine"]) == (0.5, 1.0)
    row = written(tmp_path, name="eval-sums")[1]
    assert (row["status"], row["reward"], row["error"]) == ("failed", 0.0, "no engine answered 2+2")


async def test_an_aborted_response_of_a_concurrent_evaluation_resumes(build: Build) -> None:
    sampler, client = build({"1+1": [answer("2")], "2+2": [answer("4", "abort")], "2+24": [answer("")]})
    scores = await sampler.evaluate(0)
    assert [(prompt, sampling.max_new_tokens) for prompt, sampling, _ in client.requests[2:]] == [("2+24", 4)]
    assert (scores["eval/sums"], "eval/sums-failed/engine" in scores) == (1.0, False)


async def test_an_evaluation_that_is_ended_for_good_says_so(build: Build) -> None:
    answers = {"1+1": [answer("2")], "2+2": [answer("", "abort")] * 2}
    sampler, _ = build(answers, rollout={"rollout_request_timeout_s": 0.01})
    scores = await sampler.evaluate(0)
    assert (scores["eval/sums"], scores["eval/sums-failed/engine"]) == (0.5, 1.0)


async def test_the_progress_of_a_rollout_counts_groups_and_what_the_others_wait_for(build: Build) -> None:
    sampler, client = build(GOOD)
    asked, answered = asyncio.Event(), asyncio.Event()
    generate = client.generate

    async def slow(input_ids: list[int], **options: Any) -> list[Generation]:
        if input_ids[0] == 7:
            client.num_in_flight += 1
            asked.set()
            await answered.wait()
            client.num_in_flight -= 1
        return await generate(input_ids, **options)

    client.generate = slow  # type: ignore[method-assign]
    assert sampler.progress() is None
    rollout = asyncio.create_task(sampler.sample(0))
    await asked.wait()
    while (progress := sampler.progress()) is not None and not progress.done:
        await asyncio.sleep(0)
    assert progress is not None
    assert (progress.done, progress.total, progress.unit) == (1, 2, "groups")
    assert (progress.waiting_for["engines"], progress.waiting_for["rewards"]) == (client.num_in_flight, 0)
    answered.set()
    await rollout
    assert sampler.progress() is None
