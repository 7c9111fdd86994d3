from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.learner.micro_batches import PackedMicroBatch
from slime_core.learner.objective import Objective, subtract_teacher_kl
from tests.micro_batches import micro as small_micro


def micro(**columns: Any) -> PackedMicroBatch:
    """One sample of three response tokens, the last of which is masked."""
    values = {
        "mask_U": [1.0, 1.0, 0.0],
        "weights_U": [0.5, 0.5, 0.0],
        "advantages_U": [1.0, 1.0, 1.0],
        "rollout_log_probs_U": [math.log(0.5)] * 3,
    }
    teacher_U = torch.log(torch.tensor([0.25, 0.5, 1e-30]))
    return replace(small_micro(**values), **{"teacher_log_probs_U": teacher_U, **columns})


STUDENT = torch.log(torch.tensor([0.5, 0.125, 0.5]))


def test_the_divergence_of_each_token_is_taken_off_its_advantage():
    """A_t - c (log p_student - log p_teacher): 1 - 0.1 ln 2 where the teacher is half as sure, 1 + 0.1 ln 4 where it is
    four times as sure (On-Policy Distillation, 2025: the reward of a token is minus its reverse KL, undiscounted)."""
    before = micro()
    found = subtract_teacher_kl(before, STUDENT, 0.1)
    assert found.advantages_U[:2].tolist() == pytest.approx([1 - 0.1 * math.log(2), 1 + 0.1 * math.log(4)])
    assert found.metrics_U["opd_reverse_kl"][:2].tolist() == pytest.approx([math.log(2), -math.log(4)])
    assert before.advantages_U.tolist() == [1, 1, 1]  # the steps of a rollout may run it again
    assert before.metrics_U == {}


def test_a_teacher_that_is_the_student_teaches_nothing_and_without_a_teacher_the_micro_batch_stays_itself():
    before = micro(teacher_log_probs_U=STUDENT)
    found = subtract_teacher_kl(before, STUDENT, 5.0)
    assert torch.equal(found.advantages_U, before.advantages_U)
    assert not found.metrics_U["opd_reverse_kl"].any()
    before = micro(teacher_log_probs_U=None)
    assert subtract_teacher_kl(before, STUDENT, 1.0) is before


def loss(
    batch: PackedMicroBatch, log_probs_U: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    objective = Objective(Clipped(), AlgorithmConfig(use_opd=True, **settings))
    value, sums = objective(log_probs_U, torch.zeros(3), batch)
    return value, sums.sums


def test_the_gradient_of_pure_distillation_follows_the_teacher():
    """With advantages of 0 and one step: d loss / d log p_t = c w_t (log p_student - log p_teacher)."""
    log_probs_U = STUDENT.clone().requires_grad_()
    value, sums = loss(micro(advantages_U=torch.zeros(3)), log_probs_U, opd_kl_coef=2.0)
    value.backward()
    assert log_probs_U.grad is not None
    assert log_probs_U.grad.tolist() == pytest.approx([2 * 0.5 * math.log(2), -2 * 0.5 * math.log(4), 0])
    assert sums["opd_reverse_kl"].item() == pytest.approx((math.log(2) - math.log(4)) / 2)


def test_later_steps_distil_by_the_log_probs_of_before_the_first():
    """Advantages do not move while the actor does."""
    batch = micro(old_log_probs_U=STUDENT)
    moved_U = (STUDENT + 0.01).requires_grad_()
    _, sums = loss(batch, moved_U)
    assert sums["opd_reverse_kl"].item() == pytest.approx((math.log(2) - math.log(4)) / 2)


@pytest.mark.parametrize(
    ("teacher", "is_finite"),
    [([math.nan, 0, 0], False), ([math.inf, 0, 0], False), ([-math.inf, 0, 0], False), ([-1, -1, math.nan], True)],
)
def test_a_teacher_that_is_not_finite_for_a_trained_token_spoils_the_loss_so_that_the_run_ends(teacher, is_finite):
    value, sums = loss(micro(teacher_log_probs_U=torch.tensor(teacher)), STUDENT.clone().requires_grad_())
    assert math.isfinite(value.item()) is is_finite
    assert math.isfinite(sums["opd_reverse_kl"].item()) is is_finite
