from __future__ import annotations

import math

import pytest
import torch

from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.contracts import CorrectionOutput, LossOutput, LossParts
from slime_core.errors import RunError
from slime_core.learner.micro_batches import PackedMicroBatch
from slime_core.learner.objective import Corrections, NamedCorrection, Objective
from tests.micro_batches import micro


def objective(**algorithm) -> Objective:
    return Objective(Clipped(), AlgorithmConfig(**algorithm))


def evaluate(found: Objective, batch: PackedMicroBatch, *, log_probs=(-1.0, -2.0, -3.0), entropy=(0.0, 0.0, 0.0)):
    log_probs_U = torch.tensor(log_probs, requires_grad=True)
    loss, sums = found(log_probs_U, torch.tensor(entropy), batch)
    (gradient,) = torch.autograd.grad(loss, log_probs_U)
    return loss.item(), {name: value.item() for name, value in sums.sums.items()}, gradient.tolist(), sums


def test_a_clipped_case_by_hand():
    # Ratios 1.5, 1.1, 0.5; clip 0.2: losses -1.2 * 2, -1.1 * 2, 0.8; weights 1/4, 1/4, 1/2.
    old = [-1.0 - math.log(1.5), -2.0 - math.log(1.1), -3.0 - math.log(0.5)]
    loss, sums, gradient, _ = evaluate(objective(), micro(old_log_probs_U=old))
    assert loss == pytest.approx(0.25 * -2.4 + 0.25 * -2.2 + 0.5 * 0.8)
    assert gradient == pytest.approx([0.0, -0.55, 0.0])
    assert sums["loss"] == sums["pg_loss"] == pytest.approx(loss)
    assert sums["clip_fraction"] == pytest.approx(0.75)
    assert sums["ratio"] == pytest.approx(0.25 * 1.5 + 0.25 * 1.1 + 0.5 * 0.5)
    assert sums["weight"] == 1.0


@pytest.mark.parametrize(
    ("estimator", "kl", "slopes"),
    [("k1", [0.5, 0.0, -0.25], [1, 1, 1]), ("k2", [0.125, 0.0, 0.03125], [0.5, 0.0, -0.25])],
)
@pytest.mark.parametrize("coefficient", [0.1, 0.0])
def test_the_divergence_is_added_with_its_coefficient(estimator, kl, slopes, coefficient):
    plain, _, plain_gradient, _ = evaluate(objective(), micro())
    settings = objective(use_kl_loss=True, kl_loss_coef=coefficient, kl_loss_type=estimator)
    loss, sums, gradient, _ = evaluate(settings, micro(ref_log_probs_U=[-1.5, -2.0, -2.75]))
    weights = [0.25, 0.25, 0.5]
    expected = sum(weight * value for weight, value in zip(weights, kl, strict=True))
    assert sums["kl_loss"] == pytest.approx(expected)
    assert loss == pytest.approx(plain + coefficient * expected)
    extra = [coefficient * weight * slope for weight, slope in zip(weights, slopes, strict=True)]
    assert gradient == pytest.approx([a + b for a, b in zip(plain_gradient, extra, strict=True)])


def test_the_entropy_is_a_bonus():
    plain, *_ = evaluate(objective(), micro())
    loss, sums, _, _ = evaluate(objective(entropy_coef=0.1), micro(), entropy=(1.0, 2.0, 3.0))
    assert sums["entropy_loss"] == pytest.approx(0.25 + 0.5 + 1.5)
    assert loss == pytest.approx(plain - 0.1 * 2.25)


