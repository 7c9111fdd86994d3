"""Log-probabilities and entropies with a vocabulary that is split over processes, against plain torch on all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_core.ops.log_probs import KeptTokens, log_probs_and_entropy

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


def on_rank(rank: int, size: int, folder: Path) -> None:
    """Run as a program: a forked child would inherit the process group of another test."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=600))
    found = []
    for chunk_size, kept in product(CHUNKS, (None, KEPT)):
        part_TV = whole_logits().chunk(size, dim=1)[rank].contiguous().requires_grad_() * 1
        log_probs_U, entropy_U = log_probs_and_entropy(
            part_TV,
            rows_U=ROWS,
            targets_U=TARGETS,
            temperature=TEMPERATURE,
            chunk_size=chunk_size,
            group=dist.group.WORLD,
            consume=True,
            kept=kept,
        )
        (slopes,) = torch.autograd.grad((log_probs_U * SLOPES).sum() + (entropy_U * BENDS).sum(), part_TV)
        found.append([one.detach().tolist() for one in (log_probs_U, entropy_U, slopes)])
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


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
def test_a_vocabulary_split_over_ranks_is_the_whole_one(tmp_path, size):
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(size), str(tmp_path)], stderr=subprocess.PIPE)
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=1200)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, errors
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for each, sets in zip(zip(*found, strict=True), cycle([None, SETS])):
        theirs = whole_logits().double().requires_grad_()
        expected_U, entropy_U = whole(theirs, sets)
        assert all(one[:2] == each[0][:2] for one in each), "ranks do not agree to the bit"
        slopes = torch.tensor([one[2] for one in each]).permute(1, 0, 2).flatten(1)
        values_U, entropies_U = (torch.tensor(part) for part in each[0][:2])
        torch.testing.assert_close(values_U.double(), expected_U.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(entropies_U.double(), entropy_U.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slopes.double(), theirs.grad, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    on_rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
