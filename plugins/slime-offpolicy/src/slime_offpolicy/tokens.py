"""The off-policy corrections of single tokens: ``tis`` and ``icepop``.

Engine and trainer compute the probability of one token with different kernels, and often in different precision or with
different weights, so the trained tokens were sampled from another policy than the trainer's. The corrections of whole
responses are in :mod:`slime_offpolicy.sequences`.
"""

from __future__ import annotations

import torch

from slime_core import CorrectionOutput, CorrectionTerms, RunView
from slime_core.ops.losses import LARGEST_LOG_RATIO
from slime_offpolicy.options import OffPolicyOptions

__all__ = ["IcePop", "TruncatedImportanceSampling", "engine_log_ratio", "require_bounds", "require_one_shape"]


class TruncatedImportanceSampling:
    """Weighs each token by its importance ratio of trainer to engine, clamped to [``tis_clip_low``, ``tis_clip``].

    The weight is min(pi(trainer) / pi(engine), C) with C = ``tis_clip``; the default lower bound, 0, has no effect.
    Masks nothing. Metrics a token: ``tis``, the ratio before the clamp; ``tis_abs``, its distance from 1;
    ``tis_clipfrac``, 1 where the clamp changed it.

    Raises:
        ValueError: the bounds are in the wrong order.

    Sources: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (a blog post),
    after the truncated weights of IMPALA (1802.01561), section 4.1.
    """

    def __init__(self, options: OffPolicyOptions, run: RunView) -> None:
        del run
        require_bounds("tis_clip", options.tis_clip_low, options.largest_ratio)
        self._low = options.tis_clip_low
        self._high = options.largest_ratio

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Return one weight per token, float32 [T], and the unchanged mask.

        Raises:
            ValueError: the columns differ in length.
        """
        ratio_T = engine_log_ratio(terms).clamp(max=LARGEST_LOG_RATIO).exp()
        weights_T = ratio_T.clamp(self._low, self._high)
        metrics_T = {
            "tis": ratio_T,
            "tis_abs": (ratio_T - 1.0).abs(),
            "tis_clipfrac": (weights_T != ratio_T).to(torch.float32),
        }
        return CorrectionOutput(weights_T, terms.mask_T, metrics_T)


class IcePop:
    """Weighs each token by its importance ratio of trainer to engine, or by 0 if the ratio is out of bounds.

    The weight is M(k) = k where ``tis_clip_low`` <= k <= ``tis_clip``, else 0. As in the paper it multiplies the
    policy loss only: a token out of bounds stays in the divergence from the reference and in the entropy, and the mask
    is unchanged. The paper's bounds are 0.5 and 5. Metrics a token: ``icepop``, the ratio; ``icepop_clipfrac``, 1 where
    it is out of bounds.

    Raises:
        ValueError: the bounds are in the wrong order.

    Source: Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model"
    (2510.18855), the IcePop objective and its M(k).
    """

    def __init__(self, options: OffPolicyOptions, run: RunView) -> None:
        del run
        require_bounds("tis_clip", options.tis_clip_low, options.largest_ratio)
        self._low = options.tis_clip_low
        self._high = options.largest_ratio

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Return one weight per token, float32 [T], and the unchanged mask.

        Raises:
            ValueError: the columns differ in length.
        """
        ratio_T = engine_log_ratio(terms).clamp(max=LARGEST_LOG_RATIO).exp()
        outside_T = (ratio_T < self._low) | (ratio_T > self._high)
        metrics_T = {"icepop": ratio_T, "icepop_clipfrac": outside_T.to(torch.float32)}
        return CorrectionOutput(ratio_T.masked_fill(outside_T, 0.0), terms.mask_T, metrics_T)


def engine_log_ratio(terms: CorrectionTerms) -> torch.Tensor:
    """Return log pi(trainer) - log pi(engine), float32 [T] in nats; 0 at tokens that are not trained.

    Raises:
        ValueError: the columns differ in length.
    """
    require_one_shape({"log_probs_T": terms.log_probs_T, "rollout_log_probs_T": terms.rollout_log_probs_T})
    return (terms.log_probs_T - terms.rollout_log_probs_T).where(terms.mask_T != 0, 0.0)


def require_bounds(name: str, low: float, high: float) -> None:
    """Check that the bounds are in order.

    Raises:
        ValueError: not 0 <= ``low`` <= ``high``.
    """
    if not 0.0 <= low <= high:
        raise ValueError(f"{name}_low is {low} and {name} is {high}; accepted: 0 <= {name}_low <= {name}")


def require_one_shape(columns: dict[str, torch.Tensor]) -> None:
    """Check that all columns have the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    shapes = [tuple(column_T.shape) for column_T in columns.values()]
    if len(set(shapes)) > 1:
        raise ValueError(f"{' and '.join(columns)} must have one shape; found {' and '.join(map(str, shapes))}")
