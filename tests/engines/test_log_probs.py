"""Log-probabilities and entropies with a vocabulary that is split over processes, against plain torch on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_core.ops.log_probs import KeptTokens, log_probs_and_entropy
from tests.engines.learners import Make

ROWS, TARGETS = torch.tensor([0, 1, 3, 3]), torch.tensor([4, 11, 0, 6])
SLOPES, BENDS, TEMPERATURE = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.tensor([0.1, 1.0, -1.0, 0.5]), 0.7
CHUNKS = (None, 1, 2, 3)
SETS = ([4, 0, 11], [2, 11], [], [6, 5, 8])
"""The candidates of each token; one rank holds most of those of the second token, and another none."""

KEPT = KeptTokens(torch.tensor([one for ids in SETS for one in ids]), torch.tensor([len(ids) for ids in SETS]))


def whole_logits() -> torch.Tensor:
    """A row that one rank dominates by far, among others."""
    logits_TV = 5 * torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    logits_TV[1, 2] += 1000
    return logits_TV


def on_rank(make: Make, store: Path) -> list[list[torch.Tensor]]:
    """Log-probs, entropies and gradients of each chunk size, of all tokens and of the candidates."""
    make.join(store)
    results = []
    for chunk_size, kept in product(CHUNKS, (None, KEPT)):
        part_TV = whole_logits().chunk(make.num_ranks, dim=1)[make.rank].contiguous().requires_grad_() * 1
        log_probs_U, entropy_U = log_probs_and_entropy(
            part_TV,
            rows_U=ROWS,
            targets_U=TARGETS,
            temperature=TEMPERATURE,
            chunk_size=chunk_size,
            group=dist.group.WORLD,
            consume=True,
            kept_tokens=kept,
        )
        (slopes,) = torch.autograd.grad((log_probs_U * SLOPES).sum() + (entropy_U * BENDS).sum(), part_TV)
        results.append([log_probs_U.detach(), entropy_U.detach(), slopes])
    return results


def whole(theirs: torch.Tensor, sets: Sequence[Sequence[int]] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs over ``sets`` and entropies from plain torch, with the gradient in ``theirs``."""
    log_p_UV = (theirs[ROWS] / TEMPERATURE).log_softmax(-1)
    left_out_UV = torch.zeros_like(log_p_UV, dtype=torch.bool)
    for place, ids in enumerate(sets or ()):
        left_out_UV[place] = bool(ids)
        left_out_UV[place, list(ids)] = False
    cut_UV = (theirs[ROWS] / TEMPERATURE).masked_fill(left_out_UV, -torch.inf).log_softmax(-1)
    expected_U, entropy_U = cut_UV.gather(1, TARGETS[:, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)
    ((expected_U * SLOPES).sum() + (entropy_U * BENDS).sum()).backward()
    return expected_U, entropy_U


@pytest.mark.parametrize("size", [2, 3])
def test_a_vocabulary_split_over_ranks_is_the_whole_one(learners, tmp_path, size) -> None:
    ranks = learners(partial(on_rank, store=tmp_path / "store"), ranks=size)
    for results, sets in zip(zip(*ranks, strict=True), cycle([None, SETS])):
        theirs = whole_logits().double().requires_grad_()
        expected_U, entropy_U = whole(theirs, sets)
        values_U, entropies_U, _ = results[0]
        assert all(torch.equal(values_U, other[0]) and torch.equal(entropies_U, other[1]) for other in results)
        slopes = torch.cat([result[2] for result in results], dim=1)
        torch.testing.assert_close(values_U.double(), expected_U.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(entropies_U.double(), entropy_U.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slopes.double(), theirs.grad, rtol=1e-5, atol=1e-6)
