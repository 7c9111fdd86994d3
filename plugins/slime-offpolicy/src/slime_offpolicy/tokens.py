"""The off-policy corrections of single tokens: ``tis`` and ``icepop``.

Engine and trainer compute the probability of one token with different kernels, and often in different precision or with
different weights, so the trained tokens were sampled from another policy than the trainer's. The corrections of whole
responses are in :mod:`slime_offpolicy.sequences`.

Both return one weight per token, float32 [T], and the unchanged mask; they raise ValueError if the columns differ in
length.
"""

from __future__ import annotations

import torch

from slime_core import CorrectionOutput, CorrectionTerms
from slime_core.ops.losses import LARGEST_LOG_RATIO
from slime_offpolicy.options import OffPolicyOptions

__all__ = ["engine_log_ratio", "icepop", "require_one_shape", "tis"]


def tis(terms: CorrectionTerms, options: OffPolicyOptions) -> CorrectionOutput:
    """Weigh tokens by their importance ratio of trainer to engine, truncated (after IMPALA, 1802.01561).

    The weight is min(pi(trainer) / pi(engine), C) with C = ``tis_clip``, and at least ``tis_clip_low``; the default
    lower bound, 0, has no effect. Metrics a token: ``tis``, the ratio before the clamp; ``tis_abs``, its distance from
    1; ``tis_clipfrac``, 1 if the clamp changed it.

    Sources: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (a blog post),
    after the truncated weights of IMPALA (1802.01561), section 4.1.
    """
    ratio_T = engine_log_ratio(terms).clamp(max=LARGEST_LOG_RATIO).exp()
    weights_T = ratio_T.clamp(options.tis_clip_low, options.largest_ratio)
    metrics_T = {
        "tis": ratio_T,
        "tis_abs": (ratio_T - 1.0).abs(),
        "tis_clipfrac": (weights_T != ratio_T).to(torch.float32),
    }
    return CorrectionOutput(weights_T, terms.mask_T, metrics_T)


def icepop(terms: CorrectionTerms, options: OffPolicyOptions) -> CorrectionOutput:
    """Weigh tokens as tis does, but by 0 if the ratio is out of bounds (IcePop, 2510.18855).

    The weight is M(k) = k where ``tis_clip_low`` <= k <= ``tis_clip``, else 0. As in the paper it multiplies the
    policy loss only: a token out of bounds stays in the divergence from the reference and in the entropy, and the mask
    is unchanged. The paper's bounds are 0.5 and 5. Metrics a token: ``icepop``, the ratio; ``icepop_clipfrac``, 1 where
    it is out of bounds.

    Source: Ling Team 2025, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model", the
    IcePop objective and its M(k).
    """
    ratio_T = engine_log_ratio(terms).clamp(max=LARGEST_LOG_RATIO).exp()
    outside_T = (ratio_T < options.tis_clip_low) | (ratio_T > options.largest_ratio)
    metrics_T = {"icepop": ratio_T, "icepop_clipfrac": outside_T.to(torch.float32)}
    return CorrectionOutput(ratio_T.masked_fill(outside_T, 0.0), terms.mask_T, metrics_T)


def engine_log_ratio(terms: CorrectionTerms) -> torch.Tensor:
    """Return log pi(trainer) - log pi(engine), float32 [T] in nats; 0 at tokens that are not trained."""
    require_one_shape({"log_probs_T": terms.log_probs_T, "rollout_log_probs_T": terms.rollout_log_probs_T})
    return (terms.log_probs_T - terms.rollout_log_probs_T).where(terms.mask_T != 0, 0.0)


def require_one_shape(columns: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if the columns differ in shape."""
    shapes = [tuple(column_T.shape) for column_T in columns.values()]
    if len(set(shapes)) > 1:
        raise ValueError(f"{' and '.join(columns)} must have one shape, but have {' and '.join(map(str, shapes))}")
