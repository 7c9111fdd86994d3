"""PPO's advantages: generalised advantage estimation (GAE) over the values of a critic.

The core implements the rest of the algorithm (1707.06347): the clipped surrogate, the critic and its clipped loss.
Advantages are not whitened here; ``--normalize-advantages`` does that for any estimator.
"""

from __future__ import annotations

from slime_core import Reductions, ResponseTokens, TokenAdvantages
from slime_ppo.returns import generalized_advantages
from slime_ppo.rewards import token_rewards

__all__ = ["ppo"]


def ppo(batch: ResponseTokens, reduce: Reductions) -> TokenAdvantages:
    """Return generalised advantages over a critic's values (PPO, 1707.06347; GAE, 1506.02438).

    Over the trained tokens t = 1 .. T of a response, with the rewards r_t of :mod:`slime_ppo.rewards`::

        delta_t = r_t + gamma * V_(t+1) - V_t           V_(T+1) = 0
        A_t = sum over k >= t of (gamma * lambd)^(k - t) * delta_k
        R_t = A_t + V_t

    The values of masked tokens are not used: V_(t+1) is the value of the next trained token, after any tool output.

    Source: Schulman et al. 2015 (1506.02438), equation 16; the divergence inside the reward: Ouyang et al. 2022
    (2203.02155), section 3.5.

    Returns:
        Advantages and the returns that the critic learns, float32 [u], 0 where masked; the metric ``kl`` if ``kl_coef``
        is not 0.

    Raises:
        ValueError: ``values_U`` is None; or ``kl_coef`` is not 0 and the batch has no log-probabilities of the actor or
            of the reference.
    """
    del reduce  # GAE needs no statistics of the batch
    if batch.values_U is None:
        raise ValueError("ppo needs values_U, the values of a critic, but it is None")
    tokens = token_rewards(batch)
    estimates = generalized_advantages(
        tokens.rewards_T,
        values_T=batch.values_U[tokens.trained_U].double(),
        samples_T=tokens.samples_T,
        gamma=batch.settings.gamma,
        lambd=batch.settings.lambd,
    )
    return TokenAdvantages(
        tokens.spread(estimates.advantages_T), returns_U=tokens.spread(estimates.returns_T), metrics_U=tokens.metrics_U
    )
