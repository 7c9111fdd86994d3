from __future__ import annotations

import math

import pytest
import torch

from slime_core.learner.objective import mismatch_metrics
from slime_testing.packed import SequenceSums


def measure(ratios, *, lengths, mask=None):
    rollout_U = torch.linspace(-3, -1, len(ratios))
    found = mismatch_metrics(
        rollout_U + torch.tensor(ratios).log(),
        rollout_log_probs_U=rollout_U,
        mask_U=torch.ones(len(ratios)) if mask is None else torch.tensor(mask),
        segments=SequenceSums(lengths),
    )
    return {name: values_U.tolist() for name, values_U in found.items()}


def test_two_responses_by_hand():
    found = measure([2.0, 0.25, 1.0], lengths=[2, 1])
    half = math.log(2)
    assert found["mismatch_kl"] == pytest.approx([-half, 2 * half, 0], abs=1e-6)
    assert found["mismatch_k3"] == pytest.approx([1 - half, -0.75 + 2 * half, 0], abs=1e-6)
    assert found["mismatch_chi2_token"] == pytest.approx([3, 1 / 16 - 1, 0], abs=1e-6)
    assert found["mismatch_chi2_seq"] == pytest.approx([0.25 - 1] * 2 + [0], abs=1e-6)
    assert found["mismatch_ppl_ratio"] == pytest.approx([math.sqrt(2)] * 2 + [1])


def test_the_means_over_the_engines_own_tokens_are_the_divergences():
    engine_V, learner_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    found = mismatch_metrics(
        learner_V.log(), rollout_log_probs_U=engine_V.log(), mask_U=torch.ones(3), segments=SequenceSums([1, 1, 1])
    )
    mean = {name: float((engine_V * values_V).sum()) for name, values_V in found.items()}
    exact = float((engine_V * (engine_V / learner_V).log()).sum())
    assert mean["mismatch_kl"] == pytest.approx(exact, abs=1e-6)
    assert mean["mismatch_k3"] == pytest.approx(exact, abs=1e-6)
    chi2 = float(((learner_V - engine_V).square() / engine_V).sum())
    assert mean["mismatch_chi2_token"] == pytest.approx(chi2, abs=1e-6)


def test_masked_tokens_take_no_part_and_everything_stays_finite():
    clean = measure([2.0, 1.0, 0.5], lengths=[3], mask=[1.0, 0.0, 1.0])
    holed = measure([2.0, math.nan, 0.5], lengths=[3], mask=[1.0, 0.0, 1.0])
    assert clean == holed
    assert clean["mismatch_ppl_ratio"] == pytest.approx([1, 0, 1])
    wild = measure([1e30, 1e-30], lengths=[2])
    assert all(math.isfinite(value) for values in wild.values() for value in values)
