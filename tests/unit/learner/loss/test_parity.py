from __future__ import annotations

import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from slime_core import RunView
from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig, WeightsConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import ComparedToken, ParityError
from slime_core.learner import LearnerSettings
from slime_core.learner.actor import ParityDrift, parity_unchecked_warning
from slime_core.learner.columns import BFLOAT16, FLOAT32, MIXTURE, STRICT, Bounds, ParityGate
from slime_core.learner.micro_batches import MicroBatch, make_micro_batches
from slime_core.learner.objective import Objective, compare, reduce_metrics
from slime_core.learner.rank import save_train_data, trained_columns
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


def marked(found: ParityGate, batch: TrainBatch) -> list[MicroBatch]:
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


def test_tokens_follow_their_samples_into_the_micro_batches():
    assert fresh(gate(published=3), shard(versions=(3, 3, 2))) == [[False, False, True, True], [True]]


def test_tokens_follow_their_samples_where_the_plan_was_cut_further():
    """The plan counts on shared prefixes, which the model cannot take: [2, 0] becomes two rows, before that of [1]."""
    batch = replace(shard(versions=(3, 2, 2)), prefix_order_B=np.arange(3), prefix_lengths_B=np.zeros(3, np.int64))
    found = gate(published=3)
    (micro_batches,) = make_micro_batches(batch, max_tokens=4)
    found.mark(batch, micro_batches)
    assert [micro.members for micro in micro_batches] == [(0,), (2,), (1,)]
    assert [micro.fresh_U.tolist() for micro in micro_batches] == [[True, True], [False, False], [False]]


def test_tokens_of_other_several_or_unknown_versions_are_not_fresh():
    assert fresh(gate(published=3), shard(versions=(2, 4, -1))) == [[False] * 4, [False]]
    assert fresh(gate(published=3), shard(versions=None)) == [[False] * 4, [False]]


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


def test_without_engines_nothing_is_due():
    assert fresh(gate(published=None), shard()) is None


# --- What is measured -------------------------------------------------------------------------------------------------


def sums(versions: tuple[int, ...], log_probs: list[list[float]]) -> list[tuple[float, float, float]]:
    """Tokens, sum and largest of every micro-batch through the loss."""
    objective, found = Objective(Clipped(None, RunView()), AlgorithmConfig()), []
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


def test_a_row_that_is_repeated_without_weight_does_not_count_again():
    found, batch = gate(), shard()
    (micro_batches,) = make_micro_batches(batch)
    last = micro_batches[-1]
    micro_batches.append(replace(last, weights_U=torch.zeros_like(last.weights_U)))
    found.mark(batch, micro_batches)
    tokens = [compare(torch.ones(len(micro.weights_U)), micro)[0]["parity_tokens"].item() for micro in micro_batches]
    assert tokens == [3, 1, 0]


def test_a_token_that_was_masked_after_weights_were_given_does_not_count():
    micro = marked(gate(), shard())[0]
    micro.mask_U = micro.mask_U * torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert micro.weights_U[1] != 0
    found, largest = compare(torch.tensor([0.5, 9.0, 0.25, 99.0]), micro)
    assert [value.item() for value in (*found.values(), *largest.values())] == [2.0, 0.75, 2.0, 0.5]


def test_differences_from_the_bound_on_are_counted():
    micro = marked(gate(parity_max_tolerance=0.5, parity_mean_tolerance=0.5), shard())[0]
    found, _ = compare(torch.tensor([0.5, 9.0, 0.49, 0.6]), micro)  # the second is masked
    assert found["parity_beyond"].item() == 2


def test_a_rollout_that_is_not_due_costs_nothing():
    micro = marked(gate(parity_interval=0), shard())[0]
    assert compare(torch.ones(4), micro) == ({}, {})


# --- What follows from it ---------------------------------------------------------------------------------------------


def test_below_both_bounds_the_mean_the_largest_and_the_count_are_reported_once():
    found, metrics = gate(), found_by(200, 0.01, 9.9e-4)
    found.check(metrics, rollout=0, temperature=1.0)
    assert metrics == {"loss": 0.5}
    assert found.report() == {"parity/tokens": 200, "parity/mean": 5e-5, "parity/max": 9.9e-4, "parity/beyond": 0}
    assert found.report() == {}


