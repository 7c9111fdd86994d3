from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig, WeightsConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import ComparedToken, ParityError
from slime_core.learner import LearnerSettings
from slime_core.learner.handle import ParityDrift
from slime_core.learner.micro_batches import PackedMicroBatch, make_micro_batches
from slime_core.learner.objective import Objective, compare, reduce_metrics
from slime_core.learner.parity import BFLOAT16, FLOAT32, MIXTURE, STRICT, ParityGate
from slime_core.learner.rank import save_train_data
from slime_core.types import StepPlan, TrainBatch


def shard(*, rollout: int = 0, versions: tuple[int, ...] | None = (0, 0, 0), plan=((2, 0), (1,))) -> TrainBatch:
    """Three samples of 2, 1 and 2 response tokens, the second of which is masked in the first sample."""
    return TrainBatch(
        rollout=rollout,
        tokens_T=np.arange(8),
        lengths_B=np.array([3, 2, 3]),
        response_lengths_B=np.array([2, 1, 2]),
        loss_mask_U=np.array([1, 0, 1, 1, 1], np.float32),
        loss_weights_B=np.array([1 / 3, 1 / 3, 1 / 6], np.float32),
        rollout_log_probs_U=np.array([-1, -2, -3, -4, -5], np.float32),
        columns_B={"advantages": np.zeros(3, np.float32)},
        steps=(StepPlan(plan),),
        indices_B=np.arange(3),
        temperature=0.7,
        weight_version_B=None if versions is None else np.array(versions),
    )


def gate(
    *, bf16: bool = False, mixture: bool = False, strict: bool = False, published: int | None = 0, **weights
) -> ParityGate:
    found = ParityGate(WeightsConfig(**weights), bf16=bf16, mixture=mixture, strict=strict)
    if published is not None:
        found.published(published)
    return found


def marked(found: ParityGate, batch: TrainBatch) -> list[PackedMicroBatch]:
    (micro_batches,) = make_micro_batches(batch)
    found.mark(batch, micro_batches)
    return micro_batches


def fresh(found: ParityGate, batch: TrainBatch) -> list[list[bool]] | None:
    """Freshness of each micro-batch's tokens; None: the rollout is not due. The actor then has its step."""
    micro_batches = marked(found, batch)
    found.check({}, rollout=batch.rollout, temperature=1.0)
    if micro_batches[0].fresh_U is None:
        return None
    return [micro.fresh_U.tolist() for micro in micro_batches]


def found_by(tokens: float, total: float, largest: float, *, beyond: float = 0.0) -> dict[str, float]:
    """Metrics of a step, as they come out of the sum over ranks.

    Arguments:
        beyond: tokens that reach the bound of one token.
    """
    measured = {"parity_tokens": tokens, "parity_sum": total, "parity_beyond": beyond, "parity_largest": largest}
    return {"loss": 0.5, **measured}


# --- Which tokens, and when -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "versions", "expected"),
    [
        ({"published": 3}, (3, 3, 2), [[False, False, True, True], [True]]),
        ({"published": 3}, (3, 2, 3), [[True] * 4, [False]]),
        ({"published": 3}, (2, 4, -1), [[False] * 4, [False]]),
        ({"published": 3}, None, [[False] * 4, [False]]),
        ({"published": 3, "strict": True}, (3, 3, 3), [[True] * 4, [True]]),
        ({"published": None}, (0, 0, 0), None),  # without engines
    ],
)
def test_tokens_of_the_published_weights_are_fresh(settings, versions, expected):
    assert fresh(gate(**settings), shard(versions=versions)) == expected


def test_tokens_follow_their_samples_where_the_plan_was_cut_further():
    """The plan counts on shared prefixes, which the model cannot take: [2, 0] becomes two rows, before that of [1]."""
    batch = replace(shard(versions=(3, 2, 2)), prefix_order_B=np.arange(3), prefix_lengths_B=np.zeros(3, np.int64))
    found = gate(published=3)
    (micro_batches,) = make_micro_batches(batch, max_tokens=4)
    found.mark(batch, micro_batches)
    assert [micro.members for micro in micro_batches] == [(0,), (2,), (1,)]
    assert [micro.fresh_U.tolist() for micro in micro_batches] == [[True, True], [False, False], [False]]


