"""The off-policy corrections that judge a whole response: ``mis``, ``veto`` and ``opsm``.

Sums over a response go through ``CorrectionTerms.segments``, in float64 and equally often on every rank, so neither the
packing nor context parallelism changes them. What counts are the trained tokens, as earlier corrections left them.

Left out: weights that are normalised to a mean of 1. Their mean would be that of one micro-batch, so the packing would
decide what is trained.
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

    ``mis_level`` says what the ratio is taken over: ``token``: r_t; ``sequence``: the product of r_t over the trained
    tokens of the response; ``geometric``: its geometric mean, so that length does not count. Every trained token of a
    response carries the response's ratio. ``mis_mode`` says what bounds do to it: ``truncate``: min(r, ``mis_clip``);
    ``clip``: r held between ``mis_clip_low`` and ``mis_clip``; ``mask``: r within these, else 0. A weight of 0 takes a
    token out of the policy loss, and out of nothing else; the mask stays as it came.

    Metrics a token: ``mis``, the ratio at its level before bounds; ``mis_abs``, how far that is from 1;
    ``mis_clipfrac``, 1 where bounds changed it.

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
        """One weight a token, float32 [T]; the mask as it came.

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
    """Leaves out every response with a trained token whose ratio of trainer to engine is below ``veto_threshold``.

    Such a token was all but impossible under the trainer: what follows it says nothing of the trainer's policy. Weights
    are 1; the mask of the whole response becomes 0, so it takes no part in any term of the loss. Metrics a token:
    ``veto_fraction``, 1 in a response that is left out; ``veto_tokens``, 1 at the tokens that did it.

    Source: Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch" (a blog post), the token-level veto.
    """

    def __init__(self, options: OffPolicyOptions, run: RunView) -> None:
        del run
        self._threshold = math.log(options.veto_threshold)

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """The mask, float32 [T], 0 in responses with a vetoed token; weights of 1.

        Raises:
            ValueError: the columns differ in length, or there are no ``segments``.
        """
        below_T = ((engine_log_ratio(terms) < self._threshold) & (terms.mask_T != 0)).to(torch.float32)
        vetoed_T = _of_response(below_T, terms) > 0
        metrics_T = {"veto_fraction": vetoed_T.to(torch.float32), "veto_tokens": below_T}
        return CorrectionOutput(torch.ones_like(terms.mask_T), terms.mask_T.masked_fill(vetoed_T, 0.0), metrics_T)


class OffPolicySequenceMasking:
    """Takes responses of negative advantage out of the policy loss once the actor has left them too far.

    For a token of negative advantage the weight is 0 where (1 / |o|) sum_t log(pi_old(o_t) / pi(o_t)), over the trained
    tokens of its response, exceeds ``opsm_delta``; else it is 1. pi is the actor in this optimizer step; pi_old is the
    old policy of the loss: the actor before the rollout's first step, or the engine with ``use_rollout_logprobs``,
    which is what the paper has. As in the paper the divergence from the reference goes on counting; the mask stays as
    it came. Metrics a token: ``opsm_clipfrac``, 1 where the weight is 0; ``opsm_kl``, the mean that is compared, nats.

    Source: DeepSeek-V3.2 (2512.02556), section 3.1, "Off-Policy Sequence Masking".
    """

    def __init__(self, options: OffPolicyOptions, run: RunView) -> None:
        del run
        self._delta = options.opsm_delta

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Weights of 0 and 1, float32 [T]; the mask as it came.

        Raises:
            ValueError: the columns differ in length, or one that it reads is missing.
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
    """The log of the ratio that each token carries, [T]."""
    log_ratio_T = engine_log_ratio(terms)
    if level == "sequence":
        return _of_response(log_ratio_T, terms)
    if level == "geometric":
        return _mean_of_response(log_ratio_T, terms)
    return log_ratio_T


def _of_response(values_T: torch.Tensor, terms: CorrectionTerms) -> torch.Tensor:
    """The sum over each token's whole response, float64 [T]."""
    if terms.segments is None:
        raise ValueError(
            "segments is None; a correction that judges whole responses needs to know which tokens they are"
        )
    return terms.segments.spread(terms.segments.sums(values_T.double()))


def _mean_of_response(values_T: torch.Tensor, terms: CorrectionTerms) -> torch.Tensor:
    """The mean over the trained tokens of each token's response, float64 [T]; ``values_T`` is 0 at the others."""
    return _of_response(values_T, terms) / _of_response(terms.mask_T, terms).clamp(min=1.0)
