"""Staleness of samples, the handling of stale ones, and a sampler that generates ahead."""

from __future__ import annotations

import asyncio
import json
import re
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.learning import AlgorithmConfig
from slime_core.config.sampling import DataConfig, EvalConfig, RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import RequestRefused, RunError
from slime_core.generation import Generation, keep
from slime_core.plugins.activation import activate
from slime_core.plugins.contracts import RolloutBatch
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout import group_scheduler as module
from slime_core.rollout import sampler_components
from slime_core.rollout.components import RoutedComponent
from slime_core.rollout.rollout_batch import Staleness, oldest_version
from slime_core.rollout.sampler import PluginRollouts, Sampler
from slime_core.rollout.sampler_components import SamplerSettings
from slime_core.types import LogProbs, Sample, Status, TokenIds
from tests.unit.rollout.test_sampler import FOLDER, FakeClient, answer
from tests.unit.rollout.token_versions import token_versions

# --- One sample -------------------------------------------------------------------------------------------------------


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    assert oldest_version(Sample(weight_versions=["9", "10"])) == 9
    assert oldest_version(Sample(weight_versions=["default", "4"])) == 4
    assert oldest_version(Sample(weight_versions=["default"])) is oldest_version(Sample()) is None


def test_turns_of_a_conversation_keep_their_versions() -> None:
    sample = Sample(tokens=[5])
    first = {"finish_reason": "stop", "weight_version": "3"}
    second = {"finish_reason": "stop", "weight_versions": [{"version": "3", "start": 0, "end": 1}]}
    second["weight_versions"].append({"version": "4", "start": 1, "end": 3})
    sample.append_response_tokens(tokens=[6, 7], log_probs=[-1, -1], meta_info=first)
    sample.append_response_tokens(tokens=[8], trainable=False)
    sample.append_response_tokens(tokens=[9, 9, 9], log_probs=[-1, -1, -1], meta_info=second)
    assert token_versions(sample) == [3, 3, -1, 3, 4, 4]
    assert (sample.weight_versions, oldest_version(sample)) == (["3", "4"], 3)


# --- The bound --------------------------------------------------------------------------------------------------------


def group(*versions: str) -> list[Sample]:
    return [Sample(weight_versions=[version]) for version in versions]


def test_a_group_with_one_sample_over_the_bound_is_over_it() -> None:
    groups = [group("5", "5"), group("3", "5"), group("4", "5"), group("")]
    assert [Staleness(1).refuses(one, rollout=5) for one in groups] == [False, True, False, False]
    assert not any(Staleness(2).refuses(one, rollout=5) for one in groups)
    assert not any(Staleness(None).refuses(one, rollout=99) for one in groups)
    assert not any(Staleness(1, "correct").refuses(one, rollout=5) for one in groups)


def test_staleness_is_measured_in_trained_rollouts() -> None:
    trained = [*group("5", "4"), *group("1", "")]
    assert Staleness(2, "correct").metrics(trained, rollout=5, left_out=0) == {
        "rollout/staleness/mean": 5 / 3,
        "rollout/staleness/max": 4.0,
        "rollout/staleness/corrected": 1.0,
    }
    assert Staleness(2, "evict").metrics(group("5"), rollout=5, left_out=3)["rollout/staleness/evicted"] == 3.0
    assert Staleness(2).metrics(group(""), rollout=5, left_out=3) == {"rollout/staleness/requeued": 3.0}
    assert Staleness(measured=False).metrics(group("5"), rollout=5, left_out=0) == {}
    assert Staleness(measured=False).metrics(group("4"), rollout=5, left_out=0) == {
        "rollout/staleness/mean": 1.0,
        "rollout/staleness/max": 1.0,
    }


@pytest.mark.parametrize(
    ("interval", "rollout", "is_measured"),
    [
        (1, {}, False),
        (2, {}, True),
        (1, {"async_buffer_size": 1}, True),
        (1, {"max_staleness": 0}, True),
        (1, {"over_sampling_batch_size": 64}, True),
        (1, {"partial_rollout": True}, True),
    ],
)
def test_a_run_that_may_be_off_policy_measures_it(interval: int, rollout: dict[str, Any], is_measured: bool) -> None:
    config = RunConfig(
        rollout=RolloutConfig(**rollout),
        weights={"update_weights_interval": interval},  # type: ignore[arg-type]
    )
    assert Staleness.of(config) == Staleness(rollout.get("max_staleness"), "requeue", is_measured)


# --- In the sampler ---------------------------------------------------------------------------------------------------


def by(version: str) -> list[Generation]:
    """A right and a wrong answer, sampled by ``version``."""
    right, wrong = answer("2"), answer("3")
    return [Generation(array("i", one.token_ids), one.log_probs, "stop", (version,)) for one in (right, wrong)]


