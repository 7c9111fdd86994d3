"""Policy losses for group-relative advantages: ``gspo`` and ``cispo``.

Both return one loss per token; the core averages. With the core's default, the mean over each response and then over
responses, gspo matches its paper; cispo's paper averages over all tokens (``--calculate-per-token-loss``).

Left out of CISPO: its unified form with a token mask (its equation 7), which is the task of a correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import LossOutput, LossTerms, RunView
from slime_core.ops.losses import LARGEST_LOG_RATIO, check_clip, clipped_surrogate
from slime_grpo.options import GrpoOptions

if TYPE_CHECKING:
    import torch

__all__ = ["ClippedImportance", "SequenceClipped"]


class SequenceClipped:
    """GSPO: clipped surrogate with one importance ratio per response, the geometric mean of its tokens' ratios.

    This is the token form, GSPO-token: each token has the response's ratio, whose gradient reaches that token alone,
    ``log s_t = sg(log s) + log_p_t - sg(log_p_t)``, where ``sg`` stops the gradient. If advantages are equal within a
    response, the gradient, averaged over the response, equals that of the plain form. If they differ, as with
    ``--use-opd``, each token uses its own advantage.

    Source: Group Sequence Policy Optimization (2507.18071), equations 7, 13 and 14 (section 4.3); the mean runs over
    trained tokens. The paper's clip ranges are about 3e-4: two orders of magnitude below those of token ratios.

    Metrics a token: ``ratio``, ``clip_fraction``, ``dual_clip_fraction`` and ``ppo_kl``, each of the response.
    """

    def __init__(self, options: GrpoOptions, run: RunView) -> None:
        del options, run

    def __call__(self, terms: LossTerms) -> LossOutput:
        """Return the loss of each token, float32 [T]; its gradient reaches that token alone.

        Raises:
            ValueError: ``segments`` is None, or a clip setting is out of range.
        """
        if terms.segments is None:
            raise ValueError("gspo needs to know which tokens form a response: LossTerms.segments is None")
        trained_T = terms.mask_T != 0
        log_ratio_T = (terms.log_probs_T - terms.old_log_probs_T).where(trained_T, 0.0)
        tokens_b = terms.segments.sums(trained_T.to(log_ratio_T.dtype)).clamp(min=1.0)
        mean_b = terms.segments.sums(log_ratio_T.detach()) / tokens_b
        of_response_T = terms.segments.spread(mean_b).where(trained_T, 0.0)
        surrogate = clipped_surrogate(
            of_response_T + (log_ratio_T - log_ratio_T.detach()),
            advantages_T=terms.advantages_T.where(trained_T, 0.0),
            eps_clip=terms.settings.eps_clip,
            eps_clip_high=terms.settings.eps_clip_high,
            eps_clip_c=terms.settings.eps_clip_c,
        )
        return LossOutput(surrogate.loss_T, surrogate.metrics(of_response_T))


class ClippedImportance:
    """CISPO: minus log-probability times advantage, weighted by the clipped importance ratio; no gradient is clipped.

    ``-sg(clamp(ratio, 1 - eps_clip, 1 + eps_clip_high)) * A * log_prob``, where ``sg`` stops the gradient.

    Source: MiniMax-M1 (2506.13585), equations 4 and 5. The paper sets no lower bound (``--eps-clip 1``).

    Metrics a token: ``ratio``, ``clip_fraction`` (the clip changed the ratio) and ``ppo_kl``.
    """

    def __init__(self, options: GrpoOptions, run: RunView) -> None:
        del options, run

    def __call__(self, terms: LossTerms) -> LossOutput:
        """Return the loss of each token, float32 [T].

        Raises:
            ValueError: a clip setting is out of range.
        """
        low, high = check_clip(terms.settings.eps_clip, terms.settings.eps_clip_high)
        trained_T = terms.mask_T != 0
        log_probs_T = terms.log_probs_T.where(trained_T, 0.0)
        log_ratio_T: torch.Tensor = (log_probs_T - terms.old_log_probs_T.where(trained_T, 0.0)).detach()
        ratio_T = log_ratio_T.clamp(max=LARGEST_LOG_RATIO).exp()
        weight_T = ratio_T.clamp(1.0 - low, 1.0 + high)
        loss_T = -weight_T * terms.advantages_T.where(trained_T, 0.0) * log_probs_T
        clipped_T = (weight_T != ratio_T).to(ratio_T.dtype)
        return LossOutput(loss_T, {"ratio": ratio_T, "clip_fraction": clipped_T, "ppo_kl": -log_ratio_T})