def test_once_the_learner_has_moved_no_token_is_fresh_until_the_next_publication():
    found = gate(published=0)
    found.weights_changed()
    assert fresh(found, shard(rollout=1)) == [[False] * 4, [False]]
    found.published(2)
    assert fresh(found, shard(rollout=2, versions=(2, 0, 2))) == [[True] * 4, [False]]


@pytest.mark.parametrize(
    ("interval", "first", "due"), [(1, 0, [0, 1, 2, 3]), (2, 0, [0, 2]), (2, 5, [5, 6, 8]), (0, 0, [])]
)
def test_every_nth_rollout_is_due_and_the_first_one_of_a_process(interval, first, due):
    found = gate(parity_interval=interval)
    rollouts = range(first, first + 4)
    assert [rollout for rollout in rollouts if fresh(found, shard(rollout=rollout)) is not None] == due


def test_a_rollout_without_a_step_of_the_actor_leaves_the_first_comparison_to_the_next_one():
    found = gate(parity_interval=100)
    assert marked(found, shard(rollout=1))[0].fresh_U is not None  # only the critic learns: no parity check
    assert fresh(found, shard(rollout=2)) is not None
    assert fresh(found, shard(rollout=3)) is None


# --- What is measured -------------------------------------------------------------------------------------------------


def sums(versions: tuple[int, ...], log_probs: list[list[float]]) -> list[tuple[float, float, float]]:
    """Tokens, sum and largest of every micro-batch through the loss."""
    objective, found = Objective(Clipped(), AlgorithmConfig()), []
    for micro, row in zip(marked(gate(), shard(versions=versions)), log_probs, strict=True):
        _, measured = objective(torch.tensor(row, requires_grad=True), torch.zeros(len(row)), micro)
        values = [measured.sums["parity_tokens"], measured.sums["parity_sum"], measured.largest["parity_largest"]]
        found.append(tuple(value.item() for value in values))
    return found


def test_fresh_unmasked_tokens_count_the_same_whatever_their_weight():
    # Engine: [-4, -5, -1, (masked) -2] and [-3]; differences 0.5, 0, 0.25, (99) and 1.
    found = sums((0, 0, 0), [[-4.5, -5.0, -0.75, -101.0], [-2.0]])
    assert found == [(3.0, 0.75, 0.5), (1.0, 1.0, 1.0)]


def test_tokens_that_are_not_fresh_do_not_count_even_where_they_are_no_numbers():
    assert sums((0, 1, 1), [[9.0, float("nan"), -1.5, -2.0], [7.0]]) == [(1.0, 0.5, 0.5), (0.0, 0.0, 0.0)]


# --- What follows from it ---------------------------------------------------------------------------------------------


def test_below_both_bounds_the_mean_the_largest_and_the_count_are_reported_once():
    checked, metrics = gate(), found_by(200, 0.01, 9.9e-4)
    checked.check(metrics, rollout=0, temperature=1.0)
    assert metrics == {"loss": 0.5}
    assert checked.report() == {"parity/tokens": 200, "parity/mean": 5e-5, "parity/max": 9.9e-4, "parity/beyond": 0}
    assert checked.report() == {}
    checked.check(found_by(0, 0.0, 0.0), rollout=0, temperature=1.0)
    assert checked.report() == {"parity/tokens": 0}


