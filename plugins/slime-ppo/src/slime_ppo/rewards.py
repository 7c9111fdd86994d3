"""Token-level rewards, as the token-level estimators of this package use them.

Masked tokens, such as tool output, are no steps: they have no penalty and no discount. Responses without a trained
token are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slime_core import ResponseTokens

__all__ = ["TokenRewards", "token_rewards"]


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """The T trained tokens among u response tokens.

    Arguments:
        rewards_T: float64 [T].
        samples_T: int64 [T], the response of each token; ascending.
        trained_U: bool [u], True for the trained tokens.
        metrics_U: ``kl``, float32 [u], if ``kl_coef`` is not 0; else empty.
    """

    rewards_T: torch.Tensor
    samples_T: torch.Tensor
    trained_U: torch.Tensor
    metrics_U: dict[str, torch.Tensor]

    def spread(self, values_T: torch.Tensor) -> torch.Tensor:
        """Scatter values of the trained tokens to their places in the response tokens, float32 [u], 0 elsewhere."""
        spread_U = torch.zeros(self.trained_U.shape, device=self.trained_U.device)
        spread_U[self.trained_U] = values_T.float()
        return spread_U


def token_rewards(batch: ResponseTokens) -> TokenRewards:
    """Return the reward at the last trained token, minus the divergence from the reference at every token.

    With trained tokens t = 1 .. T of a response, and the k1 estimate of the divergence::

        r_t = -kl_coef * KL_t + [t = T] * reward        KL_t = log pi_old(o_t) - log pi_ref(o_t)

    Raises:
        ValueError: ``kl_coef`` is not 0, and the batch has no log-probabilities of the actor or of the reference.
    """
    trained_U = batch.mask_U != 0
    samples_T, kl_U = batch.samples_U[trained_U], _divergence(batch)
    rewards_T = -batch.settings.kl_coef * kl_U[trained_U].double()
    last_T = _last_of_each(samples_T)
    rewards_T[last_T] += batch.rewards_B[samples_T[last_T]].double()
    return TokenRewards(rewards_T, samples_T, trained_U, {"kl": kl_U} if batch.settings.kl_coef else {})


def _divergence(batch: ResponseTokens) -> torch.Tensor:
    """Return the k1 estimate at every response token; all 0 if ``kl_coef`` is 0."""
    if not batch.settings.kl_coef:
        return torch.zeros_like(batch.mask_U)
    if batch.log_probs_U is None or batch.ref_log_probs_U is None:
        raise ValueError(
            f"kl_coef is {batch.settings.kl_coef:g}, which needs log_probs_U and ref_log_probs_U; found None"
        )
    return batch.log_probs_U - batch.ref_log_probs_U


def _last_of_each(samples_T: torch.Tensor) -> torch.Tensor:
    """Return True for each token that is the last of its sample, bool [T]."""
    is_last_T = torch.ones_like(samples_T, dtype=torch.bool)
    is_last_T[:-1] = samples_T[1:] != samples_T[:-1]
    return is_last_T
