"""The parity gate between the real learner and the real engine: what passes, and mistakes that must end the run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_core.errors import ParityError
from slime_core.generation import SamplingParams, keep
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import LogProbs, Sample, Status, TokenIds, TrainBatch
from slime_core.weights.engine_control import EngineControl
from tests.engines.learners import Learners, Make, settings, weights_of

PROMPTS = [[3, 5 + i, 6 + i, 15, 12 - i, 7 + i, 4] for i in range(6)]
"""Two-digit additions in the chat template of the embedded model."""

SAMPLES_A_PROMPT = 8
ALL_TOKENS = len(PROMPTS) * SAMPLES_A_PROMPT * 12
HALF_CUT: dict[str, Any] = {"top_p": 0.9, "top_k": 4}


@dataclass(frozen=True)
class Rollout:
    """Shards by rank, and the version that is published before they are trained; None: none."""

    shards: Sequence[TrainBatch]
    published: int | None = 0


@dataclass(frozen=True)
class Outcome:
    """Metrics of the rollouts that were trained, the parity error that ended them, and whether the weights moved in the
    rollout that it ended."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None
    moved: bool | None = None


Learn = Callable[..., list[Outcome]]


@pytest.fixture(scope="module")
def learn(engine: Any, learners: Learners) -> Learn:
    """Trains rollouts, by default with the built-in model; returns the report of every rank."""

    def run(*rollouts: Rollout, lr: float = 0.0, folder: Path = engine.model, **layout: Any) -> list[Outcome]:
        def train(make: Make) -> Outcome:
            learner, metrics = make(settings(lr=lr), folder, **layout), []
            for rollout in rollouts:
                if rollout.published is not None:
                    learner.parity.published(rollout.published)
                before = weights_of(learner)
                try:
                    metrics.append(learner.train(rollout.shards[make.rank]))
                except ParityError as error:
                    after = weights_of(learner)
                    return Outcome(metrics, str(error), any(not torch.equal(before[key], after[key]) for key in after))
            return Outcome(metrics)

        return learners(train, ranks=len(rollouts[0].shards), num_learners=1)

    return run


@pytest.fixture(autouse=True)
def version_0(control: EngineControl) -> Iterator[None]:
    """As after the first publication of a run."""
    control.set_version("0")
    yield
    control.set_version("default")


async def sampled(client: GenerateClient, *, ranks: int = 1, temperature: float = 0.7, **cut: Any) -> list[TrainBatch]:
    """One rollout of the engine as shards."""
    sampling = SamplingParams(temperature=temperature, max_new_tokens=12, ignore_eos=True, **cut)
    samples: list[Sample] = []
    for prompt in PROMPTS:
        for answer in await client.generate(prompt, sampling=sampling, n=SAMPLES_A_PROMPT):
            sample = Sample(
                index=len(samples),
                tokens=TokenIds([*prompt, *answer.token_ids]),
                response_length=len(answer.token_ids),
                rollout_log_probs=LogProbs(answer.log_probs),
                weight_versions=list(answer.weight_versions),
                status=Status.COMPLETED,
            )
            keep(sample, answer.kept)
            samples.append(sample)
    advantages_B = np.tile(np.array([1, -1], np.float32), len(samples) // 2)
    plan = BatchPlan(num_ranks=ranks, max_tokens=256)
    return make_shards(samples, advantages_B, plan, rollout=0, temperature=temperature, cuts=bool(cut))


async def test_learner_and_engine_agree_for_every_kind_of_sampling(client: GenerateClient, learn: Learn) -> None:
    distributions: list[Any] = [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"temperature": 2.0, **HALF_CUT},
    ]
    (outcome,) = learn(*[Rollout(await sampled(client, **distribution)) for distribution in distributions])
    assert outcome.error is None
    assert [metrics["parity/tokens"] for metrics in outcome.metrics] == [ALL_TOKENS] * 4
    assert all(0 < metrics["parity/mean"] < 1e-5 for metrics in outcome.metrics)
    assert all(metrics["parity/max"] < 1e-3 for metrics in outcome.metrics)


def ignores_the_cut(shard: TrainBatch) -> TrainBatch:
    return replace(shard, kept_counts_U=None, kept_ids_S=None)


def ignores_the_temperature(shard: TrainBatch) -> TrainBatch:
    return replace(shard, temperature=1.0)


