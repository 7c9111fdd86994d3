"""Putting a shard's tokens together for an estimator of scope ``token``, and handing its advantages out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_core.errors import RunError
from slime_core.learner import columns
from slime_core.learner.columns import TokenEstimation, response_tokens
from slime_core.learner.micro_batches import MicroBatch, idle_micro_batch, make_micro_batches
from slime_core.modeling.layout import ParallelLayout
from slime_core.plugins.contracts import AdvantageSettings, ResponseTokens, TokenAdvantages
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


def annotated(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
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


def test_idle_micro_batches_change_nothing():
    batch = shard()
    (every,) = make_micro_batches(batch)
    estimator = Estimator()
    estimation(estimator, "log_probs").fill(batch, annotated([*every, idle_micro_batch(every[-1])]))
    assert estimator.seen[0].log_probs_U.tolist() == [-token for token in targets(batch)]


def test_context_parallel_ranks_put_their_tokens_together(monkeypatch):
    # Ranks as threads: each contributes its share of the row, cut in a zigzag.
    batch, layout, found, parts = shard(), ParallelLayout(context=2), {}, {}
    barrier = threading.Barrier(2, timeout=120)

    def all_reduce(values, *, group):
        parts[group] = values.clone()
        barrier.wait()
        values.copy_(parts[0] + parts[1])
        barrier.wait()

    monkeypatch.setattr(columns.dist, "all_reduce", all_reduce)

    def work(rank: int) -> None:
        (every,) = make_micro_batches(batch, layout=layout, context_rank=rank)
        found[rank] = response_tokens(
            batch, annotated(every), reads={"log_probs"}, settings=AdvantageSettings(), context_group=rank
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert found[rank].log_probs_U.tolist() == [-token for token in targets(batch)]


def test_a_sum_over_shards_is_a_new_tensor_without_gradient():
    class OneRank:
        def size(self) -> int:
            return 1

    value = torch.ones(2, requires_grad=True)
    total = columns.DataParallelSums(OneRank()).sum(value)
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


def fill_with(estimator: object) -> None:
    batch = shard()
    estimation(estimator).fill(batch, make_micro_batches(batch)[0])


def test_masked_tokens_may_get_anything():
    fill_with(Estimator(lambda values_U: values_U.index_fill(0, torch.tensor([1, 5]), math.nan)))


def test_a_trained_token_without_a_finite_advantage_is_refused():
    message = (
        r"advantage estimator 'mine' of X returned NaN or infinity for 2 of 6 trained tokens; accepted: finite "
        r"numbers\. Look at the rewards of this rollout, or choose another estimator with --advantage-estimator\."
    )
    with pytest.raises(RunError, match=message):
        fill_with(Estimator(lambda values_U: values_U.index_fill(0, torch.tensor([0, 2]), math.inf)))


def test_another_number_of_advantages_than_tokens_is_refused():
    message = r"'mine' of X returned advantages_U of shape \(4,\) for 9 response tokens; accepted: one number a token"
    with pytest.raises(RunError, match=message):
        fill_with(Estimator(lambda values_U: values_U[:4]))


def test_a_metric_needs_one_number_a_token():
    class Measures:
        def estimate(self, batch: ResponseTokens, reduce: object) -> TokenAdvantages:
            return TokenAdvantages(torch.zeros(COUNT), metrics_U={"mean": torch.zeros(())})

    with pytest.raises(RunError, match=r"returned metrics_U\['mean'\] of shape \(\) for 9 response tokens"):
        fill_with(Measures())


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (None, "NoneType; .*TokenAdvantages"),
        (TokenAdvantages([0.0] * 9), "advantages_U .*list .* 9 "),
        (TokenAdvantages(torch.zeros(9), metrics_U=None), "metrics_U .*NoneType; .*dict"),
    ],
)
def test_an_estimator_that_returns_something_else_is_named(returned, names):
    class Returns:
        def estimate(self, batch: ResponseTokens, reduce: object) -> TokenAdvantages:
            return returned

    with pytest.raises(RunError, match=f"'mine' of X .*{names}"):
        fill_with(Returns())


def test_an_estimator_that_fails_is_named():
    class Fails:
        def estimate(self, batch: ResponseTokens, reduce: object) -> TokenAdvantages:
            raise KeyError("x")

    with pytest.raises(RunError, match=r"'mine' of X: .*KeyError: 'x'"):
        fill_with(Fails())


def test_advantages_of_the_sampler_are_used_unchanged():
    batch = replace(shard(), columns_B={"advantages": np.arange(4, dtype=np.float32)})
    ((micro,),) = make_micro_batches(batch)
    assert micro.advantages_U.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, 2]


# --- Whitening what was estimated, by the sampler or here -------------------------------------------------------------


class Ranks:
    """Sums over ranks that are threads, as :class:`OverShards` takes them over processes."""

    def __init__(self, count: int) -> None:
        self.barrier, self.parts = threading.Barrier(count, timeout=120), {}

    def of(self, rank: int):
        outer = self

        class Reduce:
            def sum(self, values: torch.Tensor) -> torch.Tensor:
                outer.parts[rank] = values
                outer.barrier.wait()
                total = sum(outer.parts[key] for key in sorted(outer.parts))
                outer.barrier.wait()
                return total

        return Reduce()


def normalized(*ranks: list[MicroBatch]) -> None:
    """Whiten the micro-batches of every rank, all ranks at once."""
    over = Ranks(len(ranks))
    threads = [
        threading.Thread(target=columns.whiten_advantages, args=(every, over.of(rank)))
        for rank, every in enumerate(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_place(micro_batches: Sequence[MicroBatch]) -> dict[int, float]:
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


@pytest.mark.parametrize("packing", [((0, 1), (2, 3)), ((3, 2), (1, 0)), ((2,), (0,), (1, 3))])
def test_packing_and_order_do_not_change_whitened_advantages(packing):
    (whole,) = make_micro_batches(sampled())
    (other,) = make_micro_batches(replace(sampled(), steps=(StepPlan(packing),)))
    normalized(whole)
    normalized([*other, idle_micro_batch(other[-1])])
    assert by_place(other) == pytest.approx(by_place(whole), abs=1e-6)


def test_steps_of_a_rollout_are_whitened_together():
    (whole,), steps = (
        make_micro_batches(sampled()),
        make_micro_batches(replace(sampled(), steps=(StepPlan(((0, 1),)), StepPlan(((2, 3),))))),
    )
    normalized(whole)
    normalized([micro for step in steps for micro in step])
    assert by_place([micro for step in steps for micro in step]) == pytest.approx(by_place(whole), abs=1e-6)


def test_ranks_are_whitened_together():
    (whole,), (first, second) = (
        make_micro_batches(sampled()),
        make_micro_batches(replace(sampled(), steps=(StepPlan(((0,),)), StepPlan(((1, 2, 3),))))),
    )
    normalized(whole)
    normalized(first, second)
    assert by_place([*first, *second]) == pytest.approx(by_place(whole), abs=1e-6)


def test_context_parallel_ranks_are_whitened_together():
    layout = ParallelLayout(context=2)
    (whole,), ranks = (
        make_micro_batches(sampled()),
        [make_micro_batches(sampled(), layout=layout, context_rank=rank)[0] for rank in range(2)],
    )
    normalized(whole)
    normalized(*ranks)
    assert by_place([*ranks[0], *ranks[1]]) == pytest.approx(by_place(whole), abs=1e-6)


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


def judged(packing: str) -> tuple[TrainBatch, list[MicroBatch]]:
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


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_critic_learns_the_returns_that_a_plugin_left(packing):
    batch, every = judged(packing)
    estimate = estimation(Judge(), "values")
    estimate.fill(batch, every)
    before_U = estimate.returns_of(every, count=len(batch.loss_mask_U))
    for micro in every:
        micro.returns_U = micro.returns_U * 10
    found_U = estimate.returns_of([*every, idle_micro_batch(every[0])], count=len(batch.loss_mask_U))
    assert torch.equal(found_U, before_U * 10)


def test_returns_that_a_plugin_made_nan_are_refused():
    batch, every = judged("one row")
    estimate = estimation(Judge(), "values")
    estimate.fill(batch, every)
    every[0].returns_U[0] = math.nan
    with pytest.raises(RunError, match=r"returns_U: slime_before_training .* 1 of 6 "):
        estimate.returns_of(every, count=len(batch.loss_mask_U))


def test_without_a_critic_there_are_neither_values_nor_returns():
    batch, every = judged("one row")
    estimator = Estimator()
    estimation(estimator).fill(batch, every)
    assert estimator.seen[0].values_U is None
    assert every[0].returns_U is None


@pytest.mark.parametrize(("more", "mistake"), [(None, "no returns_U "), (math.nan, " NaN .* 6 of 6 trained")])
def test_returns_that_a_critic_cannot_learn_are_refused(more, mistake):
    batch, every = judged("one row")
    with pytest.raises(RunError, match=f"advantage estimator 'mine' of X .*{mistake}"):
        estimation(Judge(more), "values").fill(batch, every)
