from __future__ import annotations

import math

import pytest
import torch

from slime_core import CorrectionTerms, RunView
from slime_offpolicy.options import OffPolicyOptions
from slime_offpolicy.tokens import IcePop, TruncatedImportanceSampling


def terms(ratios, *, mask=None) -> CorrectionTerms:
    engine_T = torch.linspace(-3, -1, len(ratios))
    return CorrectionTerms(
        log_probs_T=engine_T + torch.tensor(ratios).log(),
        rollout_log_probs_T=engine_T,
        mask_T=torch.ones(len(ratios)) if mask is None else torch.tensor(mask),
    )


def tis(low: float = 0.0, high: float = 2.0) -> TruncatedImportanceSampling:
    return TruncatedImportanceSampling(OffPolicyOptions(tis_clip=high, tis_clip_low=low), RunView())


def icepop(low: float = 0.0, high: float = 2.0) -> IcePop:
    return IcePop(OffPolicyOptions(tis_clip=high, tis_clip_low=low), RunView())


def test_weights_by_hand():
    # min(pi / mu, C): Yao et al. 2025; IMPALA (1802.01561), section 4.1.
    found = tis()(terms([0.25, 1.0, 1.5, 8.0]))
    assert found.weights_T.tolist() == pytest.approx([0.25, 1, 1.5, 2])
    assert found.mask_T.tolist() == [1, 1, 1, 1]
    assert found.metrics_T["tis"].tolist() == pytest.approx([0.25, 1, 1.5, 8])
    assert found.metrics_T["tis_abs"].tolist() == pytest.approx([0.75, 0, 0.5, 7], abs=1e-6)
    assert found.metrics_T["tis_clipfrac"].tolist() == [0, 0, 0, 1]


def test_both_bounds_are_settings():
    found = tis(low=0.5, high=0.9)(terms([0.25, 1.0, 8.0]))
    assert found.weights_T.tolist() == pytest.approx([0.5, 0.9, 0.9])


def test_equal_policies_change_nothing():
    assert tis()(terms([1.0, 1.0])).weights_T.tolist() == [1, 1]


def test_a_token_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    ratios = torch.rand(8).mul(4).tolist()
    order = torch.randperm(8)
    whole = tis()(terms(ratios)).weights_T
    moved = tis()(terms([ratios[i] for i in order])).weights_T
    assert moved.tolist() == pytest.approx(whole[order].tolist(), rel=1e-5)


def test_masked_and_impossible_tokens_leave_everything_finite():
    batch = terms([1.0, 1.0, 1.0], mask=[1.0, 0.0, 1.0])
    batch.rollout_log_probs_T[1] = math.nan
    batch.rollout_log_probs_T[2] = -math.inf  # the engine called it impossible
    found = tis()(batch)
    assert found.weights_T.tolist() == [1, 1, 2]
    assert all(bool(values_T.isfinite().all()) for values_T in found.metrics_T.values())


@pytest.mark.parametrize("make", [tis, icepop])
def test_bad_input_is_refused(make):
    with pytest.raises(ValueError, match=r"tis_clip_low is 3\.0 and tis_clip is 2\.0; accepted: 0 <= tis_clip_low"):
        make(low=3.0)
    short = CorrectionTerms(torch.zeros(2), torch.zeros(1), torch.ones(2))
    with pytest.raises(ValueError, match="log_probs_T and rollout_log_probs_T"):
        make()(short)


# --- IcePop -----------------------------------------------------------------------------------------------------------


def test_icepop_by_hand():
    # M(k) = k within [0.5, 5], else 0: Ling Team 2025 (2510.18855).
    found = icepop(low=0.5, high=5.0)(terms([0.25, 0.5000001, 1.0, 4.9, 8.0]))
    assert found.weights_T.tolist() == pytest.approx([0, 0.5, 1, 4.9, 0])
    assert found.mask_T.tolist() == [1, 1, 1, 1, 1]
    assert found.metrics_T["icepop"].tolist() == pytest.approx([0.25, 0.5, 1, 4.9, 8])
    assert found.metrics_T["icepop_clipfrac"].tolist() == [1, 0, 0, 0, 1]


def test_icepop_leaves_masked_and_impossible_tokens_finite():
    batch = terms([1.0, 1.0, 1.0], mask=[1.0, 0.0, 1.0])
    batch.rollout_log_probs_T[1] = math.nan
    batch.rollout_log_probs_T[2] = -math.inf
    found = icepop()(batch)
    assert found.weights_T[[0, 2]].tolist() == [1, 0]
    assert all(bool(values_T.isfinite().all()) for values_T in found.metrics_T.values())


def test_icepop_judges_each_token_by_itself():
    ratios = torch.rand(8, generator=torch.Generator().manual_seed(0)).mul(4)
    order = torch.arange(7, -1, -1)
    whole, moved = icepop()(terms(ratios.tolist())), icepop()(terms(ratios[order].tolist()))
    assert moved.weights_T.tolist() == pytest.approx(whole.weights_T[order].tolist(), rel=1e-5)