def test_masked_tokens_may_hold_anything():
    settings = objective(use_kl_loss=True, kl_loss_coef=0.1)
    expected = evaluate(settings, micro(weights_U=[0.0, 0.25, 0.5], ref_log_probs_U=[-1.0] * 3))
    spoilt = micro(
        mask_U=[0.0, 1.0, 1.0],
        weights_U=[0.0, 0.25, 0.5],
        advantages_U=[math.nan, 2.0, -1.0],
        rollout_log_probs_U=[-math.inf, -2.0, -3.0],
        ref_log_probs_U=[-math.inf, -1.0, -1.0],
    )
    loss, sums, gradient, both = evaluate(settings, spoilt, log_probs=(-1.0, -2.0, -3.0), entropy=(math.nan, 0.0, 0.0))
    assert loss == pytest.approx(expected[0])
    assert gradient == pytest.approx(expected[2])
    assert all(math.isfinite(value) for value in sums.values())
    assert both.largest["train_rollout_logprob_max_diff"].item() == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize(("trained", "lost"), [(1.0, -100.0), (0.0, -100.0), (0.0, -math.inf)])
def test_a_token_that_the_actor_all_but_lost_leaves_loss_and_gradient_finite(estimator, trained, lost):
    settings = objective(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=estimator, use_unbiased_kl=estimator != "k2")
    old = [-100.0, -2.0, -3.0]
    batch = micro(mask_U=[trained, 1.0, 1.0], ref_log_probs_U=[-5.0, -2.0, -3.0], old_log_probs_U=old)
    loss, _, gradient, _ = evaluate(settings, batch, log_probs=(lost, -2.0, -3.0))
    assert math.isfinite(loss)
    assert all(map(math.isfinite, gradient))
    assert trained or gradient[0] == 0


def test_the_difference_to_the_engine_is_measured_as_mean_and_maximum():
    batch = micro(rollout_log_probs_U=[-1.5, -2.0, -2.0])
    _, sums, _, both = evaluate(objective(), batch)
    assert sums["train_rollout_logprob_abs_diff"] == pytest.approx(0.25 * 0.5 + 0.5 * 1.0)
    assert both.largest["train_rollout_logprob_max_diff"].item() == 1.0


# --- Corrections ------------------------------------------------------------------------------------------------------


def corrected(*functions, **algorithm) -> Objective:
    named = [NamedCorrection(function, f"correction {number}") for number, function in enumerate(functions)]
    return Objective(Clipped(), AlgorithmConfig(**algorithm), corrections=Corrections(named))


def weigh(*weights):
    return lambda terms: CorrectionOutput(torch.tensor(weights), terms.mask_T, {})


def keep(*mask):
    return lambda terms: CorrectionOutput(torch.ones(len(mask)), terms.mask_T * torch.tensor(mask), {})


def test_weights_multiply_the_policy_loss_and_nothing_else():
    _, plain_sums, *_ = evaluate(objective(entropy_coef=0.1), micro(), entropy=(1.0, 2.0, 3.0))
    found = corrected(weigh(0.5, 2.0, 1.0), weigh(1.0, 2.0, 3.0), entropy_coef=0.1)
    loss, sums, gradient, _ = evaluate(found, micro(), entropy=(1.0, 2.0, 3.0))
    # -2, -2, 1 times 0.5, 4, 3, with the weights 1/4, 1/4, 1/2 of the sampler
    assert sums["pg_loss"] == pytest.approx(0.25 * -1 + 0.25 * -8 + 0.5 * 3)
    assert loss == pytest.approx(sums["pg_loss"] - 0.1 * sums["entropy_loss"])
    assert gradient == pytest.approx([-0.25, -2.0, 1.5])
    assert sums["entropy_loss"] == plain_sums["entropy_loss"]


def test_a_token_that_is_left_out_takes_no_part_and_the_divisor_stays():
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1", "entropy_coef": 0.1}
    batch = micro(ref_log_probs_U=[-2.0, -3.0, -4.0])
    loss, sums, gradient, _ = evaluate(corrected(keep(1.0, 0.0, 1.0), **settings), batch, entropy=(1.0, 2.0, 3.0))
    policy, kl, entropy = 0.25 * -2 + 0.5 * 1, 0.25 * 1 + 0.5 * 1, 0.25 * 1 + 0.5 * 3
    assert sums["pg_loss"] == pytest.approx(policy, abs=1e-6)
    assert loss == pytest.approx(policy + 0.1 * kl - 0.1 * entropy, abs=1e-6)
    assert gradient[1] == 0
    assert sums["weight"] == 1.0
    assert sums["kl_loss"] == pytest.approx(1.0)  # measured over every token that the rollout trains


