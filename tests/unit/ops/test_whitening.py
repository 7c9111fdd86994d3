from __future__ import annotations

import math

import pytest
import torch

from slime_core.ops.whitening import whitened


def values(count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def test_three_tokens_by_hand():
    # Mean 2, variance (1 + 1 + 4) / 3 = 2.
    found = whitened(torch.tensor([1.0, 1.0, 4.0]), mask_T=torch.ones(3))
    assert found.tolist() == pytest.approx([-1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)])


@pytest.mark.parametrize("hole", [math.nan, math.inf, 1e30])
def test_masked_tokens_may_hold_anything_and_get_zero(hole):
    found = whitened(torch.tensor([1.0, hole, 3.0]), mask_T=torch.tensor([1.0, 0.0, 1.0]))
    assert found.tolist() == pytest.approx([-1, 0, 1])


def test_permuted_tokens_give_permuted_values():
    values_T, order = values(40), torch.randperm(40, generator=torch.Generator().manual_seed(1))
    whole_T = whitened(values_T, mask_T=torch.ones(40))
    assert whitened(values_T[order], mask_T=torch.ones(40)).tolist() == pytest.approx(whole_T[order].tolist())


def test_a_large_mean_costs_no_digits():
    small_T = torch.tensor([0.0, 1.0, 2.0, 3.0])
    found = whitened(small_T + 2**20, mask_T=torch.ones(4))
    assert found.tolist() == pytest.approx(whitened(small_T, mask_T=torch.ones(4)).tolist())


def test_equal_advantages_no_trained_token_and_no_token_at_all_give_zeros():
    assert whitened(torch.full((3,), 0.1), mask_T=torch.ones(3)).tolist() == pytest.approx([0] * 3, abs=1e-9)
    assert whitened(torch.ones(2), mask_T=torch.zeros(2)).tolist() == [0, 0]
    assert whitened(torch.ones(0), mask_T=torch.ones(0)).tolist() == []


def test_columns_of_different_shape_are_refused():
    with pytest.raises(ValueError, match=r"values_T and mask_T .*\(3,\) and \(1,\)"):
        whitened(torch.ones(3), mask_T=torch.ones(1))
