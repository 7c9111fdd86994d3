"""Parts of unequal size over gloo, in processes of their own: what gathers, what scatters, and parts without rows."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_core.cpu.megatron import all_gather_parts, reduce_scatter_parts

SIZES = ((1, 3), (4, 0), (0, 0), (2, 2))
"""Rows of the two ranks, of one collective after another."""


def part(rank: int, rows: int) -> torch.Tensor:
    return torch.arange(2.0 * rows).reshape(rows, 2) + 100 * rank


def on_rank(rank: int, folder: Path) -> None:
    """Run as a program: a forked child would inherit the process group of another test."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))
    found = []
    for sizes in SIZES:
        gathered = all_gather_parts(part(rank, sizes[rank]), sizes)
        mine = reduce_scatter_parts(gathered * (1 + rank), sizes)
        found.append([list(gathered.shape), gathered.tolist(), mine.tolist()])
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[object]]]:
    folder = tmp_path_factory.mktemp("gloo")
    words = [[sys.executable, __file__, str(rank), str(folder)] for rank in (0, 1)]
    ranks = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for line in words]
    try:
        errors = [rank.communicate(timeout=1200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_every_rank_gathers_all_parts_in_order(found, number):
    whole = torch.cat([part(rank, rows) for rank, rows in enumerate(SIZES[number])])
    assert [rank[number][:2] for rank in found] == [[list(whole.shape), whole.tolist()]] * 2


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_every_rank_gets_its_rows_of_the_sum(found, number):
    sums = [3 * part(rank, rows) for rank, rows in enumerate(SIZES[number])]  # once from rank 0, twice from rank 1
    assert [rank[number][2] for rank in found] == [mine.tolist() for mine in sums]


if __name__ == "__main__":
    on_rank(int(sys.argv[1]), Path(sys.argv[2]))