def test_a_correction_sees_what_those_before_it_left_and_the_log_probs_of_before_the_first_step():
    seen = {}

    def look(terms):
        seen["mask"] = terms.mask_T.tolist()
        seen["log_probs"], seen["engine"] = terms.log_probs_T.tolist(), terms.rollout_log_probs_T.tolist()
        seen["current"], seen["advantages"] = terms.current_log_probs_T.tolist(), terms.advantages_T.tolist()
        seen["flows"] = terms.current_log_probs_T.requires_grad
        seen["sums"], seen["gradient"] = terms.segments.sums(terms.mask_T).tolist(), terms.log_probs_T.requires_grad
        return weigh(1.0, 1.0, 1.0)(terms)

    found = corrected(keep(0.0, 1.0, 1.0), look)
    evaluate(found, micro())
    assert seen == {
        "mask": [0, 1, 1],
        "log_probs": [-1, -2, -3],
        "engine": [-1, -2, -3],
        "sums": [1, 1],
        "gradient": False,
        "current": [-1, -2, -3],
        "advantages": [2, 2, -1],
        "flows": False,
    }
    evaluate(found, micro(old_log_probs_U=[-1.5, -2.5, -3.5]))
    assert seen["log_probs"] == [-1.5, -2.5, -3.5]
    assert seen["current"] == [-1, -2, -3]


def test_weights_of_what_is_not_trained_may_be_anything():
    expected = evaluate(objective(), micro(mask_U=[1.0, 0.0, 1.0], weights_U=[0.25, 0.0, 0.5]))
    found = corrected(weigh(1.0, math.inf, 1.0))
    loss, sums, gradient, _ = evaluate(found, micro(mask_U=[1.0, 0.0, 1.0], weights_U=[0.25, 0.0, 0.5]))
    assert (loss, gradient) == (expected[0], expected[2])
    found.corrections.refuse_faults(sums, rollout=0)
    assert not [name for name in sums if name.startswith("faults/")]


@pytest.mark.parametrize(
    "wrong",
    [
        weigh(-0.5, 1.0, 1.0),
        weigh(math.nan, 1.0, 1.0),
        weigh(math.inf, 1.0, 1.0),
        lambda terms: CorrectionOutput(torch.ones(3), torch.tensor([0.5, 0.0, 1.0]), {}),
        lambda terms: CorrectionOutput(torch.ones(3), torch.tensor([1.0, 1.0, 1.0]), {}),
    ],
    ids=["negative", "NaN", "infinite", "mask of a half", "trains what was masked"],
)
def test_a_faulty_correction_ends_the_run_with_its_name(wrong):
    faulty = corrected(keep(1.0, 1.0, 1.0), wrong)
    _, sums, _, _ = evaluate(faulty, micro(mask_U=[1.0, 0.0, 1.0], weights_U=[0.25, 0.0, 0.5]))
    with pytest.raises(RunError, match=r"rollout 4: correction 1 .* 1 response tokens"):
        faulty.corrections.refuse_faults(sums, rollout=4)


