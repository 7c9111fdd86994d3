"""Policy losses for group-relative advantages: ``gspo`` and ``cispo``.

Both return one loss per token; the core averages. With the core's default, the mean over each response and then over
responses, gspo matches its paper; cispo's paper averages over all tokens (``--calculate-per-token-loss``).

Left out of CISPO: its unified form with a token mask (its equation 7), which is the task of a correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import LossOutput, LossTerms
from slime_core.ops.losses import LARGEST_LOG_RATIO, check_clip, clipped_surrogate

if TYPE_CHECKING:
    import torch

__all__ = ["cispo", "gspo"]


def gspo(terms: LossTerms) -> LossOutput:
    """Return the clipped surrogate with one importance ratio per response (GSPO, 2507.18071).

    The ratio of a response is the geometric mean of the ratios of its trained tokens. This is the token form,
    GSPO-token: each token has the response's ratio, whose gradient reaches that token alone,
    ``log s_t = sg(log s) + log_p_t - sg(log_p_t)``, where ``sg`` stops the gradient. If advantages are equal within a
    response, the gradient, averaged over the response, equals that of the plain form. If they differ, as with
    ``--use-opd``, each token uses the advantage at its position.

    Source: equations 7, 13 and 14 (section 4.3). The paper's clip ranges are about 3e-4: two orders of magnitude below
    those of token ratios.

    Returns:
        The loss of each token, float32 [T], with the metrics ``ratio``, ``clip_fraction``, ``dual_clip_fraction`` and
        ``ppo_kl``, each of the response.

    Raises:
        ValueError: ``segments`` is None, or a clip setting is out of range.
    """
    if terms.segments is None:
        raise ValueError("gspo needs the tokens of each response, but LossTerms.segments is None")
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


def cispo(terms: LossTerms) -> LossOutput:
    """Return the policy gradient loss weighted by clipped importance ratios (CISPO, MiniMax-M1, 2506.13585).

    ``-sg(clamp(ratio, 1 - eps_clip, 1 + eps_clip_high)) * A * log_prob``, where ``sg`` stops the gradient, so no
    token's gradient is clipped.

    Source: equations 4 and 5. The paper sets no lower bound (``--eps-clip 1``).

    Returns:
        The loss of each token, float32 [T], with the metrics ``ratio``, ``clip_fraction`` (the clip changed the ratio)
        and ``ppo_kl``.

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
