"""The correction itself, in a file of its own because it imports torch."""

from __future__ import annotations

from acme_correction import GentleOptions
from slime_core import CorrectionOutput, CorrectionTerms, RunView


class Gentle:
    """``min(ratio ** power, 2)``, a token."""

    def __init__(self, options: GentleOptions, run: RunView) -> None:
        del run
        self._power = options.power

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """One weight a token, float32 [T]; the mask as it came."""
        log_ratio_T = (terms.log_probs_T - terms.rollout_log_probs_T).where(terms.mask_T != 0, 0.0)
        weights_T = (self._power * log_ratio_T).exp().clamp(max=2.0)
        return CorrectionOutput(weights_T, terms.mask_T, {"gentle": weights_T})
