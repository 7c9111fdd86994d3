"""The off-policy corrections of whole responses: ``mis``, ``veto`` and ``opsm``.

Sums over a response go through ``CorrectionTerms.segments``, in float64 and equally often on every rank, so neither the
packing nor context parallelism changes them. The sums run over the trained tokens that earlier corrections left.

Left out: weights normalised to a mean of 1. The mean would be taken over one micro-batch, so the packing would change
the trained loss.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from slime_core import CorrectionOutput, CorrectionTerms
from slime_core.ops.losses import LARGEST_LOG_RATIO
from slime_offpolicy.options import OffPolicyOptions
from slime_offpolicy.tokens import engine_log_ratio, require_one_shape

__all__ = ["mis", "opsm", "veto"]


def mis(terms: CorrectionTerms, options: OffPolicyOptions) -> CorrectionOutput:
    """Weigh tokens by the importance ratio of the token or its response, within bounds (--mis-level, --mis-mode).

    ``mis_level`` selects the ratio of trainer to engine: ``token``: r_t; ``sequence``: the product of r_t over the
    trained tokens of the response; ``geometric``: its geometric mean, which does not depend on the length. Every
    trained token of a response has the response's ratio. ``mis_mode`` selects the effect of the bounds: ``truncate``:
    min(r, ``mis_clip``); ``clip``: r clamped to [``mis_clip_low``, ``mis_clip``]; ``mask``: r within these bounds,
    else 0. A weight of 0 removes a token from the policy loss only.

    Sources: Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch" (a blog post): truncated and masked importance sampling of tokens and of sequences; the geometric mean:
    GSPO (2507.18071), equation 7.

    Returns:
        One weight per token, float32 [T], and the unchanged mask. Metrics a token: ``mis``, the ratio at its level
        before bounds; ``mis_abs``, its distance from 1; ``mis_clipfrac``, 1 if a bound changed it.

    Raises:
        ValueError: the columns differ in length, or ``segments`` is None at a level other than ``token``.
    """
    ratio_T = _at_level(terms, options.mis_level).clamp(max=LARGEST_LOG_RATIO).exp().float()
    low = 0.0 if options.mis_mode == "truncate" else options.mis_clip_low
    weights_T = ratio_T.clamp(low, options.mis_clip)
    is_outside_T = weights_T != ratio_T
    if options.mis_mode == "mask":
        weights_T = ratio_T.masked_fill(is_outside_T, 0.0)
    metrics_T = {"mis": ratio_T, "mis_abs": (ratio_T - 1.0).abs(), "mis_clipfrac": is_outside_T.to(torch.float32)}
    return CorrectionOutput(weights_T, terms.mask_T, metrics_T)


def veto(terms: CorrectionTerms, options: OffPolicyOptions) -> CorrectionOutput:
    """Mask responses with a token that is almost impossible for the trainer (--veto-threshold).

    Such a token's ratio of trainer to engine is below ``veto_threshold``, so the text after it says nothing about the
    trainer's policy. The mask of the whole response becomes 0, which removes it from every term of the loss.

    Source: Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch" (a blog post), the token-level veto.

    Returns:
        Weights of 1, and the mask, float32 [T]. Metrics a token: ``veto_fraction``, 1 in a masked response;
        ``veto_tokens``, 1 at the tokens below the threshold.

    Raises:
        ValueError: the columns differ in length, or ``segments`` is None.
    """
    is_below_T = (engine_log_ratio(terms) < math.log(options.veto_threshold)) & (terms.mask_T != 0)
    below_T = is_below_T.to(torch.float32)
    is_vetoed_T = _of_response(below_T, terms) > 0
    metrics_T = {"veto_fraction": is_vetoed_T.to(torch.float32), "veto_tokens": below_T}
    return CorrectionOutput(torch.ones_like(terms.mask_T), terms.mask_T.masked_fill(is_vetoed_T, 0.0), metrics_T)


def opsm(terms: CorrectionTerms, options: OffPolicyOptions) -> CorrectionOutput:
    """Remove responses of negative advantage once the actor is too far from them (DeepSeek-V3.2, 2512.02556).

    For a token of negative advantage the weight is 0 where (1 / |o|) sum_t log(pi_old(o_t) / pi(o_t)), over the trained
    tokens of its response, exceeds ``opsm_delta``; else it is 1. pi is the actor in this optimizer step; pi_old is the
    old policy of the loss: the actor before the rollout's first step, or, with ``use_rollout_logprobs``, the engine,
    as in the paper. Also as in the paper, such tokens stay in the divergence from the reference.

    Source: section 3.1, "Off-Policy Sequence Masking".

    Returns:
        Weights of 0 and 1, float32 [T], and the unchanged mask. Metrics a token: ``opsm_clipfrac``, 1 if the weight
        is 0; ``opsm_kl``, the mean that is compared, in nats.

    Raises:
        ValueError: the columns differ in length, or a required one is None.
    """
    current_T, advantages_T = terms.current_log_probs_T, terms.advantages_T
    if current_T is None or advantages_T is None:
        raise ValueError("opsm needs current_log_probs_T and advantages_T, but one of them is None")
    columns = {"log_probs_T": terms.log_probs_T, "current_log_probs_T": current_T, "advantages_T": advantages_T}
    require_one_shape(columns)
    trained_T = terms.mask_T != 0
    mean_T = _mean_of_response((terms.log_probs_T - current_T).where(trained_T, 0.0), terms)
    is_out_T = trained_T & (advantages_T < 0) & (mean_T > options.opsm_delta)
    metrics_T = {"opsm_clipfrac": is_out_T.to(torch.float32), "opsm_kl": mean_T.float()}
    return CorrectionOutput(torch.ones_like(terms.mask_T).masked_fill(is_out_T, 0.0), terms.mask_T, metrics_T)


def _at_level(terms: CorrectionTerms, level: Literal["token", "sequence", "geometric"]) -> torch.Tensor:
    """Return the log of each token's ratio at ``level``, [T]."""
    log_ratio_T = engine_log_ratio(terms)
    if level == "sequence":
        return _of_response(log_ratio_T, terms)
    if level == "geometric":
        return _mean_of_response(log_ratio_T, terms)
    return log_ratio_T


def _of_response(values_T: torch.Tensor, terms: CorrectionTerms) -> torch.Tensor:
    """Return for each token the sum over its whole response, float64 [T]."""
    if terms.segments is None:
        raise ValueError("segments is None, but this correction needs the tokens of each response")
    return terms.segments.spread(terms.segments.sums(values_T.double()))


def _mean_of_response(values_T: torch.Tensor, terms: CorrectionTerms) -> torch.Tensor:
    """Return for each token the mean over its response's trained tokens, float64 [T]; others of ``values_T`` are 0."""
    return _of_response(values_T, terms) / _of_response(terms.mask_T, terms).clamp(min=1.0)