@pytest.mark.parametrize(
    ("settings", "bound"),
    [({}, FLOAT32.largest), ({"bf16": True}, BFLOAT16.largest), ({"bf16": True, "parity_max_tolerance": 0.3}, 0.3)],
)
def test_differences_that_reach_the_bound_are_counted(settings, bound):
    micro = marked(gate(**settings), shard())[0]
    micro.mask_U = micro.mask_U * torch.tensor([1.0, 0.0, 1.0, 1.0])  # the second and the last do not count
    sums, largest = compare(torch.tensor([bound, 9 * bound, 0.98 * bound, 99.0]), micro)
    assert sums["parity_beyond"].item() == 1
    assert sums["parity_tokens"].item() == 2
    assert sums["parity_sum"].item() == pytest.approx(1.98 * bound)
    assert largest["parity_largest"].item() == pytest.approx(bound)
    assert compare(torch.ones(4), marked(gate(parity_interval=0), shard())[0]) == ({}, {})


@pytest.mark.parametrize(
    ("settings", "mean"),
    [
        ({}, FLOAT32.mean),
        ({"bf16": True}, BFLOAT16.mean),
        ({"mixture": True}, MIXTURE.mean),
        ({"strict": True}, STRICT.mean),
        ({"parity_mean_tolerance": 2.0}, 2.0),
        ({"strict": True, "parity_mean_tolerance": 1e-7}, 1e-7),
    ],
)
def test_a_mean_that_reaches_its_bound_ends_the_run(settings, mean):
    gate(**settings).check(found_by(10, 9.9 * mean, 0.0), rollout=0, temperature=1.0)
    with pytest.raises(ParityError):
        gate(**settings).check(found_by(10, 10 * mean, 0.0), rollout=0, temperature=1.0)


@pytest.mark.parametrize(
    ("settings", "tokens", "allowed"),
    [
        ({}, 10_000, 0),
        ({"strict": True}, 10_000, 0),
        ({"bf16": True}, 10_000, 10),
        ({"mixture": True}, 96, 1),
    ],
)
def test_more_tokens_than_allowed_that_reach_the_bound_end_the_run(settings, tokens, allowed):
    gate(**settings).check(found_by(tokens, 0.0, 9.0, beyond=allowed), rollout=0, temperature=1.0)
    with pytest.raises(ParityError):
        gate(**settings).check(found_by(tokens, 0.0, 9.0, beyond=allowed + 1), rollout=0, temperature=1.0)


def test_strict_bounds_are_tighter():
    assert STRICT.mean < FLOAT32.mean
    assert STRICT.largest < FLOAT32.largest


# --- The token that differs most --------------------------------------------------------------------------------------


def differing(log_probs: list[list[float]], *, write=None, **shard_fields) -> ParityError:
    """The error of a rollout whose micro-batches, samples [2, 0] and [1], have these log-probabilities."""
    found = ParityGate(WeightsConfig(), bf16=False, write=write)
    found.published(0)
    batch = replace(shard(), groups_B=np.array([5, 5, 6]), indices_B=np.array([40, 41, 42]), **shard_fields)
    micro_batches, parts = marked(found, batch), []
    objective = Objective(Clipped(), AlgorithmConfig(use_opd=True, opd_kl_coef=0.5))
    for micro, row in zip(micro_batches, log_probs, strict=True):
        micro.teacher_log_probs_U = torch.zeros(len(row))  # so that the loss works on a copy of the micro-batch
        parts.append(objective(torch.tensor(row, requires_grad=True), torch.zeros(len(row)), micro)[1])
    with pytest.raises(ParityError) as caught:
        found.check(reduce_metrics(parts, SimpleNamespace(size=lambda: 1)), rollout=7, temperature=1.0)
    return caught.value


# Engine: [-4, -5 | -1, (masked) -2] of samples 2 and 0, and [-3] of sample 1.
SECOND_OF_SAMPLE_2 = ComparedToken(
    sample=42, group=6, position=1, response_length=2, token=7, learner_log_prob=-5.5, engine_log_prob=-5.0
)