class Moving(FakeClient):
    """Answers a prompt with the next of its answers, and with the last one from then on."""

    async def generate(self, input_ids: list[int], **more: Any) -> list[Generation]:
        found = await super().generate(input_ids, **more)
        prompt = self.requests[-1][0]
        if len(self.answers[prompt]) > 2:
            self.answers[prompt] = self.answers[prompt][2:]
        return found


Build = Callable[..., tuple[Sampler, Moving]]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(FOLDER, apply_chat_template=False)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: PromptEncoder) -> Build:
    """Builds a sampler over the prompts 1+1, 1+2, ... with two groups of two a rollout."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"1+{n}", "label": "2"}) + "\n" for n in range(1, 7)))

    def make(answers: dict[str, list[Generation]], **rollout: Any) -> tuple[Sampler, Moving]:
        client = Moving(dict(answers))
        monkeypatch.setattr(sampler_components, "GenerateClient", lambda url, **_: client)
        monkeypatch.setattr(sampler_components, "PromptEncoder", lambda folder, **_: encoder)
        config = RunConfig(
            data=DataConfig(rollout_shuffle=False),
            rollout=RolloutConfig(rollout_batch_size=2, n_samples_per_prompt=2, **rollout),
            algorithm=AlgorithmConfig(advantage_estimator="grpo"),
            eval=EvalConfig(eval_prompt_data=(("sums", data),)),
        )
        settings = SamplerSettings(config, FOLDER, data, "http://unused", samples_folder=tmp_path / "samples")
        return Sampler(settings, activate(["grpo"]).registry), client

    return make


def dropped(folder: Path, rollout: int) -> list[tuple[int, str]]:
    rows = map(json.loads, (folder / "samples" / f"train-{rollout:06d}.jsonl").read_text().splitlines())
    return [(row["index"], row["dropped"]) for row in rows if "dropped" in row]


OLD = {"1+1": [*by("3"), *by("5")], "1+2": by("5"), "1+3": by("5")}
"""The first answer to 1+1 is two rollouts old in rollout 5."""


async def test_a_group_over_the_bound_comes_again_and_is_trained_when_it_is_new(build: Build, tmp_path: Path) -> None:
    sampler, _ = build(OLD, max_staleness=1)
    sampled = await sampler.sample(5)
    assert sampled.shards[0].indices_B.tolist() == [2, 3, 0, 1]
    assert sampled.shards[0].weight_version_B is not None
    assert sampled.shards[0].weight_version_B.tolist() == [5] * 4
    assert sampled.metrics["rollout/staleness/requeued"] == 2.0
    assert dropped(tmp_path, 5) == [(0, "requeued"), (1, "requeued")]
    assert sampler.cursor()["source"]["next"] == 2


async def test_a_response_that_is_too_old_to_resume_is_restarted(build: Build) -> None:
    rest = Generation(array("i", [1]), array("f", [-0.5]), "stop", ("5",))
    sampler, client = build({"1+1": by("5"), "1+2": by("5"), "1+22": [rest]}, max_staleness=1, partial_rollout=True)
    groups = sampler._rollouts.prompts.next_groups(2)
    for place, sample in enumerate(one for group in groups for one in group):
        sample.tokens, sample.rollout_log_probs = TokenIds([6, 15, 6 + place // 2, 7]), LogProbs([-0.5])
        sample.response_length, sample.weight_versions, sample.status = 1, [str(3 + place // 2)], Status.ABORTED
    sampler._rollouts.prompts.put_back(groups)
    metrics = (await sampler.sample(5)).metrics
    assert [prompt for prompt, *_ in client.requests] == ["1+1", "1+22", "1+22"]
    assert (metrics["rollout/staleness/begun_anew"], metrics["rollout/staleness/max"]) == (2.0, 1.0)
    assert metrics["rollout/staleness/requeued"] == 0.0


async def test_a_group_over_the_bound_is_left_out_for_good(build: Build, tmp_path: Path) -> None:
    sampler, _ = build(OLD, max_staleness=1, stale_samples="evict")
    sampled = await sampler.sample(5)
    assert sampled.shards[0].indices_B.tolist() == [2, 3, 4, 5]
    assert sampled.metrics["rollout/staleness/evicted"] == 2.0
    assert dropped(tmp_path, 5) == [(0, "stale"), (1, "stale")]
    cursor = sampler.cursor()["source"]
    assert (cursor["next"], cursor["returned"]) == (3, [])


async def test_a_group_over_the_bound_is_trained_where_it_is_corrected(build: Build, tmp_path: Path) -> None:
    sampler, _ = build(OLD, max_staleness=1, stale_samples="correct")
    sampled = await sampler.sample(5)
    assert sampled.shards[0].indices_B.tolist() == [0, 1, 2, 3]
    found = {name: value for name, value in sampled.metrics.items() if "staleness" in name}
    assert found == {
        "rollout/staleness/mean": 1.0,
        "rollout/staleness/max": 2.0,
        "rollout/staleness/corrected": 2.0,
    }
    assert dropped(tmp_path, 5) == []


class OwnRollout:
    """Takes two groups, of which the first was sampled by version 3 and the other by version 5."""

    async def fill(self, batch: RolloutBatch) -> dict[str, float]:
        batch.wanted = 2
        groups = batch.prompts.next_groups(2)
        for group, version in zip(groups, ("3", "5"), strict=True):
            for sample in group:
                answer = by(version)[0]
                sample.tokens, sample.response_length = [6, 15, 6, *answer.token_ids], len(answer.token_ids)
                sample.rollout_log_probs, sample.status = list(answer.log_probs), Status.COMPLETED
                sample.weight_versions = list(answer.weight_versions)
                keep(sample, answer.kept)
                sample.reward = float(sample.index or 0)
        await batch.add(groups)
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Any) -> None:
        """It has none."""


@pytest.mark.parametrize(("choice", "returned"), [("requeue", [0]), ("evict", [])])
async def test_the_bound_holds_for_a_rollout_function_of_the_run_too(
    build: Build, tmp_path: Path, choice: str, returned: list[int]
) -> None:
    sampler, _ = build({}, max_staleness=1, stale_samples=choice)
    own = PluginRollouts(RoutedComponent("own", OwnRollout()), live=sampler._rollouts)
    sampler._rollouts = own
    sampled = await sampler.sample(5)
    assert sampled.shards[0].indices_B.tolist() == [2, 3]
    assert sampled.metrics[f"rollout/staleness/{'requeued' if returned else 'evicted'}"] == 2.0
    mark = "requeued" if returned else "stale"
    assert dropped(tmp_path, 5) == [(0, mark), (1, mark)]
    assert sampler.cursor()["source"]["returned"] == returned


async def test_groups_that_are_always_too_old_end_the_run_and_are_named(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_STALE_ROUNDS", 2)
    sampler, _ = build({f"1+{n}": by("1") for n in range(1, 7)}, max_staleness=1, rollout_max_refills=0)
    wanted = (
        "rollout 5: 12 samples were older than max_staleness, and so were those in their place; versions 1 of the "
        "weights sampled them. Do all engines serve the version that was published last? Raise --max-staleness, or "
        "see to it that publications reach every engine."
    )
    with pytest.raises(RunError, match=f"^{re.escape(wanted)}$"):
        await sampler.sample(5)


async def test_a_sampler_that_runs_ahead_reports_it_and_evaluates_concurrently(build: Build) -> None:
    sampler, client = build({f"1+{n}": by("0") for n in range(1, 7)}, async_buffer_size=1)
    sampler.published(0)
    sampled = await sampler.sample(0)
    assert sampled.metrics["rollout/staleness/max"] == 0.0
    assert sampled.metrics["rollout/buffer/in_flight"] + sampled.metrics["rollout/buffer/finished"] == 2.0
    assert (await sampler.evaluate(1))["eval/sums"] == 1.0
    sampler.published(1)
    assert (await sampler.sample(1)).metrics["rollout/staleness/max"] == 1.0
    assert sampler.state().cursor["source"]["next"] == 6
    await sampler.close()
    assert client.closed


async def make_call(sampler: Sampler, call: str) -> None:
    match call:
        case "sample":
            await sampler.sample(1)
        case "evaluate":
            await sampler.evaluate(1)
        case "published":
            sampler.published(1)
        case "state":
            sampler.state()


@pytest.mark.parametrize("call", ["sample", "evaluate", "published", "state"])
async def test_a_failure_ahead_is_the_next_answer_to_the_driver(build: Build, call: str) -> None:
    sampler, client = build({f"1+{n}": by("0") for n in range(1, 7)}, async_buffer_size=1)
    held = asyncio.Event()
    answering = client.generate

    async def refusing(input_ids: list[int], **more: Any) -> list[Generation]:
        if input_ids[-1] == 8:  # 1+3, of the rollout that is ahead
            await held.wait()
            raise RequestRefused("too long")
        return await answering(input_ids, **more)

    client.generate = refusing  # type: ignore[method-assign]
    await sampler.sample(0)
    held.set()
    while sampler._rollouts._failure is None:
        await asyncio.sleep(0)
    with pytest.raises(RequestRefused, match="too long"):
        await make_call(sampler, call)
    await sampler.close()