@pytest.mark.parametrize(
    ("correction", "names"),
    [
        (lambda terms: 1 / 0, "ZeroDivisionError"),
        (lambda terms: None, "NoneType; .*CorrectionOutput"),
        (weigh(1.0, 1.0), r"weights_T .*\(2,\) .* 3 response"),
        (lambda terms: CorrectionOutput(1.0, torch.ones(3), {}), "weights_T .*float .* 3 "),
        (lambda terms: CorrectionOutput(torch.ones(3), torch.ones(3), None), "metrics_T .*NoneType"),
        (lambda terms: CorrectionOutput(torch.ones(3), terms.mask_T, {"ratio": torch.ones(3)}), "ratio"),
    ],
)
def test_a_correction_that_breaks_its_contract_is_named(correction, names):
    with pytest.raises(RunError, match=f"correction .*{names}"):
        evaluate(corrected(correction), micro())


def test_metrics_of_corrections_and_the_advantage_estimator_are_averaged_over_what_the_rollout_trains():
    def measure(terms):
        return CorrectionOutput(torch.ones(3), terms.mask_T, {"distance": torch.tensor([1.0, 2.0, 4.0])})

    batch = micro()
    batch.metrics_U = {"returns": torch.tensor([4.0, 8.0, -2.0])}
    _, sums, *_ = evaluate(corrected(keep(1.0, 0.0, 1.0), measure), batch)
    assert sums["distance"] == pytest.approx(0.25 * 1 + 0.25 * 2 + 0.5 * 4)
    assert sums["returns"] == pytest.approx(1 + 2 - 1)


# --- Old log-probs of the engine --------------------------------------------------------------------------------------


def test_the_ratio_may_be_taken_to_the_engine():
    # Ratios 1.5, 1.1, 0.5 to the engine, as in the first case by hand.
    engine = [-1.0 - math.log(1.5), -2.0 - math.log(1.1), -3.0 - math.log(0.5)]
    batch, found = micro(rollout_log_probs_U=engine), objective(use_rollout_logprobs=True)
    found.take_from_engine([batch])
    loss, sums, gradient, _ = evaluate(found, batch)
    assert loss == pytest.approx(0.25 * -2.4 + 0.25 * -2.2 + 0.5 * 0.8)
    assert gradient == pytest.approx([0.0, -0.55, 0.0])
    assert sums["ratio"] == pytest.approx(0.25 * 1.5 + 0.25 * 1.1 + 0.5 * 0.5)


# --- The difference between learner and engine ------------------------------------------------------------------------


def test_mismatch_is_measured_and_changes_nothing():
    batch = micro(old_log_probs_U=[-1.5, -2.0, -3.5])
    plain, plain_sums, plain_gradient, _ = evaluate(objective(), batch)
    loss, sums, gradient, _ = evaluate(objective(get_mismatch_metrics=True), batch)
    assert (loss, gradient) == (plain, plain_gradient)
    # Old less engine is -0.5, 0 and -0.5, averaged with the weights 1/4, 1/4, 1/2.
    assert sums["mismatch_kl"] == pytest.approx(0.25 * 0.5 + 0.5 * 0.5)
    assert sums["mismatch_ppl_ratio"] == pytest.approx(0.5 * math.exp(0.25) + 0.5 * math.exp(0.5))
    assert {name for name in sums if name not in plain_sums} == {
        "mismatch_kl",
        "mismatch_k3",
        "mismatch_chi2_token",
        "mismatch_chi2_seq",
        "mismatch_ppl_ratio",
    }


# --- The divergence, weighed ------------------------------------------------------------------------------------------


def test_the_unbiased_divergence_is_weighed_by_the_ratio_to_the_old_actor():
    batch = micro(old_log_probs_U=[-1.0 - math.log(2), -2.0, -3.0], ref_log_probs_U=[-1.5, -2.0, -2.75])
    settings = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k1"}
    plain, _, plain_gradient, _ = evaluate(objective(**settings), batch)
    loss, sums, gradient, _ = evaluate(objective(**settings, use_unbiased_kl=True), batch)
    # Differences 0.5, 0, -0.25 times the weights 2, 1, 1; the gradient of w * k is w * (k + 1).
    assert sums["kl_loss"] == pytest.approx(0.25 * 2 * 0.5 + 0.5 * -0.25)
    assert loss - plain == pytest.approx(0.1 * 0.25 * 0.5, abs=1e-6)
    slopes = [0.1 * 0.25 * (2 * 1.5 - 1), 0.0, 0.1 * 0.5 * (0.75 - 1)]
    assert [a - b for a, b in zip(gradient, plain_gradient, strict=True)] == pytest.approx(slopes, abs=1e-6)