@pytest.mark.parametrize(
    ("log_probs", "worst"),
    [
        ([[-4.25, -5.5, -1.0, 9.0], [-3.0]], SECOND_OF_SAMPLE_2),
        (
            [[-4.0, -5.0, -0.25, 9.0], [-3.0]],
            ComparedToken(40, 5, 0, 2, token=1, learner_log_prob=-0.25, engine_log_prob=-1.0),
        ),
        (
            [[-4.0, -5.0, -1.0, 9.0], [-1.0]],
            ComparedToken(41, 5, 0, 1, token=4, learner_log_prob=-1.0, engine_log_prob=-3.0),
        ),
    ],
)
def test_the_error_names_the_token_that_differs_most(log_probs, worst):
    error = differing(log_probs)
    assert error.worst == worst
    named = f"sample {worst.sample} of group {worst.group}, response token {worst.position} of {worst.response_length}"
    assert named in str(error)
    assert f"id {worst.token}: learner {worst.learner_log_prob:g}, engine {worst.engine_log_prob:g}" in str(error)


def test_a_token_that_is_not_compared_is_not_the_worst():
    error = differing([[-4.25, -5.5, -1.0, 9.0], [-1.0]], weight_version_B=np.array([0, 1, 0]))
    assert error.worst == SECOND_OF_SAMPLE_2


def test_what_was_compared_is_on_disk_when_the_error_is_raised(tmp_path):
    settings = LearnerSettings(RunConfig(), tmp_path, "Toy", "clipped", 1, rank=3, world_size=4)
    template = tmp_path / "parity" / "{rollout_id}-{rank}.safetensors"
    log_probs = [[-4.25, -5.5, -1.0, 9.0], [-3.0]]
    error = differing(log_probs, write=lambda batch, micro: save_train_data(template, batch, [micro], settings))
    assert error.samples_file == tmp_path / "parity" / "0-3.safetensors"
    saved = load_file(error.samples_file)
    assert saved["trained/learner_log_probs_U"].tolist() == [-1.0, 9.0, -3.0, -4.25, -5.5]
    assert saved["rollout_log_probs_U"].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert (saved["indices_B"].tolist(), saved["groups_B"].tolist()) == ([40, 41, 42], [5, 5, 6])
    assert str(error.samples_file) in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.samples_file, again.worst) == (str(error), error.samples_file, error.worst)


def test_a_full_disk_does_not_hide_the_error():
    def write(batch, micro_batches):
        raise OSError("No space left on device")

    error = differing([[-4.25, -5.5, -1.0, 9.0], [-3.0]], write=write)
    assert (error.samples_file, error.worst) == (None, SECOND_OF_SAMPLE_2)


# --- The strict gate, of true_on_policy_mode --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "moved", "found"),
    [
        ((3, 2, -1), False, "weights 3.* 2 of 3 .* several"),
        (None, False, "weights 3.* 3 of 3 "),
        ((3, 3, 3), True, "nothing.* 3 of 3 "),
    ],
)
def test_the_strict_gate_refuses_tokens_of_other_weights(versions, moved, found):
    strict = gate(strict=True, published=3)
    if moved:
        strict.weights_changed()
    with pytest.raises(ParityError, match=f"rollout 7: true_on_policy_mode .*{found}"):
        marked(strict, shard(rollout=7, versions=versions))


def test_a_response_that_trains_nothing_may_be_stale():
    batch = shard(versions=(3, 2, 3))
    batch.loss_mask_U[2] = 0.0
    assert fresh(gate(strict=True, published=3), batch) == [[True] * 4, [False]]


@pytest.mark.parametrize(
    ("means", "warned"),
    [
        ([0.01, 0.02, 0.029, 0.01], []),
        ([0.01, None, 0.031, 0.05], [2]),
        ([0.01, 0.001, 0.02, 0.04], [3]),
        ([None, 0.02, 0.05, 0.061], [3]),
        ([0.0, 1e-6, 2e-5, 4e-5], [3]),
    ],
)
def test_a_difference_that_triples_from_its_first_value_is_reported_once(means, warned) -> None:
    drift = ParityDrift()
    messages = [drift.warning(mean) for mean in means]
    assert [number for number, message in enumerate(messages) if message] == warned
    assert all("parity/mean" in message for message in messages if message)
