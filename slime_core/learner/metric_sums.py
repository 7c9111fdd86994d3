"""Metrics of micro-batches, summed by name over micro-batches and ranks; a missing name counts as 0."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass(slots=True)
class MetricSums:
    """Weighted sums of a micro-batch by metric name, and maxima, which are at least 0; without gradient."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    largest: dict[str, torch.Tensor] = field(default_factory=dict)


def reduce_metrics(parts: Sequence[MetricSums], group: Any) -> dict[str, float]:
    """Sums and largest values over micro-batches and ranks, the same on every rank. Collective over ``group``.

    Ranks agree on the names first: the functions of a run may report other metrics for other samples.

    Arguments:
        parts: one a micro-batch; empty on all ranks of the group, or on none of them.
    """
    if not parts:
        return {}
    sums, largest = [part.sums for part in parts], [part.largest for part in parts]
    in_sums, in_largest = _agreed((_names(sums), _names(largest)), group)
    like = next(iter(sums[0].values()))
    added = _all([_stacked(sums, name, like).sum() for name in in_sums], dist.ReduceOp.SUM, group)
    highest = _all([_stacked(largest, name, like).max() for name in in_largest], dist.ReduceOp.MAX, group)
    return dict(zip((*in_sums, *in_largest), (*added, *highest), strict=True))


def average_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One number a name for all optimizer steps: the maximum of ``..._max_diff``, the mean of any other."""
    return {name: _over_steps(name, [step.get(name, 0.0) for step in steps]) for name in _names(steps)}


def _over_steps(name: str, values: list[float]) -> float:
    return max(values) if name.endswith("_max_diff") else sum(values) / len(values)


def _names(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every name once, in the order in which it comes up."""
    return list(dict.fromkeys(name for part in parts for name in part))


def _agreed(names: tuple[list[str], ...], group: Any) -> list[list[str]]:
    if group.size() == 1:
        return list(names)
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, names, group=group)
    return [sorted({name for rank in found for name in rank[place]}) for place in range(len(names))]


def _stacked(parts: Sequence[Mapping[str, torch.Tensor]], name: str, like: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.float64, device=like.device)
    return torch.stack([part.get(name, zero).double() for part in parts])


def _all(values: list[torch.Tensor], operation: Any, group: Any) -> list[float]:
    if not values:
        return []
    stacked = torch.stack(values)
    if group.size() > 1:
        dist.all_reduce(stacked, op=operation, group=group)
    numbers: list[float] = stacked.tolist()
    return numbers