def test_a_step_that_was_not_measured_is_left_alone():
    found, metrics = gate(), {"loss": 0.5}
    found.check(metrics, rollout=0, temperature=1.0)
    assert (metrics, found.report()) == ({"loss": 0.5}, {})


def test_without_a_fresh_token_only_their_number_is_reported():
    found = gate()
    found.check(found_by(0, 0.0, 0.0), rollout=0, temperature=1.0)
    assert found.report() == {"parity/tokens": 0}


KINDS = {"float32": ({}, FLOAT32), "bfloat16": ({"bf16": True}, BFLOAT16), "mixture": ({"mixture": True}, MIXTURE)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_mean_that_reaches_the_bound_of_the_dtype_ends_the_run(kind):
    made, bounds = KINDS[kind]
    gate(**made).check(found_by(10, 9.9 * bounds.mean, 0.0), rollout=0, temperature=1.0)
    with pytest.raises(ParityError):
        gate(**made).check(found_by(10, 10 * bounds.mean, 0.0), rollout=0, temperature=1.0)


@pytest.mark.parametrize(
    ("kind", "tokens", "allowed"), [("float32", 10_000, 0), ("bfloat16", 10_000, 10), ("mixture", 96, 1)]
)
def test_more_tokens_than_allowed_that_reach_the_bound_end_the_run(kind, tokens, allowed):
    made, bounds = KINDS[kind]
    assert bounds.allowed(tokens) == allowed
    gate(**made).check(found_by(tokens, 0.0, 9.0, beyond=allowed), rollout=0, temperature=1.0)
    with pytest.raises(ParityError):
        gate(**made).check(found_by(tokens, 0.0, 9.0, beyond=allowed + 1), rollout=0, temperature=1.0)


def test_where_outliers_are_allowed_the_message_counts_them():
    with pytest.raises(ParityError, match=r" 0\.1 .* 2 .* all but 2 tokens, and 3 "):
        gate(bf16=True).check(found_by(1500, 1.0, 2.5, beyond=3), rollout=0, temperature=1.0)


def test_each_micro_batch_carries_the_bound_that_applies():
    assert [micro.parity_bound for micro in marked(gate(bf16=True), shard())] == [2.0, 2.0]
    assert marked(gate(bf16=True, parity_max_tolerance=0.3), shard())[0].parity_bound == 0.3
    assert Bounds(1.0, 2.0).allowed(10**6) == 0


def test_given_bounds_replace_those_of_the_dtype():
    wide = gate(parity_mean_tolerance=2.0, parity_max_tolerance=3.0)
    wide.check(found_by(10, 15.0, 2.9), rollout=0, temperature=1.0)
    assert marked(wide, shard())[0].parity_bound == 3.0
    with pytest.raises(ParityError):
        gate(parity_mean_tolerance=2.0).check(found_by(10, 15.0, 2.9, beyond=10), rollout=0, temperature=1.0)


def test_the_message_says_what_was_found_what_is_accepted_and_what_to_try():
    found, numbers = gate(published=7), r" 1234 .*weights 7.* 0\.32 .* 4\.12 .*float32 .* 0\.0001 .* 0\.001\."
    with pytest.raises(ParityError, match=f"rollout 6: .*{numbers}") as caught:
        found.check(found_by(1234, 1234 * 0.32, 4.125), rollout=6, temperature=0.7)
    message = str(caught.value)
    causes = re.findall(r"^  \d\. (.*)$", message, re.MULTILINE)
    order = ["weights", "positions", " 0.7", "float32", "attention", "experts"]
    assert [word in cause for word, cause in zip(order, causes, strict=True)] == [True] * 6
    for setting in ("check-weight-update-equal", "parity-mean-tolerance", "parity-max-tolerance", "parity-interval"):
        assert f"--{setting}" in message


def test_on_reachable_engines_the_message_first_suspects_foreign_weights():
    found = ParityGate(WeightsConfig(), bf16=False, is_alone=False)
    found.published(7)
    with pytest.raises(ParityError, match=r"\n  1\. Another client"):
        found.check(found_by(10, 5.0, 4.0), rollout=6, temperature=1.0)


def test_the_settings_say_the_bounds_that_apply():
    descriptions = [
        str(WeightsConfig.model_fields[name].description) for name in ("parity_mean_tolerance", "parity_max_tolerance")
    ]
    stated = [
        [float(number) for number in re.findall(r"None:\s+(\S+) in\s+float32,\s+(\S+) in bfloat16", text)[0]]
        for text in descriptions
    ]
    assert stated == [[FLOAT32.mean, BFLOAT16.mean], [FLOAT32.largest, BFLOAT16.largest]]


# --- The token that differs most --------------------------------------------------------------------------------------


def differing(log_probs: list[list[float]], *, write=None, **shard_fields) -> ParityError:
    """The error of a rollout whose micro-batches, samples [2, 0] and [1], have these log-probabilities."""
    found = ParityGate(WeightsConfig(), bf16=False, write=write)
    found.published(0)
    batch = replace(shard(), groups_B=np.array([5, 5, 6]), indices_B=np.array([40, 41, 42]), **shard_fields)
    micro_batches, parts = marked(found, batch), []
    objective = Objective(Clipped(None, RunView()), AlgorithmConfig(use_opd=True, opd_kl_coef=0.5))
    for micro, row in zip(micro_batches, log_probs, strict=True):
        micro.teacher_log_probs_U = torch.zeros(len(row))  # so that the loss works on a copy of the micro-batch
        parts.append(objective(torch.tensor(row, requires_grad=True), torch.zeros(len(row)), micro)[1])
    with pytest.raises(ParityError) as caught:
        found.check(reduce_metrics(parts, FakeGroup()), rollout=7, temperature=1.0)
    return caught.value


class FakeGroup:
    def size(self) -> int:
        return 1


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


def test_rollouts_that_are_not_compared_write_no_column_of_the_learner():
    (micro_batches,) = make_micro_batches(shard())
    assert "trained/learner_log_probs_U" not in trained_columns(shard(), [micro_batches])
    assert "trained/learner_log_probs_U" not in trained_columns(shard(), [marked(gate(), shard())])


# --- The strict gate, of true_on_policy_mode --------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "largest"), [(STRICT.mean, 0.0), (0.0, STRICT.largest)])
def test_the_strict_bounds_are_tighter(mean, largest):
    assert STRICT.mean < FLOAT32.mean
    assert STRICT.largest < FLOAT32.largest
    gate(strict=True).check(found_by(10, 10 * 0.99 * mean, 0.99 * largest), rollout=0, temperature=1.0)
    reached = 1.0 if largest else 0.0
    with pytest.raises(ParityError, match=r"float32 .* 1e-05 .* 0\.0001\."):
        gate(strict=True).check(found_by(10, 10 * mean, largest, beyond=reached), rollout=0, temperature=1.0)


def test_tighter_bounds_than_the_strict_ones_are_kept():
    with pytest.raises(ParityError):
        gate(strict=True, parity_mean_tolerance=1e-7).check(found_by(10, 1e-5, 1e-6), rollout=0, temperature=1.0)


def test_the_strict_gate_takes_tokens_of_the_published_weights():
    assert fresh(gate(strict=True, published=3), shard(versions=(3, 3, 3))) == [[True] * 4, [True]]
    assert fresh(gate(published=3), shard(versions=(3, 2, 3))) == [[True] * 4, [False]]


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


def test_a_run_that_generates_ahead_reports_why_no_token_could_be_compared() -> None:
    alone, ahead = parity_unchecked_warning(0), parity_unchecked_warning(2)
    for warning in (alone, ahead):
        assert "weight_versions" in warning
        assert "--parity-interval 0" in warning
    assert "--async-buffer-size" not in alone
    assert re.search("--async-buffer-size 2 .*--async-buffer-size 0", ahead)


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
