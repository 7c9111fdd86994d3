from __future__ import annotations

import math

import pytest
import torch

from slime_core.builtin.losses import Clipped
from slime_core.config.schema import AlgorithmConfig
from slime_core.learner.batches import MicroBatch
from slime_core.learner.objective import Objective
from slime_core.plugins.contracts import LossOutput, LossTerms


def micro(**columns) -> MicroBatch:
    """Two samples; tokens 0 and 1 belong to the first, token 2 to the second."""
    values = {
        "mask_U": [1.0, 1.0, 1.0],
        "weights_U": [0.25, 0.25, 0.5],
        "advantages_U": [2.0, 2.0, -1.0],
        "rollout_log_probs_U": [-1.0, -2.0, -3.0],
        **columns,
    }
    return MicroBatch(
        tokens_1T=torch.zeros(1, 5, dtype=torch.int64),
        position_ids_1T=torch.zeros(1, 5, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32),
        max_seqlen=3,
        num_samples=2,
        rows_U=torch.tensor([0, 1, 3]),
        targets_U=torch.zeros(3, dtype=torch.int64),
        samples_U=torch.tensor([0, 0, 1]),
        **{name: torch.tensor(column) for name, column in values.items()},
    )


def objective(**algorithm) -> Objective:
    return Objective(Clipped(), AlgorithmConfig(**algorithm))


def evaluate(found: Objective, batch: MicroBatch, *, log_probs=(-1.0, -2.0, -3.0), entropy=(0.0, 0.0, 0.0)):
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


def test_without_old_log_probs_the_current_ones_stand_in():
    loss, sums, gradient, _ = evaluate(objective(), micro())
    assert loss == pytest.approx(0.25 * -2 + 0.25 * -2 + 0.5 * 1)
    assert gradient == pytest.approx([-0.5, -0.5, 0.5])  # weight x -advantage
    assert sums["ratio"] == pytest.approx(1.0)


def test_clip_settings_reach_the_policy_loss():
    old = [-1.0 - math.log(1.5), -2.0, -3.0 - math.log(10)]
    loss, _, _, _ = evaluate(objective(eps_clip_high=0.3, eps_clip_c=3.0), micro(old_log_probs_U=old))
    assert loss == pytest.approx(0.25 * -2.6 + 0.25 * -2.0 + 0.5 * 3.0)


@pytest.mark.parametrize(("estimator", "kl"), [("k1", [0.5, 0.0, -0.25]), ("k2", [0.125, 0.0, 0.03125])])
def test_the_divergence_is_added_with_its_coefficient(estimator, kl):
    plain, _, plain_gradient, _ = evaluate(objective(), micro())
    settings = objective(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=estimator)
    loss, sums, gradient, _ = evaluate(settings, micro(ref_log_probs_U=[-1.5, -2.0, -2.75]))
    expected = 0.25 * kl[0] + 0.25 * kl[1] + 0.5 * kl[2]
    assert sums["kl_loss"] == pytest.approx(expected)
    assert loss == pytest.approx(plain + 0.1 * expected)
    slopes = [1, 1, 1] if estimator == "k1" else [0.5, 0.0, -0.25]
    weights = [0.25, 0.25, 0.5]
    extra = [0.1 * weight * slope for weight, slope in zip(weights, slopes, strict=True)]
    assert gradient == pytest.approx([a + b for a, b in zip(plain_gradient, extra, strict=True)])


def test_a_coefficient_of_zero_only_measures_the_divergence():
    plain, *_ = evaluate(objective(), micro())
    settings = objective(use_kl_loss=True, kl_loss_coef=0.0, kl_loss_type="k1")
    loss, sums, _, _ = evaluate(settings, micro(ref_log_probs_U=[-2.0, -2.0, -3.0]))
    assert loss == plain
    assert sums["kl_loss"] == pytest.approx(0.25)
    assert settings.uses_reference
    assert not objective().uses_reference


def test_the_entropy_is_a_bonus():
    plain, *_ = evaluate(objective(), micro())
    loss, sums, _, _ = evaluate(objective(entropy_coef=0.1), micro(), entropy=(1.0, 2.0, 3.0))
    assert sums["entropy_loss"] == pytest.approx(0.25 + 0.5 + 1.5)
    assert loss == pytest.approx(plain - 0.1 * 2.25)
    assert objective(entropy_coef=0.1).entropy_has_gradient
    assert not objective().entropy_has_gradient


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


def test_the_difference_to_the_engine_is_measured_as_mean_and_maximum():
    batch = micro(rollout_log_probs_U=[-1.5, -2.0, -2.0])
    _, sums, _, both = evaluate(objective(), batch)
    assert sums["train_rollout_logprob_abs_diff"] == pytest.approx(0.25 * 0.5 + 0.5 * 1.0)
    assert both.largest["train_rollout_logprob_max_diff"].item() == 1.0


def test_a_policy_loss_sees_which_tokens_form_a_sequence():
    seen = {}

    class Sequences:
        def __call__(self, terms: LossTerms) -> LossOutput:
            sums_b = terms.segments.sums(terms.log_probs_T)
            seen["sums"], seen["spread"] = sums_b.tolist(), terms.segments.spread(sums_b).tolist()
            return LossOutput(terms.log_probs_T)

    Objective(Sequences(), AlgorithmConfig())(torch.tensor([-1.0, -2.0, -4.0]), torch.zeros(3), micro())
    assert seen == {"sums": [-3.0, -4.0], "spread": [-3.0, -3.0, -4.0]}
