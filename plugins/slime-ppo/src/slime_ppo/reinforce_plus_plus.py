"""REINFORCE++: a return for each token, whitened over the global batch; no critic, and no groups.

Nothing of the paper's advantage (2501.03262) is left out. Its clipped loss is the core's ``clipped``, and the variant
with a group baseline is :mod:`slime_ppo.advantage`. Added: the discount ``gamma``, which the paper has at 1.
"""

from __future__ import annotations

import torch

from slime_core import Reductions, ResponseTokens, TokenAdvantages
from slime_core.ops.returns import discounted_returns

__all__ = ["ReinforcePlusPlus"]

# Under the square root, in the reward's unit squared: a batch without any difference gives 0, not a division by zero.
_EPS = 1e-8


class ReinforcePlusPlus:
    """Reward at the last trained token, less the divergence at every one; discounted, summed up and whitened.

    With trained tokens t = 1 .. T of a response, and the k1 estimate of the divergence from the reference::

        r_t = -kl_coef * KL_t + [t = T] * reward        KL_t = log pi_old(o_t) - log pi_ref(o_t)
        G_t = sum over k >= t of gamma^(k - t) * r_k
        A_t = (G_t - mean(G)) / std(G)                  over all trained tokens of all data-parallel ranks

    Masked tokens, such as what a tool wrote, are no steps: they are neither penalised nor discounted over. A response
    without a trained token takes no part.

    Source: REINFORCE++ (2501.03262), the advantage with its KL penalty in the reward and its normalisation over the
    global batch. With ``gamma`` at 1, G_t is the reward minus kl_coef times the sum of KL_k over k >= t, as there.
    """

    def __init__(self, options: object | None = None) -> None:
        del options

    def estimate(self, batch: ResponseTokens, reduce: Reductions) -> TokenAdvantages:
        """Advantages, float32 [u], 0 where masked, with the metrics ``returns`` (G) and ``kl``.

        Raises:
            ValueError: ``kl_coef`` is not 0, and the batch lacks log-probabilities of the actor or of the reference.
        """
        trained_U = batch.mask_U != 0
        samples_T, kl_U = batch.samples_U[trained_U], _divergence(batch)
        rewards_T = -batch.settings.kl_coef * kl_U[trained_U].double()
        last_T = _last_of_each(samples_T)
        rewards_T[last_T] += batch.rewards_B[samples_T[last_T]].double()
        returns_T = discounted_returns(rewards_T, samples_T=samples_T, gamma=batch.settings.gamma)
        metrics_U = {"returns": _spread(returns_T, trained_U)}
        if batch.settings.kl_coef:
            metrics_U["kl"] = kl_U
        return TokenAdvantages(_spread(_whitened(returns_T, reduce), trained_U), metrics_U=metrics_U)


def _divergence(batch: ResponseTokens) -> torch.Tensor:
    """The k1 estimate at every response token; 0 where nothing asks for it."""
    if not batch.settings.kl_coef:
        return torch.zeros_like(batch.mask_U)
    if batch.log_probs_U is None or batch.ref_log_probs_U is None:
        raise ValueError(
            f"kl_coef is {batch.settings.kl_coef:g}, which needs log_probs_U and ref_log_probs_U; found None"
        )
    return batch.log_probs_U - batch.ref_log_probs_U


def _last_of_each(samples_T: torch.Tensor) -> torch.Tensor:
    """Whether a token is the last one of its sample, bool [T]."""
    is_last_T = torch.ones_like(samples_T, dtype=torch.bool)
    is_last_T[:-1] = samples_T[1:] != samples_T[:-1]
    return is_last_T


def _whitened(values_T: torch.Tensor, reduce: Reductions) -> torch.Tensor:
    """Mean 0 and variance 1 over the tokens of all ranks, float64; two sums, so that large means cost no digits."""
    count = torch.tensor(float(len(values_T)), dtype=values_T.dtype, device=values_T.device)
    total, count = reduce.sum(torch.stack([values_T.sum(), count])).unbind()
    shifted_T = values_T - total / count.clamp(min=1)
    variance = reduce.sum(shifted_T.square().sum()) / count.clamp(min=1)
    return shifted_T / (variance + _EPS).sqrt()


def _spread(values_T: torch.Tensor, trained_U: torch.Tensor) -> torch.Tensor:
    """Values of the trained tokens at their places, float32 [u], 0 elsewhere."""
    spread_U = torch.zeros(trained_U.shape, device=trained_U.device)
    spread_U[trained_U] = values_T.float()
    return spread_U
