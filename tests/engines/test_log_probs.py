"""Log-probabilities and entropies with a vocabulary that is split over processes, against plain torch on all of it."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_core.ops.log_probs import log_probs_and_entropy

ROWS, TARGETS = torch.tensor([0, 1, 3, 3]), torch.tensor([4, 11, 0, 6])
SLOPES, BENDS, TEMPERATURE = torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.tensor([0.1, 1.0, -1.0, 0.5]), 0.7
CHUNKS = (None, 1, 2, 3)


def whole_logits() -> torch.Tensor:
    """A row that one rank dominates by far, among others."""
    logits_TV = 5 * torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    logits_TV[1, 2] += 1000
    return logits_TV


def on_rank(rank: int, size: int, folder: Path, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    found = []
    for chunk_size in CHUNKS:
        part_TV = whole_logits().chunk(size, dim=1)[rank].contiguous().requires_grad_() * 1
        log_probs_U, entropy_U = log_probs_and_entropy(
            part_TV,
            rows_U=ROWS,
            targets_U=TARGETS,
            temperature=TEMPERATURE,
            chunk_size=chunk_size,
            group=dist.group.WORLD,
            consume=True,
        )
        (slopes,) = torch.autograd.grad((log_probs_U * SLOPES).sum() + (entropy_U * BENDS).sum(), part_TV)
        found.append([one.detach().tolist() for one in (log_probs_U, entropy_U, slopes)])
    results.put((rank, found))
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 3])
def test_a_vocabulary_split_over_ranks_is_the_whole_one(tmp_path, size):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=on_rank, args=(rank, size, tmp_path, results)) for rank in range(size)]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=90) for _ in ranks)
    for process in ranks:
        process.join(timeout=30)
        assert process.exitcode == 0
    theirs = whole_logits().double().requires_grad_()
    log_p_UV = (theirs[ROWS] / TEMPERATURE).log_softmax(-1)
    expected_U, entropy_U = log_p_UV.gather(1, TARGETS[:, None])[:, 0], -(log_p_UV.exp() * log_p_UV).sum(-1)
    ((expected_U * SLOPES).sum() + (entropy_U * BENDS).sum()).backward()
    for each in zip(*(found[rank] for rank in range(size)), strict=True):
        assert all(one[:2] == each[0][:2] for one in each), "ranks do not agree to the bit"
        slopes = torch.tensor([one[2] for one in each]).permute(1, 0, 2).flatten(1)
        values_U, entropies_U = (torch.tensor(part) for part in each[0][:2])
        torch.testing.assert_close(values_U.double(), expected_U.detach(), rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(entropies_U.double(), entropy_U.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(slopes.double(), theirs.grad, rtol=1e-5, atol=1e-6)
