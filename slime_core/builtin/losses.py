"""The policy losses ``clipped`` and ``sft``, and the advantage estimator for ``sft``.

Losses are per token; the loss of masked tokens is exactly 0 and passes no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import GroupedRewards, LossOutput, LossTerms
from slime_core.ops.losses import clipped_surrogate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Clipped", "NegativeLogLikelihood", "NoAdvantage"]


class Clipped:
    """Clipped surrogate (PPO, 1707.06347), with clip-higher (2503.14476) and dual clip (1912.09729).

    Each token has a separate ratio; see :func:`slime_core.ops.losses.clipped_surrogate`. Metrics a token: ``ratio``,
    ``clip_fraction``, ``dual_clip_fraction``, and ``ppo_kl``, the k1 estimate of the divergence of the actor from the
    actor before this rollout's first step.
    """

    def __call__(self, terms: LossTerms) -> LossOutput:
        """Return the loss of each token, float32 [T].

        Raises:
            ValueError: the columns differ in length, or a clip setting is out of range.
        """
        trained_T = terms.mask_T != 0
        log_ratio_T = (terms.log_probs_T - terms.old_log_probs_T).where(trained_T, 0.0)
        surrogate = clipped_surrogate(
            log_ratio_T,
            advantages_T=terms.advantages_T.where(trained_T, 0.0),
            eps_clip=terms.settings.eps_clip,
            eps_clip_high=terms.settings.eps_clip_high,
            eps_clip_c=terms.settings.eps_clip_c,
        )
        return LossOutput(surrogate.loss_T, surrogate.metrics(log_ratio_T))


class NegativeLogLikelihood:
    """Minus the log-probability of each trained token, for supervised fine-tuning on the responses."""

    def __call__(self, terms: LossTerms) -> LossOutput:
        """Return the loss of each token, float32 [T]."""
        return LossOutput(-terms.log_probs_T.where(terms.mask_T != 0, 0.0), {})


class NoAdvantage:
    """Advantage 0 for every sample, for supervised fine-tuning (--generate-function from_label)."""

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Return zeros, float32 [B]."""
        import numpy as np

        return np.zeros(len(batch), np.float32)
