"""How far learner and engine stand apart, in a few numbers a token; measures, and changes nothing.

With d_t = log pi(o_t) - log mu(o_t), pi the learner and mu the engine that drew the tokens, over trained tokens:

    mismatch_kl          -d_t                     k1 estimate of KL(mu || pi), nats; of either sign
    mismatch_k3          exp(d_t) - 1 - d_t       k3 estimate of the same; never negative
    mismatch_chi2_token  exp(2 d_t) - 1           estimate of chi^2(pi || mu), of a token: the variance of its ratio
    mismatch_chi2_seq    exp(2 sum_t d_t) - 1     the same of a whole response
    mismatch_ppl_ratio   exp(mean_t(-d_t))        perplexity of a response under the learner, over that under the engine

The last two are one number a response, carried by each of its tokens. Exponents are held at 20 nats.

Sources: J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020), with the roles swapped, as
the engine drew the tokens; chi^2(p || q) = E_q[(p / q)^2] - 1.
"""

from __future__ import annotations

import torch

from slime_core.ops.policy import LARGEST_LOG_RATIO
from slime_core.plugins.contracts import Segments

__all__ = ["mismatch"]


def mismatch(
    log_probs_U: torch.Tensor, *, rollout_log_probs_U: torch.Tensor, mask_U: torch.Tensor, segments: Segments
) -> dict[str, torch.Tensor]:
    """The metrics above, each float32 [u], without gradient; 0 where nothing is trained.

    Arguments:
        log_probs_U: float32 [u], of the learner.
        rollout_log_probs_U: float32 [u], of the engine.
        mask_U: float32 [u], 1 where the token is trained.
    """
    trained_U = mask_U != 0
    apart_U = (log_probs_U.detach() - rollout_log_probs_U).where(trained_U, 0.0).double()
    counts_b = segments.sums(mask_U.double()).clamp(min=1.0)
    sums_b = segments.sums(apart_U)
    values = {
        "mismatch_kl": -apart_U,
        "mismatch_k3": _expm1(apart_U) - apart_U,
        "mismatch_chi2_token": _expm1(2 * apart_U),
        "mismatch_chi2_seq": segments.spread(_expm1(2 * sums_b)),
        "mismatch_ppl_ratio": segments.spread((-sums_b / counts_b).clamp(max=LARGEST_LOG_RATIO).exp()),
    }
    return {name: values_U.where(trained_U, 0.0).float() for name, values_U in values.items()}


def _expm1(exponent: torch.Tensor) -> torch.Tensor:
    return torch.expm1(exponent.clamp(max=LARGEST_LOG_RATIO))
