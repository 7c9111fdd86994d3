"""``tis`` and ``icepop`` by hand; slime_testing's suite shows that neighbours and masked tokens change nothing."""

from __future__ import annotations

import math

import pytest
import torch

from slime_core import CorrectionOutput, CorrectionTerms
from slime_offpolicy.options import OffPolicyOptions
from slime_offpolicy.tokens import icepop, tis


def terms(ratios, *, mask=None) -> CorrectionTerms:
    engine_T = torch.linspace(-3, -1, len(ratios))
    return CorrectionTerms(
        log_probs_T=engine_T + torch.tensor(ratios).log(),
        rollout_log_probs_T=engine_T,
        mask_T=torch.ones(len(ratios)) if mask is None else torch.tensor(mask),
    )


def corrected(correction, batch: CorrectionTerms, low: float = 0.0, high: float = 2.0) -> CorrectionOutput:
    return correction(batch, OffPolicyOptions(tis_clip=high, tis_clip_low=low))


def test_tis_by_hand() -> None:
    # min(pi / mu, C): Yao et al. 2025; IMPALA (1802.01561), section 4.1.
    output = corrected(tis, terms([0.25, 1.0, 1.5, 8.0]))
    assert output.weights_T.tolist() == pytest.approx([0.25, 1, 1.5, 2])
    assert output.mask_T.tolist() == [1, 1, 1, 1]
    assert output.metrics_T["tis"].tolist() == pytest.approx([0.25, 1, 1.5, 8])
    assert output.metrics_T["tis_abs"].tolist() == pytest.approx([0.75, 0, 0.5, 7], abs=1e-6)
    assert output.metrics_T["tis_clipfrac"].tolist() == [0, 0, 0, 1]
    both = corrected(tis, terms([0.25, 1.0, 8.0]), low=0.5, high=0.9)
    assert both.weights_T.tolist() == pytest.approx([0.5, 0.9, 0.9])


def test_icepop_by_hand() -> None:
    # M(k) = k within [0.5, 5], else 0: Ling Team 2025 (2510.18855).
    output = corrected(icepop, terms([0.25, 0.5000001, 1.0, 4.9, 8.0]), low=0.5, high=5.0)
    assert output.weights_T.tolist() == pytest.approx([0, 0.5, 1, 4.9, 0])
    assert output.mask_T.tolist() == [1, 1, 1, 1, 1]
    assert output.metrics_T["icepop"].tolist() == pytest.approx([0.25, 0.5, 1, 4.9, 8])
    assert output.metrics_T["icepop_clipfrac"].tolist() == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(("correction", "weight"), [(tis, 2), (icepop, 0)])
def test_tokens_that_the_engine_called_impossible_leave_everything_finite(correction, weight) -> None:
    batch = terms([1.0, 1.0, 1.0], mask=[1.0, 0.0, 1.0])
    batch.rollout_log_probs_T[1], batch.rollout_log_probs_T[2] = math.nan, -math.inf
    output = corrected(correction, batch)
    assert output.weights_T.tolist() == [1, 1, weight]
    assert all(bool(values_T.isfinite().all()) for values_T in output.metrics_T.values())


@pytest.mark.parametrize("correction", [tis, icepop])
def test_columns_of_different_length_are_refused(correction) -> None:
    with pytest.raises(ValueError, match="log_probs_T and rollout_log_probs_T"):
        corrected(correction, CorrectionTerms(torch.zeros(2), torch.zeros(1), torch.ones(2)))
