"""Collectives over parts of unequal size, which gloo has none of: parts are filled up to the largest, then cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["all_gather_parts", "reduce_scatter_parts"]


def all_gather_parts(
    part: torch.Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The parts of all ranks, one after another: ``[sum(sizes), ...]``, of the dtype of ``part``. Collective.

    Arguments:
        part: what this rank has, ``[sizes[its rank], ...]``.
        sizes: rows of each rank's part, in the order of the group, the same on every rank; 0: it has none.
        group: None: all ranks.
    """
    if not (most := max(sizes)):
        return part
    filled = _filled(part, most)
    gathered = part.new_empty(most * len(sizes), *part.shape[1:])
    dist.all_gather_into_tensor(gathered, filled, group=group)
    return torch.cat([rows[:size] for rows, size in zip(gathered.split(most), sizes, strict=True)])


def reduce_scatter_parts(
    whole: torch.Tensor, sizes: Sequence[int], *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """This rank's part of the sum of ``whole`` over all ranks: ``[sizes[its rank], ...]``. Collective.

    The derivative of :func:`all_gather_parts`.

    Arguments:
        whole: the parts one after another, ``[sum(sizes), ...]``; its sum over ranks is in its own dtype.
        sizes: rows of each rank's part, in the order of the group, the same on every rank; 0: it gets none.
        group: None: all ranks.
    """
    if not (most := max(sizes)):
        return whole
    filled = torch.cat([_filled(part, most) for part in whole.split(list(sizes))])
    mine = whole.new_empty(most, *whole.shape[1:])
    dist.reduce_scatter_tensor(mine, filled, group=group)
    return mine[: sizes[dist.get_rank(group)]]


def _filled(part: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])])