def encodes_the_prompt_again(shard: TrainBatch) -> TrainBatch:
    """The end of the chat template gets another id; the responses stay."""
    starts_B = np.cumsum(shard.lengths_B) - shard.lengths_B
    tokens_T = shard.tokens_T.copy()
    tokens_T[starts_B + shard.lengths_B - shard.response_lengths_B - 1] = 3
    return replace(shard, tokens_T=tokens_T)


@pytest.mark.parametrize(
    ("mistake", "sampling"),
    [
        (ignores_the_cut, {"temperature": 2.0, **HALF_CUT}),
        (ignores_the_temperature, {}),
        (encodes_the_prompt_again, {}),
    ],
)
async def test_a_learner_that_computes_something_else_trains_nothing(
    client: GenerateClient, learn: Learn, mistake: Callable[[TrainBatch], TrainBatch], sampling: Any
) -> None:
    (shard,) = await sampled(client, **sampling)
    (outcome,) = learn(Rollout([mistake(shard)]), lr=1e-3)
    assert (outcome.metrics, outcome.moved) == ([], False)
    assert re.search(f"^rollout 0: .* {ALL_TOKENS} ", str(outcome.error))


async def test_a_rotary_embedding_with_another_base_is_noticed(
    client: GenerateClient, learn: Learn, engine: Any, tmp_path: Path
) -> None:
    other = shutil.copytree(engine.model, tmp_path / "model")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 1e5}))
    (outcome,) = learn(Rollout(await sampled(client)), folder=other)
    assert outcome.error is not None


async def test_an_engine_that_missed_a_publication_ends_the_run_at_the_next_rollout(
    client: GenerateClient, learn: Learn, control: EngineControl
) -> None:
    first = Rollout(await sampled(client), published=0)
    control.set_version("1")  # announced, but no weight is sent
    second = Rollout([replace(shard, rollout=1) for shard in await sampled(client)], published=1)
    (outcome,) = learn(first, second, lr=1e-3)
    assert (len(outcome.metrics), outcome.moved) == (1, False)
    assert str(outcome.error).startswith("rollout 1: ")


async def test_stale_tokens_are_not_compared(client: GenerateClient, learn: Learn) -> None:
    shards = await sampled(client)
    unpublished = Rollout([replace(shard, rollout=1) for shard in shards], published=None)
    newer = Rollout([replace(shard, rollout=2) for shard in shards], published=2)
    (outcome,) = learn(Rollout(shards), unpublished, newer, lr=1e-3)
    assert outcome.error is None
    assert [metrics["parity/tokens"] for metrics in outcome.metrics] == [ALL_TOKENS, 0, 0]
    assert outcome.metrics[2]["train/train_rollout_logprob_abs_diff"] > 1e-4  # they would not have passed


async def test_one_token_of_one_rank_ends_all_ranks(client: GenerateClient, learn: Learn) -> None:
    whole = Rollout(await sampled(client, ranks=2))
    passed = learn(whole)
    assert [rank.error for rank in passed] == [None, None]
    assert passed[0].metrics == passed[1].metrics
    assert passed[0].metrics[0]["parity/tokens"] == ALL_TOKENS
    spoilt = whole.shards[1].rollout_log_probs_U.copy()
    spoilt[5] -= 2e-2
    outcomes = learn(Rollout([whole.shards[0], replace(whole.shards[1], rollout_log_probs_U=spoilt)]), lr=1e-3)
    assert outcomes[0].error == outcomes[1].error
    (largest,) = re.findall(r"and (\S+) at most;", str(outcomes[0].error))
    assert float(largest) == pytest.approx(2e-2, abs=1e-3)  # rounding comes on top, 8e-5 at most where it was measured
    assert [rank.moved for rank in outcomes] == [False, False]


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
async def test_ranks_that_share_a_model_count_each_token_once(client: GenerateClient, learn: Learn, axis: str) -> None:
    (shard,) = await sampled(client, **HALF_CUT)
    first, second = learn(Rollout([shard, shard]), **{axis: 2})
    assert (first.error, second.error) == (None, None)
    assert first.metrics == second.metrics
    assert first.metrics[0]["parity/tokens"] == ALL_TOKENS
    assert 0 < first.metrics[0]["parity/mean"] < 1e-5
