"""The loss, in a file of its own because it imports torch."""

from __future__ import annotations

import torch

from acme_loss import SoftLossOptions
from slime_core import LossOutput, LossTerms


class SoftClip:
    """Policy gradient with a smooth bound on the ratio: ``-A * exp(width * tanh(log_ratio / width))`` a token."""

    def __init__(self, options: SoftLossOptions) -> None:
        self._width = options.width

    def __call__(self, terms: LossTerms) -> LossOutput:
        """Return the loss of each token, float32 [T]."""
        trained_T = terms.mask_T != 0
        log_ratio_T = (terms.log_probs_T - terms.old_log_probs_T).where(trained_T, 0.0)
        ratio_T = torch.exp(self._width * torch.tanh(log_ratio_T / self._width))
        loss_T = -ratio_T * terms.advantages_T.where(trained_T, 0.0)
        return LossOutput(loss_T, {"soft_ratio": ratio_T.detach()})
