"""Log-probabilities from hidden states and output weights, against plain torch on all logits at once."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slime_core.errors import RunError
from slime_core.ops.log_probs import KeptTokens, log_probs_and_entropy, projected_log_probs

ROWS, TARGETS = torch.tensor([6, 2, 2, 0, 4, 6]), torch.tensor([3, 1, 9, 0, 1, 4])
SLOPES, BENDS = torch.arange(6) - 1.5, torch.arange(6) + 0.5
SETS = ([3, 5], [], [9, 0, 1], [], [1], [4, 10])
KEPT = KeptTokens(torch.tensor([one for ids in SETS for one in ids]), torch.tensor([len(ids) for ids in SETS]))
CHUNKS = [None, 1, 2, 4, 5, 100]


def factors(dtype: torch.dtype, *, rows: int = 8, width: int = 11, size: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(number, size, generator=generator).mul(2).to(dtype).requires_grad_() for number in (rows, width)
    ]


def test_a_product_that_bfloat16_cannot_hold():
    # The logits are 16 + 1/16 and 16; in bfloat16 both are 16, and the tokens look equally likely.
    hidden = torch.tensor([[16.0, 1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 1 / 16], [1.0, 0.0]], dtype=torch.bfloat16)
    place = {"rows_U": torch.tensor([0, 0]), "targets_U": torch.tensor([0, 1])}
    exact = [-math.log1p(math.exp(-1 / 16)), -math.log1p(math.exp(1 / 16))]
    found_U, entropy_U = projected_log_probs(hidden, weight, **place)
    assert found_U.tolist() == pytest.approx(exact, abs=1e-6)
    p = math.exp(exact[0])
    assert entropy_U is not None
    assert entropy_U.tolist() == pytest.approx([-p * exact[0] - (1 - p) * exact[1]] * 2, abs=1e-6)
    assert log_probs_and_entropy(hidden @ weight.t(), **place)[0].tolist() == pytest.approx([-math.log(2)] * 2)


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_values_and_gradients_are_those_of_the_whole_logits(chunk_size, kept):
    ours, theirs = factors(torch.float64), factors(torch.float64)
    how = {"rows_U": ROWS, "targets_U": TARGETS, "temperature": 0.7, "kept_tokens": kept}
    results = projected_log_probs(*ours, chunk_size=chunk_size, **how)
    expected = log_probs_and_entropy(theirs[0] @ theirs[1].t(), **how)
    gradients = []
    for (log_probs_U, entropy_U), of in ((results, ours), (expected, theirs)):
        gradients.append(torch.autograd.grad((log_probs_U * SLOPES).sum() + (entropy_U * BENDS).sum(), of))
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_gradients_are_the_derivatives(chunk_size):
    def values(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return projected_log_probs(
            hidden, weight, rows_U=ROWS, targets_U=TARGETS, chunk_size=chunk_size, kept_tokens=KEPT
        )

    assert torch.autograd.gradcheck(values, factors(torch.float64))


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("trained", [0, 1])
def test_a_frozen_factor_and_a_result_without_slope_change_nothing_else(part, trained):
    both = factors(torch.float64)
    alone = factors(torch.float64)
    alone[1 - trained].requires_grad_(False)
    how = {"rows_U": ROWS, "targets_U": TARGETS, "chunk_size": 2}
    expected = torch.autograd.grad(projected_log_probs(*both, **how)[part].sum(), both)[trained]
    assert torch.equal(torch.autograd.grad(projected_log_probs(*alone, **how)[part].sum(), alone[trained])[0], expected)


def test_without_a_token_the_gradients_are_zero():
    # A context-parallel rank may have none, and its gradients are summed with those of others.
    hidden, weight = factors(torch.bfloat16)
    none = torch.zeros(0, dtype=torch.int64)
    found_U, entropy_U = projected_log_probs(hidden, weight, rows_U=none, targets_U=none, chunk_size=2)
    assert entropy_U is not None
    (found_U.sum() + entropy_U.sum()).backward()
    for factor in (hidden, weight):
        assert torch.equal(factor.grad, torch.zeros_like(factor))


class Largest(TorchDispatchMode):
    """Notes the largest tensor that an operation returns, in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors: Iterator[torch.Tensor] = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.numbers = max([self.numbers, *(tensor.numel() for tensor in tensors)])
        return result


def test_no_step_has_more_than_a_chunk_of_logits():
    hidden, weight = factors(torch.bfloat16, rows=64, width=1000)
    with Largest() as largest:
        found_U, _ = projected_log_probs(
            hidden, weight, rows_U=torch.arange(64), targets_U=torch.arange(64), chunk_size=16
        )
        torch.autograd.grad(found_U.sum(), (hidden, weight))
    assert largest.numbers == 8 * 1000  # half of the chunk is for the numbers that are computed from it


def test_a_second_derivative_is_refused():
    hidden, weight = factors(torch.float64)
    found_U, _ = projected_log_probs(hidden, weight, rows_U=ROWS, targets_U=TARGETS)
    with pytest.raises(RunError, match="create_graph"):
        torch.autograd.grad(found_U.sum(), (hidden, weight), create_graph=True)
