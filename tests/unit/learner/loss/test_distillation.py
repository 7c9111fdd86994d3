from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from slime_core import RunView
from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.learner.micro_batches import MicroBatch
from slime_core.learner.objective import Objective, subtract_teacher_kl


def micro(**given: Any) -> MicroBatch:
    """One sample of three response tokens, the last of which is masked."""
    mask_U = torch.tensor([1.0, 1.0, 0.0])
    columns: dict[str, Any] = {
        "tokens_1T": torch.zeros(1, 4, dtype=torch.int64),
        "position_ids_1T": torch.arange(4)[None],
        "cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
        "max_seqlen": 4,
        "num_samples": 1,
        "rows_U": torch.arange(3),
        "targets_U": torch.zeros(3, dtype=torch.int64),
        "samples_U": torch.zeros(3, dtype=torch.int64),
        "places_U": torch.arange(3),
        "mask_U": mask_U,
        "weights_U": mask_U / 2,
        "advantages_U": torch.tensor([1.0, 1.0, 1.0]),
        "rollout_log_probs_U": torch.log(torch.tensor([0.5, 0.5, 0.5])),
        "teacher_log_probs_U": torch.log(torch.tensor([0.25, 0.5, 1e-30])),
    }
    return MicroBatch(**columns | given)


STUDENT = torch.log(torch.tensor([0.5, 0.125, 0.5]))


def test_the_divergence_of_each_token_is_taken_off_its_advantage():
    """A_t - c (log p_student - log p_teacher): 1 - 0.1 ln 2 where the teacher is half as sure, 1 + 0.1 ln 4 where it is
    four times as sure (On-Policy Distillation, 2025: the reward of a token is minus its reverse KL, undiscounted)."""
    found = subtract_teacher_kl(micro(), STUDENT, 0.1)
    assert found.advantages_U[:2].tolist() == pytest.approx([1 - 0.1 * math.log(2), 1 + 0.1 * math.log(4)])
    assert found.metrics_U["opd_reverse_kl"][:2].tolist() == pytest.approx([math.log(2), -math.log(4)])


def test_a_teacher_that_is_the_student_teaches_nothing():
    before = micro(teacher_log_probs_U=STUDENT)
    found = subtract_teacher_kl(before, STUDENT, 5.0)
    assert torch.equal(found.advantages_U, before.advantages_U)
    assert not found.metrics_U["opd_reverse_kl"].any()


def test_without_a_teacher_the_micro_batch_stays_itself():
    before = micro(teacher_log_probs_U=None)
    assert subtract_teacher_kl(before, STUDENT, 1.0) is before


def test_the_micro_batch_that_is_distilled_is_not_changed():
    """The steps of a rollout may run it again."""
    before = micro()
    subtract_teacher_kl(before, STUDENT, 1.0)
    assert before.advantages_U.tolist() == [1, 1, 1]
    assert before.metrics_U == {}


def loss(batch: MicroBatch, log_probs_U: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    objective = Objective(Clipped(None, RunView()), AlgorithmConfig(use_opd=True, **settings))
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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_teacher_that_is_not_finite_spoils_the_loss_so_that_the_run_ends(bad):
    spoilt_U = torch.tensor([bad, 0.0, 0.0])
    value, sums = loss(replace(micro(), teacher_log_probs_U=spoilt_U), STUDENT.clone().requires_grad_())
    assert not math.isfinite(value.item())
    assert not math.isfinite(sums["opd_reverse_kl"].item())


def test_a_masked_token_may_hold_anything():
    spoilt_U = torch.tensor([-1.0, -1.0, math.nan])
    value, _ = loss(replace(micro(), teacher_log_probs_U=spoilt_U), STUDENT.clone().requires_grad_())
    assert math.isfinite(value.item())
