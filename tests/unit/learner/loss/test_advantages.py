"""Putting a shard's tokens together for an estimator of scope ``token``, and handing its advantages out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime_core.contracts import AdvantageSettings, ResponseTokens, TokenAdvantages
from slime_core.errors import RunError
from slime_core.learner import advantages
from slime_core.learner.advantages import TokenEstimation, response_tokens
from slime_core.learner.micro_batches import PackedMicroBatch, idle_micro_batch, make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.types import StepPlan, TrainBatch

LENGTHS, RESPONSES = np.array([5, 3, 9, 4]), np.array([2, 1, 6, 0])
COUNT = int(RESPONSES.sum())


def shard(*plans: tuple[tuple[int, ...], ...]) -> TrainBatch:
    """Four samples; the engine's log-probability of response token n is -n, and token n is n + 1."""
    return TrainBatch(
        rollout=0,
        tokens_T=np.arange(1, LENGTHS.sum() + 1),
        lengths_B=LENGTHS,
        response_lengths_B=RESPONSES,
        loss_mask_U=np.array([1, 0, 1, 1, 1, 0, 0, 1, 1], np.float32),
        loss_weights_B=np.full(4, 0.25, np.float32),
        rollout_log_probs_U=-np.arange(COUNT, dtype=np.float32),
        columns_B={"rewards": np.array([1, 2, 4, 8], np.float32)},
        steps=tuple(StepPlan(plan) for plan in plans or (((0, 1, 2, 3),),)),
        indices_B=np.arange(4),
    )


