"""REINFORCE++: a return for each token, whitened over the global batch, without a critic and without groups.

Nothing of the paper's advantage (2501.03262) is left out. Its clipped loss is the core's ``clipped``; the variant with
a group baseline is :mod:`slime_ppo.advantage`. Added: the discount ``gamma``, which is 1 in the paper.
"""

from __future__ import annotations

import torch

from slime_core import Reductions, ResponseTokens, TokenAdvantages
from slime_core.ops.whitening import whitened
from slime_ppo.returns import discounted_returns
from slime_ppo.rewards import token_rewards

__all__ = ["reinforce_plus_plus"]


def reinforce_plus_plus(batch: ResponseTokens, reduce: Reductions) -> TokenAdvantages:
    """Return each token's discounted return, whitened over the batch (REINFORCE++, 2501.03262).

    Over the trained tokens t = 1 .. T of a response, with the rewards r_t of :mod:`slime_ppo.rewards`::

        G_t = sum over k >= t of gamma^(k - t) * r_k
        A_t = (G_t - mean(G)) / std(G)                  over all trained tokens of all data-parallel ranks

    Source: the advantage with its KL penalty in the reward and its normalisation over the global batch. With ``gamma``
    at 1, G_t is the reward minus kl_coef times the sum of KL_k over k >= t, as there.

    Returns:
        Advantages, float32 [u], 0 where masked, with the metrics ``returns`` (G) and ``kl``.

    Raises:
        ValueError: ``kl_coef`` is not 0, and the batch has no log-probabilities of the actor or of the reference.
    """
    tokens = token_rewards(batch)
    returns_T = discounted_returns(tokens.rewards_T, samples_T=tokens.samples_T, gamma=batch.settings.gamma)
    metrics_U = {"returns": tokens.spread(returns_T), **tokens.metrics_U}
    advantages_T = whitened(returns_T, mask_T=torch.ones_like(returns_T), total=reduce.sum)
    return TokenAdvantages(tokens.spread(advantages_T), metrics_U=metrics_U)
