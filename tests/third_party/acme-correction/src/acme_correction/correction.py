"""The correction, in a file of its own because it works with torch."""

from __future__ import annotations

from acme_correction import GentleOptions
from slime_core import CorrectionOutput, CorrectionTerms


class Gentle:
    """A power of the importance ratio, at most 2: ``min(ratio ** power, 2)`` for each token."""

    def __init__(self, options: GentleOptions) -> None:
        self._power = options.power

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Return one weight a token, float32 [T], and the mask unchanged."""
        log_ratio_T = (terms.log_probs_T - terms.rollout_log_probs_T).where(terms.mask_T != 0, 0.0)
        weights_T = (self._power * log_ratio_T).exp().clamp(max=2.0)
        return CorrectionOutput(weights_T, terms.mask_T, {"gentle": weights_T})
