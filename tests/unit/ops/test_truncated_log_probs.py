"""Log-probabilities over what top-p and top-k left: by hand, and against a masked log-softmax."""

from __future__ import annotations

import math

import pytest
import torch

from slime_core.ops.log_probs import KeptTokens, log_probs_and_entropy

ROWS, TARGETS = torch.tensor([0, 1, 3, 3, 5]), torch.tensor([4, 10, 0, 6, 2])
SETS = [[4, 1], [10], [0, 2, 3, 7], [], [6, 2]]
"""The candidates of each token; the fourth has all, and shares its row with the third."""

SLOPES, BENDS = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0]), torch.tensor([0.1, 1.0, -1.0, 0.5, 0.0])


def sets(*ids: list[int]) -> KeptTokens:
    return KeptTokens(torch.tensor([one for part in ids for one in part]), torch.tensor([len(part) for part in ids]))


def logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(6, 11, generator=torch.Generator().manual_seed(0))).to(dtype)


def masked(logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch in float64, on logits divided by 0.7; and the entropy of the whole vocabulary."""
    scaled_UV = logits_TV[ROWS] / 0.7
    left_out_UV = torch.zeros_like(scaled_UV, dtype=torch.bool)
    for place, ids in enumerate(SETS):
        left_out_UV[place] = bool(ids)
        left_out_UV[place, ids] = False
    logs_UV = scaled_UV.masked_fill(left_out_UV, -torch.inf).log_softmax(-1)
    whole_UV = scaled_UV.log_softmax(-1)
    return logs_UV.gather(1, TARGETS[:, None])[:, 0], -(whole_UV.exp() * whole_UV).sum(-1)


def test_two_of_three_tokens_by_hand() -> None:
    """Logits log 1, log 2, log 5 and the set of the first two: 1/3, with slopes 1 - 1/3, -2/3 and none."""
    logits_TV = torch.tensor([[1.0, 2.0, 5.0]]).log().requires_grad_()
    first = torch.tensor([0])
    log_probs_U, entropy_U = log_probs_and_entropy(logits_TV, rows_U=first, targets_U=first, kept_tokens=sets([0, 1]))
    log_probs_U.sum().backward()
    assert log_probs_U.item() == pytest.approx(math.log(1 / 3), abs=1e-6)
    assert logits_TV.grad[0].tolist() == pytest.approx([2 / 3, -2 / 3, 0], abs=1e-6)
    assert entropy_U.item() == pytest.approx(-sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8)), abs=1e-6)


@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3])
def test_values_and_gradients_are_those_of_a_masked_log_softmax(chunk_size: int | None, consume: bool) -> None:
    ours, theirs = logits().requires_grad_(), logits().double().requires_grad_()
    log_probs_U, entropy_U = log_probs_and_entropy(
        ours * 1,
        rows_U=ROWS,
        targets_U=TARGETS,
        temperature=0.7,
        chunk_size=chunk_size,
        consume=consume,
        kept_tokens=sets(*SETS),
    )
    ((log_probs_U * SLOPES).sum() + (entropy_U * BENDS).sum()).backward()
    expected_U, entropies_U = masked(theirs)
    ((expected_U * SLOPES).sum() + (entropies_U * BENDS).sum()).backward()
    torch.testing.assert_close(log_probs_U.double(), expected_U, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy_U.double(), entropies_U, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=1e-5)


def test_one_chunk_size_gives_the_bits_of_another() -> None:
    def found(chunk_size: int | None) -> list[list[float]]:
        part_TV = logits().requires_grad_()
        how = {"rows_U": ROWS, "targets_U": TARGETS, "kept_tokens": sets(*SETS), "chunk_size": chunk_size}
        log_probs_U, _ = log_probs_and_entropy(part_TV, **how)
        log_probs_U.sum().backward()
        return [log_probs_U.tolist(), *part_TV.grad.tolist()]

    assert found(None) == found(1) == found(4)


def test_a_set_of_unlikely_tokens_keeps_its_proportions() -> None:
    """After weight updates all kept tokens may be unlikely; a softmax over the whole row would round them to zero."""
    logits_TV = torch.tensor([[0.0, 1.0, 500.0]], requires_grad=True)
    first = torch.tensor([0])
    log_probs_U, _ = log_probs_and_entropy(logits_TV, rows_U=first, targets_U=first, kept_tokens=sets([0, 1]))
    log_probs_U.sum().backward()
    assert log_probs_U.item() == pytest.approx(-math.log1p(math.e), abs=1e-6)
    assert logits_TV.grad[0].tolist() == pytest.approx([1 - 1 / (1 + math.e), -math.e / (1 + math.e), 0], abs=1e-6)
