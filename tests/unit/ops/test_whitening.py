from __future__ import annotations

import math
from itertools import chain

import pytest
import torch

from slime_core.ops.whitening import whitened


def values(count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def over_shards(parts, masks):
    """What every shard finds, its sums added up over all of them; both sums are taken before any shard goes on."""
    first = [torch.stack([(v * m).double().sum(), m.double().sum()]) for v, m in zip(parts, masks, strict=True)]
    mean = sum(first)[0] / sum(first)[1].clamp(min=1)
    squares = sum(((v.double() - mean) * m).square().sum() for v, m in zip(parts, masks, strict=True))

    def shard(v, m):
        sums = iter([sum(first), squares])
        held = iter([torch.stack([(v * m).double().sum(), m.double().sum()]), ((v.double() - mean) * m).square().sum()])

        def total(mine):
            assert torch.allclose(mine, next(held))
            return next(sums)

        return whitened(v, mask_T=m, total=total)

    return [shard(v, m) for v, m in zip(parts, masks, strict=True)]


def test_three_tokens_by_hand():
    # Mean 2, variance (1 + 1 + 4) / 3 = 2.
    found = whitened(torch.tensor([1.0, 1.0, 4.0]), mask_T=torch.ones(3))
    assert found.tolist() == pytest.approx([-1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)])


def test_mean_and_variance_are_those_of_the_trained_tokens():
    mask_T = (torch.arange(50) % 3 != 0).float()
    found_T = whitened(values(50), mask_T=mask_T)[mask_T != 0].double()
    assert found_T.mean().item() == pytest.approx(0, abs=1e-7)
    assert found_T.var(correction=0).item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("hole", [math.nan, math.inf, 1e30])
def test_masked_tokens_may_hold_anything_and_get_zero(hole):
    found = whitened(torch.tensor([1.0, hole, 3.0]), mask_T=torch.tensor([1.0, 0.0, 1.0]))
    assert found.tolist() == pytest.approx([-1, 0, 1])


def test_the_split_over_ranks_changes_nothing_but_rounding():
    values_T, mask_T = values(40), (torch.arange(40) % 4 != 1).float()
    whole_T = whitened(values_T, mask_T=mask_T)
    for sizes in ([40], [13, 27], [1, 2, 37], [0, 40], [20, 0, 20]):
        parts = over_shards(values_T.split(sizes), mask_T.split(sizes))
        assert list(chain.from_iterable(part.tolist() for part in parts)) == pytest.approx(whole_T.tolist(), abs=1e-6)


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