class Estimator:
    """Remembers its batch; a token's advantage is 100 more than its place in the shard."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda values_U: values_U) -> None:
        self._change, self.seen = change, []

    def estimate(self, batch: ResponseTokens, reduce: object) -> TokenAdvantages:
        self.seen.append(batch)
        places_U = torch.arange(len(batch.mask_U), dtype=torch.float64)
        return TokenAdvantages(self._change(places_U + 100), metrics_U={"place": places_U})


def estimation(estimator: object, *reads: str) -> TokenEstimation:
    return TokenEstimation(
        estimator, label="advantage estimator 'mine' of X", reads=set(reads), settings=SETTINGS, reduce=None
    )


SETTINGS = AdvantageSettings(gamma=0.5, kl_coef=0.1)


def annotated(micro_batches: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
    """The actor's log-probability of a response token is minus the token, the reference's twice that."""
    for micro in micro_batches:
        micro.old_log_probs_U = -micro.targets_U.float()
        micro.ref_log_probs_U = -2 * micro.targets_U.float()
    return list(micro_batches)


def targets(batch: TrainBatch) -> list[int]:
    """The response tokens in the order of the shard."""
    ends = np.cumsum(batch.lengths_B)
    return [
        int(token)
        for end, count in zip(ends, batch.response_lengths_B, strict=True)
        for token in batch.tokens_T[end - count : end]
    ]


PACKINGS = {
    "one row": (((0, 1, 2, 3),),),
    "other order": (((3, 1), (2, 0)),),
    "two steps": (((2,),), ((1, 0), (3,))),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_an_estimator_sees_every_response_whole_and_in_the_order_of_the_shard(packing):
    batch = shard(*PACKINGS[packing])
    every = annotated([micro for step in make_micro_batches(batch) for micro in step])
    estimator = Estimator()
    estimation(estimator, "log_probs", "ref_log_probs", "rollout_log_probs").fill(batch, every)
    (seen,) = estimator.seen
    assert seen.lengths_B.tolist() == [2, 1, 6, 0]
    assert seen.samples_U.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, 2]
    assert seen.mask_U.tolist() == [1, 0, 1, 1, 1, 0, 0, 1, 1]
    assert seen.rewards_B.tolist() == [1, 2, 4, 8]
    assert seen.log_probs_U.tolist() == [-token for token in targets(batch)]
    assert seen.ref_log_probs_U.tolist() == [-2 * token for token in targets(batch)]
    assert seen.rollout_log_probs_U.tolist() == [-place for place in range(COUNT)]
    assert seen.settings == SETTINGS


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_micro_batch_gets_the_advantages_of_its_tokens(packing):
    batch = shard(*PACKINGS[packing])
    every = [micro for step in make_micro_batches(batch) for micro in step]
    assert all(bool(micro.advantages_U.isnan().all()) for micro in every)
    estimation(Estimator()).fill(batch, every)
    for micro in every:
        places_U = -micro.rollout_log_probs_U
        assert torch.equal(micro.advantages_U, (places_U + 100) * (micro.mask_U != 0))
        assert torch.equal(micro.metrics_U["place"], places_U)


def test_only_columns_that_are_read_are_filled():
    batch = shard()
    (every,) = make_micro_batches(batch)
    estimator = Estimator()
    estimation(estimator).fill(batch, every)
    (seen,) = estimator.seen
    assert (seen.log_probs_U, seen.ref_log_probs_U, seen.rollout_log_probs_U, seen.values_U) == (None,) * 4
    assert every[0].returns_U is None


def at_once(work: Callable[..., object], *arguments: tuple[object, ...]) -> None:
    """Call ``work`` in a thread for each rank."""
    threads = [threading.Thread(target=work, args=of_rank) for of_rank in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_context_parallel_ranks_put_their_tokens_together(monkeypatch):
    batch, layout, seen, parts = shard(), ParallelLayout(context=2), {}, {}
    barrier = threading.Barrier(2, timeout=120)

    def all_reduce(values, *, group):
        parts[group] = values.clone()
        barrier.wait()
        values.copy_(parts[0] + parts[1])
        barrier.wait()

    def work(rank: int) -> None:
        (every,) = make_micro_batches(batch, layout=layout, context_rank=rank)
        seen[rank] = response_tokens(
            batch, annotated(every), reads={"log_probs"}, settings=AdvantageSettings(), context_group=rank
        )

    monkeypatch.setattr(advantages.dist, "all_reduce", all_reduce)
    at_once(work, (0,), (1,))
    for rank in range(2):
        assert seen[rank].log_probs_U.tolist() == [-token for token in targets(batch)]


def test_a_sum_over_shards_is_a_new_tensor_without_gradient():
    value = torch.ones(2, requires_grad=True)
    total = advantages.DataParallelSums(SimpleNamespace(size=lambda: 1)).sum(value)
    assert (total.tolist(), total.requires_grad, total.data_ptr() == value.data_ptr()) == ([1, 1], False, False)


def test_an_estimator_cannot_change_the_shard_or_the_mask_that_the_core_applies():
    batch = shard()
    (every,) = make_micro_batches(batch)
    before = batch.loss_mask_U.copy()

    class Changes:
        def estimate(self, given: ResponseTokens, reduce: object) -> TokenAdvantages:
            given.mask_U.fill_(1)
            given.rewards_B.fill_(0)
            return TokenAdvantages(torch.ones(COUNT))

    estimation(Changes()).fill(batch, every)
    assert np.array_equal(batch.loss_mask_U, before)
    assert batch.columns_B["rewards"].tolist() == [1, 2, 4, 8]
    assert every[0].advantages_U.tolist() == before.tolist()


# --- What is refused --------------------------------------------------------------------------------------------------


def returns(output: object) -> SimpleNamespace:
    return SimpleNamespace(estimate=lambda batch, reduce: output)


@pytest.mark.parametrize(
    ("estimator", "names"),
    [
        (Estimator(lambda values_U: values_U.index_fill(0, torch.tensor([0, 2]), math.inf)), "infinity for 2 of 6 "),
        (Estimator(lambda values_U: values_U[:4]), r"advantages_U of shape \(4,\) for 9 "),
        (
            returns(TokenAdvantages(torch.zeros(COUNT), metrics_U={"mean": torch.zeros(())})),
            r"\['mean'\] of shape \(\) for 9 ",
        ),
        (returns(None), "NoneType; .*TokenAdvantages"),
        (returns(TokenAdvantages([0.0] * 9)), "advantages_U .*list .* 9 "),
        (returns(TokenAdvantages(torch.zeros(9), metrics_U=None)), "metrics_U .*NoneType; .*dict"),
        (Estimator(lambda values_U: 1 / 0), "ZeroDivisionError"),
    ],
)
def test_an_estimator_that_breaks_its_contract_is_named(estimator, names):
    batch = shard()
    with pytest.raises(RunError, match=f"advantage estimator 'mine' of X.*{names}"):
        estimation(estimator).fill(batch, make_micro_batches(batch)[0])


def test_masked_tokens_may_get_anything():
    batch = shard()
    holed = Estimator(lambda values_U: values_U.index_fill(0, torch.tensor([1, 5]), math.nan))
    estimation(holed).fill(batch, make_micro_batches(batch)[0])


# --- Whitening what was estimated, by the sampler or here -------------------------------------------------------------


def normalized(*ranks: list[PackedMicroBatch]) -> None:
    """Whiten the micro-batches of every rank, all ranks at once."""
    barrier, parts = threading.Barrier(len(ranks), timeout=120), {}

    def work(rank: int, every: list[PackedMicroBatch]) -> None:
        def total(values: torch.Tensor) -> torch.Tensor:
            parts[rank] = values
            barrier.wait()
            found = sum(parts[key] for key in sorted(parts))
            barrier.wait()
            return found

        advantages.whiten_advantages(every, SimpleNamespace(sum=total))

    at_once(work, *enumerate(ranks))


def by_place(micro_batches: Sequence[PackedMicroBatch]) -> dict[int, float]:
    pairs = ((micro.places_U.tolist(), micro.advantages_U.tolist()) for micro in micro_batches)
    return {place: value for places, values in pairs for place, value in zip(places, values, strict=True)}


def sampled() -> TrainBatch:
    """Advantages of the sampler, one a sample: 1, 2, 4 and 8."""
    batch = shard()
    return replace(batch, columns_B={"advantages": batch.columns_B["rewards"]})


def test_advantages_of_the_sampler_are_whitened_over_trained_tokens():
    (every,) = make_micro_batches(sampled())
    normalized(every)
    mask_U = sampled().loss_mask_U
    raw_U = np.repeat([1.0, 2.0, 4.0, 8.0], RESPONSES)
    known = raw_U[mask_U != 0]
    wanted_U = np.where(mask_U != 0, (raw_U - known.mean()) / known.std(), 0.0)
    found = by_place(every)
    assert [found[place] for place in range(COUNT)] == pytest.approx(wanted_U.tolist(), abs=1e-6)


def planned(*plans: tuple[tuple[int, ...], ...]) -> list[list[PackedMicroBatch]]:
    return make_micro_batches(replace(sampled(), steps=tuple(StepPlan(plan) for plan in plans)))


def of_context_ranks() -> list[list[PackedMicroBatch]]:
    layout = ParallelLayout(context=2)
    return [make_micro_batches(sampled(), layout=layout, context_rank=rank)[0] for rank in range(2)]


@pytest.mark.parametrize(
    "ranks",
    [
        planned(((0, 1), (2, 3))),
        planned(((3, 2), (1, 0))),
        [[*micros, idle_micro_batch(micros[-1])] for micros in planned(((2,), (0,), (1, 3)))],
        [[micro for step in planned(((0, 1),), ((2, 3),)) for micro in step]],
        planned(((0,),), ((1, 2, 3),)),
        of_context_ranks(),
    ],
    ids=["two rows", "other order", "three rows and an idle one", "two steps", "two ranks", "context ranks"],
)
def test_packing_steps_and_ranks_do_not_change_whitened_advantages(ranks):
    (together,) = make_micro_batches(sampled())
    normalized(together)
    normalized(*ranks)
    assert by_place([micro for rank in ranks for micro in rank if micro.scale]) == pytest.approx(
        by_place(together), abs=1e-6
    )


def test_advantages_of_an_estimator_of_scope_token_are_whitened_too():
    batch = shard()
    (every,) = make_micro_batches(batch)
    estimation(Estimator(), "rewards").fill(batch, every)
    normalized(every)
    places_U = np.flatnonzero(batch.loss_mask_U) + 100.0
    found = by_place(every)
    wanted = ((places_U - places_U.mean()) / places_U.std()).tolist()
    assert [found[place] for place in np.flatnonzero(batch.loss_mask_U)] == pytest.approx(wanted, abs=1e-5)


# --- Where a critic is ------------------------------------------------------------------------------------------------


class Judge:
    """Remembers the values; a token's return is its value plus ``more``."""

    def __init__(self, more: float | None = 1.0) -> None:
        self._more, self.seen = more, []

    def estimate(self, batch: ResponseTokens, reduce: object) -> TokenAdvantages:
        self.seen.append(batch.values_U)
        returns_U = None if self._more is None else batch.values_U + self._more
        return TokenAdvantages(torch.zeros(len(batch.mask_U)), returns_U=returns_U)


