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

from slime_core import CorrectionOutput, CorrectionTerms, RunView
from slime_core.ops.losses import LARGEST_LOG_RATIO
from slime_offpolicy.options import OffPolicyOptions
from slime_offpolicy.tokens import engine_log_ratio, require_bounds, require_one_shape

__all__ = ["MaskedImportanceSampling", "OffPolicySequenceMasking", "Veto"]


class MaskedImportanceSampling:
    """Weighs tokens by the importance ratio of trainer to engine, of a token or of its response, within bounds.

    ``mis_level`` selects the ratio: ``token``: r_t; ``sequence``: the product of r_t over the trained tokens of the
    response; ``geometric``: its geometric mean, which does not depend on the length. Every trained token of a response
    has the response's ratio. ``mis_mode`` selects the effect of the bounds: ``truncate``: min(r, ``mis_clip``);
    ``clip``: r clamped to [``mis_clip_low``, ``mis_clip``]; ``mask``: r within these bounds, else 0. A weight of 0
    removes a token from the policy loss only; the mask is unchanged.

    Metrics a token: ``mis``, the ratio at its level before bounds; ``mis_abs``, its distance from 1;
    ``mis_clipfrac``, 1 where a bound changed it.

    Raises:
        ValueError: the bounds are in the wrong order.

    Sources: Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch" (a blog post): truncated and masked importance sampling of tokens and of sequences; the geometric mean:
    GSPO (2507.18071), equation 7.
    """

    def __init__(self, options: OffPolicyOptions, run: RunView) -> None:
        del run
        low = 0.0 if options.mis_mode == "truncate" else options.mis_clip_low
        require_bounds("mis_clip", low, options.mis_clip)
        self._low = low
        self._high = options.mis_clip
        self._level = options.mis_level
        self._mode = options.mis_mode

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Return one weight per token, float32 [T], and the unchanged mask.

        Raises:
            ValueError: the columns differ in length, or a per-response result is requested without ``segments``.
        """
        ratio_T = _at_level(terms, self._level).clamp(max=LARGEST_LOG_RATIO).exp().float()
        weights_T = self._bounded(ratio_T)
        metrics_T = {
            "mis": ratio_T,
            "mis_abs": (ratio_T - 1.0).abs(),
            "mis_clipfrac": (weights_T != ratio_T).to(torch.float32),
        }
        return CorrectionOutput(weights_T, terms.mask_T, metrics_T)

    def _bounded(self, ratio_T: torch.Tensor) -> torch.Tensor:
        if self._mode == "mask":
            return ratio_T.where((ratio_T >= self._low) & (ratio_T <= self._high), 0.0)
        return ratio_T.clamp(self._low, self._high)


class Veto:
    """Masks every response with a trained token whose ratio of trainer to engine is below ``veto_threshold``.

    Such a token is almost impossible under the trainer, so the text after it says nothing about the trainer's policy.
    Weights are 1; the mask of the whole response becomes 0, which removes it from every term of the loss. Metrics a
    token: ``veto_fraction``, 1 in a masked response; ``veto_tokens``, 1 at the tokens below the threshold.

    Source: Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch" (a blog post), the token-level veto.
    """

    def __init__(self, options: OffPolicyOptions, run: RunView) -> None:
        del run
        self._threshold = math.log(options.veto_threshold)

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Return the mask, float32 [T], 0 in responses with a vetoed token, and weights of 1.

        Raises:
            ValueError: the columns differ in length, or there are no ``segments``.
        """
        below_T = ((engine_log_ratio(terms) < self._threshold) & (terms.mask_T != 0)).to(torch.float32)
        vetoed_T = _of_response(below_T, terms) > 0
        metrics_T = {"veto_fraction": vetoed_T.to(torch.float32), "veto_tokens": below_T}
        return CorrectionOutput(torch.ones_like(terms.mask_T), terms.mask_T.masked_fill(vetoed_T, 0.0), metrics_T)


class OffPolicySequenceMasking:
    """Removes responses of negative advantage from the policy loss once the actor has moved too far from them.

    For a token of negative advantage the weight is 0 where (1 / |o|) sum_t log(pi_old(o_t) / pi(o_t)), over the trained
    tokens of its response, exceeds ``opsm_delta``; else it is 1. pi is the actor in this optimizer step; pi_old is the
    old policy of the loss: the actor before the rollout's first step, or, with ``use_rollout_logprobs``, the engine,
    as in the paper. Also as in the paper, such tokens stay in the divergence from the reference; the mask is unchanged.
    Metrics a token: ``opsm_clipfrac``, 1 where the weight is 0; ``opsm_kl``, the mean that is compared, in nats.

    Source: DeepSeek-V3.2 (2512.02556), section 3.1, "Off-Policy Sequence Masking".
    """

    def __init__(self, options: OffPolicyOptions, run: RunView) -> None:
        del run
        self._delta = options.opsm_delta

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Return weights of 0 and 1, float32 [T], and the unchanged mask.

        Raises:
            ValueError: the columns differ in length, or a required one is missing.
        """
        current_T, advantages_T = terms.current_log_probs_T, terms.advantages_T
        if current_T is None or advantages_T is None:
            raise ValueError("opsm needs current_log_probs_T and advantages_T; found None")
        columns = {"log_probs_T": terms.log_probs_T, "current_log_probs_T": current_T, "advantages_T": advantages_T}
        require_one_shape(columns)
        trained_T = terms.mask_T != 0
        left_T = _mean_of_response((terms.log_probs_T - current_T).where(trained_T, 0.0), terms)
        out_T = trained_T & (advantages_T < 0) & (left_T > self._delta)
        metrics_T = {"opsm_clipfrac": out_T.to(torch.float32), "opsm_kl": left_T.float()}
        return CorrectionOutput(torch.ones_like(terms.mask_T).masked_fill(out_T, 0.0), terms.mask_T, metrics_T)


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
        raise ValueError(
            "segments is None; a correction that judges whole responses needs to know which tokens they are"
        )
    return terms.segments.spread(terms.segments.sums(values_T.double()))


def _mean_of_response(values_T: torch.Tensor, terms: CorrectionTerms) -> torch.Tensor:
    """Return for each token the mean over its response's trained tokens, float64 [T]; others of ``values_T`` are 0."""
    return _of_response(values_T, terms) / _of_response(terms.mask_T, terms).clamp(min=1.0)