def test_without_old_log_probs_the_weight_is_one_and_still_has_a_gradient():
    settings = {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k3"}
    batch = micro(advantages_U=[0.0, 0.0, 0.0], ref_log_probs_U=[-1.5, -2.0, -2.75])
    loss, _, gradient, _ = evaluate(objective(**settings, use_unbiased_kl=True), batch)
    plain, _, _, _ = evaluate(objective(**settings), batch)
    assert loss == pytest.approx(plain)
    # d(w k3) at w = 1 is k3 + (1 - exp(-d)) = d.
    assert gradient == pytest.approx([0.25 * 0.5, 0.0, 0.5 * -0.25])


# --- A policy loss that breaks its contract ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (lambda terms: 1 / 0, "ZeroDivisionError"),
        (lambda terms: terms.log_probs_T, "Tensor; .*LossOutput"),
        (lambda terms: LossOutput(terms.log_probs_T.sum()), r"loss_T .*\(\) .* 3 "),
        (lambda terms: LossOutput([1.0, 2.0, 3.0]), "loss_T .*list .* 3 "),
        (lambda terms: LossOutput(terms.log_probs_T, [1.0]), "metrics_T .*list; .*dict"),
        (
            lambda terms: LossOutput(terms.log_probs_T, {"ratio": terms.log_probs_T.mean()}),
            r"metrics_T\['ratio'\] .*\(\) .* 3 ",
        ),
        (lambda terms: LossOutput(terms.log_probs_T.detach()), "loss_T .*gradient"),
    ],
)
def test_a_policy_loss_that_breaks_its_contract_is_named(loss, names):
    settings, label = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1), "policy loss 'mine' of plugin 'mine'"
    with pytest.raises(RunError, match=f"^{label}.*{names}"):
        evaluate(Objective(loss, settings, label=label), micro(ref_log_probs_U=[-2.0, -2.0, -2.0]))


def test_tokens_that_no_engine_sampled_have_no_difference_to_the_engines():
    for engine_sampled in (True, False):
        parts = LossParts(of_logits=lambda logits_1TV, _: (logits_1TV.sum(), {}))
        objective = Objective(Clipped(), AlgorithmConfig(), engine_sampled=engine_sampled, parts=parts)
        log_probs_U, entropy_U = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.zeros(3)
        _, of_log_probs = objective(log_probs_U, entropy_U, micro())
        _, of_logits = objective.from_logits(torch.zeros(1, 3, 4), log_probs_U.detach(), entropy_U, micro())
        for sums in (of_log_probs, of_logits):
            assert ("train_rollout_logprob_abs_diff" in sums.sums) is engine_sampled
            assert ("train_rollout_logprob_max_diff" in sums.largest) is engine_sampled


def test_the_loss_and_a_correction_receive_the_columns_of_the_engine():
    def loss(terms):
        return LossOutput(terms.log_probs_T * terms.engine_columns_T["x"][:, 0])

    def correct(terms):
        return CorrectionOutput(terms.engine_columns_T["x"][:, 1], terms.mask_T)

    batch = micro()
    batch.engine_columns_U = {"x": torch.tensor([[1.0, 2.0], [3.0, 1.0], [5.0, 0.5]])}
    reading = Objective(loss, AlgorithmConfig(), corrections=Corrections([NamedCorrection(correct, "x")]))
    _, _, gradient, _ = evaluate(reading, batch)
    assert gradient == pytest.approx([0.25 * 2.0, 0.25 * 3.0, 0.5 * 2.5])