def judged(packing: str) -> tuple[TrainBatch, list[PackedMicroBatch]]:
    """The value of a response token is half the token."""
    batch = shard(*PACKINGS[packing])
    every = [micro for step in make_micro_batches(batch) for micro in step]
    for micro in every:
        micro.values_U = micro.targets_U.float() / 2
    return batch, every


@pytest.mark.parametrize("packing", PACKINGS)
def test_values_come_in_the_order_of_the_shard_and_returns_go_to_their_tokens(packing):
    batch, every = judged(packing)
    judge = Judge()
    estimation(judge, "values").fill(batch, every)
    assert judge.seen[0].tolist() == [token / 2 for token in targets(batch)]
    for micro in every:
        expected_U = (micro.targets_U / 2 + 1).where(micro.mask_U != 0, 0.0)
        assert torch.equal(micro.returns_U, expected_U)


def test_the_critic_learns_the_returns_that_a_plugin_left():
    batch, every = judged("one row")
    estimate = estimation(Judge(), "values")
    estimate.fill(batch, every)
    before_U = estimate.returns_of(every, count=COUNT)
    for micro in every:
        micro.returns_U = micro.returns_U * 10
    found_U = estimate.returns_of([*every, idle_micro_batch(every[0])], count=COUNT)
    assert torch.equal(found_U, before_U * 10)
    every[0].returns_U[0] = math.nan
    with pytest.raises(RunError, match=r"returns_U: .* 1 of 6 "):
        estimate.returns_of(every, count=COUNT)


@pytest.mark.parametrize(("more", "mistake"), [(None, "no returns_U "), (math.nan, " NaN .* 6 of 6 trained")])
def test_returns_that_a_critic_cannot_learn_are_refused(more, mistake):
    batch, every = judged("one row")
    with pytest.raises(RunError, match=f"advantage estimator 'mine' of X .*{mistake}"):
        estimation(Judge(more), "values").fill(batch, every)
