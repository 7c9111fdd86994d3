"""On-policy distillation: the student draws the responses, the teacher says of each token how likely it was.

The divergence is the reverse one, KL(student || teacher), estimated at the tokens that the student drew (GKD,
2306.13649, section 3, with all data from the student). It enters as a reward of its own token alone, undiscounted,
so it is taken off the token's advantage as it is (Thinking Machines, On-Policy Distillation, 2025):

    A_t <- A_t - opd_kl_coef * (log p_student(t) - log p_teacher(t))

Left out: the divergence over the whole vocabulary, which would need the teacher's distribution at every token, and
responses of the teacher's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from slime_core.learner.packed.batches import MicroBatch

__all__ = ["distilled"]


def distilled(micro: MicroBatch, student_U: torch.Tensor, coefficient: float) -> MicroBatch:
    """``micro`` with the divergence from the teacher taken off its advantages; itself where there is no teacher.

    Whatever made the advantages (an estimator of either scope, whitening) comes first; the divergence is in nats.
    Metric a token: ``opd_reverse_kl``, the k1 estimate of the divergence.

    Arguments:
        student_U: float32 [u], log-probabilities of the actor before the first optimizer step of the rollout.
        coefficient: weight of the divergence.
    """
    if micro.teacher_log_probs_U is None:
        return micro
    divergence_U = student_U.detach() - micro.teacher_log_probs_U
    return replace(
        micro,
        advantages_U=micro.advantages_U - coefficient * divergence_U,
        metrics_U=micro.metrics_U | {"opd_reverse_kl": divergence_U},
    )
