"""The off-policy correction ``tis``.

Engine and trainer compute the probability of one token with other kernels, and often in other precision or with other
weights, so that what is trained was drawn from another policy than the trainer's.
"""

from __future__ import annotations

import torch

from slime_core import CorrectionOutput, CorrectionTerms

__all__ = ["TruncatedImportanceSampling"]

_LARGEST_LOG_RATIO = 20.0
"""In nats; the exponential of anything larger outweighs every other token of a metric, and overflows from 88.7 on."""


class TruncatedImportanceSampling:
    """Weighs each token by its importance ratio of trainer to engine, held between ``tis_clip_low`` and ``tis_clip``.

    The weight is min(pi(trainer) / pi(engine), C) with C = ``tis_clip``; the lower bound of 0 that is the default does
    nothing. Masks nothing. Metrics a token: ``tis``, the ratio before it is held; ``tis_abs``, how far that is from 1;
    ``tis_clipfrac``, 1 where it was held.

    Sources: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (a blog post),
    after the truncated weights of IMPALA (1802.01561), section 4.1.
    """

    def __init__(self, options: object | None = None) -> None:
        del options

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """One weight a token, float32 [T]; the mask as it came.

        Raises:
            ValueError: the columns differ in length, or the bounds are in the wrong order.
        """
        low, high = terms.settings.tis_clip_low, terms.settings.tis_clip
        if not 0.0 <= low <= high:
            raise ValueError(
                f"tis_clip_low is {low} and tis_clip is {high}; accepted are 0 <= tis_clip_low <= tis_clip"
            )
        if terms.log_probs_T.shape != terms.rollout_log_probs_T.shape:
            shapes = f"{tuple(terms.log_probs_T.shape)} and {tuple(terms.rollout_log_probs_T.shape)}"
            raise ValueError(f"log_probs_T and rollout_log_probs_T must have one shape; found {shapes}")
        log_ratio_T = (terms.log_probs_T - terms.rollout_log_probs_T).where(terms.mask_T != 0, 0.0)
        ratio_T = log_ratio_T.clamp(max=_LARGEST_LOG_RATIO).exp()
        weights_T = ratio_T.clamp(low, high)
        metrics_T = {
            "tis": ratio_T,
            "tis_abs": (ratio_T - 1.0).abs(),
            "tis_clipfrac": (weights_T != ratio_T).to(torch.float32),
        }
        return CorrectionOutput(weights_T, terms.mask_T, metrics_T)
