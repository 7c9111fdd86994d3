"""What is recorded of a case, and how far two records are from each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

__all__ = ["BOUNDS", "TRAINED_GRADIENT", "Difference", "Outcome", "compare", "failed"]

BOUNDS: Mapping[str, float] = {
    "loss": 1e-5,
    "metric": 1e-5,
    "grad_norm": 1e-5,
    "gradient": 1e-5,
    "change": 1e-3,
    "ranks": 0.0,
}
"""Largest difference in float32 that counts as equal; the order of additions alone makes some 1e-6."""

TRAINED_GRADIENT = 1e-4
"""Of the case ``trained``: the terms of its gradient nearly cancel, so that rounding counts for more. One rank alone is
then 1e-5 and more away from the same step in float64, as the table shows."""

SMALLEST = 2.4e-2
"""Metrics below this are compared in its multiples: of what is 0 up to rounding, nothing is left to be relative to. At
1e-5 that is 2.4e-7, the distance of two neighbouring float32 between 2 and 4, where log-probabilities are: ``ppo_kl``
is a difference of those."""


@dataclass(frozen=True)
class Outcome:
    """An entry an optimizer step: metrics, gradients before it and what it changed the weights by, by full names.

    ``metrics`` has one more where the rollout as a whole reports some: averages over the steps, a critic's among them.
    """

    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    changes: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def save(self, path: Path) -> None:
        torch.save(asdict(self), path)

    @classmethod
    def load(cls, path: Path) -> Outcome:
        return cls(**torch.load(path, weights_only=True))


@dataclass(frozen=True)
class Difference:
    """How far a layout is from what it is compared with: relative, the largest over both steps.

    Arguments:
        loss, grad_norm: of the loss and of the norm of the gradient.
        metric: of the worst metric; see ``SMALLEST``.
        gradient, change: largest relative L2 norm of the difference of one weight's gradient, and of what a step
            changed it by.
        ranks: largest absolute difference of what two ranks of the layout report or hold.
        where: quantity -> the step and the name of what is worst.
        seconds: that the case took, the start of its processes not included.
        failure: how the ranks ended instead; empty: they did not.
    """

    layout: str
    case: str
    loss: float = 0.0
    metric: float = 0.0
    grad_norm: float = 0.0
    gradient: float = 0.0
    change: float = 0.0
    ranks: float = 0.0
    where: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""

    def bound(self, quantity: str) -> float:
        """Of this case."""
        return TRAINED_GRADIENT if (self.case, quantity) == ("trained", "gradient") else BOUNDS[quantity]

    @property
    def broken(self) -> list[str]:
        """The quantities that are out of bounds; a NaN is."""
        return [name for name in BOUNDS if not getattr(self, name) <= self.bound(name)]

    @property
    def is_equal(self) -> bool:
        return not self.failure and not self.broken

    @property
    def is_noticed(self) -> bool:
        """Whether a mistake showed: in a number, or because the learner refused to go on; not if it just crashed."""
        return self.failure.startswith("slime_core.errors.") if self.failure else bool(self.broken)


def failed(layout: str, case: str, message: str) -> Difference:
    """The ranks came to no result."""
    return Difference(layout, case, failure=message)


def compare(layout: str, case: str, ranks: list[Outcome], expected: Outcome, *, seconds: float = 0.0) -> Difference:
    """Of the first rank to ``expected``, and of the other ranks to the first.

    Metrics are compared where both have them: plain torch has no learning rate. Layouts have to report the same ones,
    which :func:`_same_names` holds them to.
    """
    found = ranks[0]
    worst = {
        "metric": max(_metrics(found, expected)),
        "gradient": max(_distances(found.gradients, expected.gradients)),
        "change": max(_distances(found.changes, expected.changes)),
    }
    return Difference(
        layout,
        case,
        metric=worst["metric"][0],
        gradient=worst["gradient"][0],
        change=worst["change"][0],
        loss=_of_metric("loss", found, expected),
        grad_norm=_of_metric("grad_norm", found, expected),
        ranks=max((_rank_difference(rank, found) for rank in ranks[1:]), default=0.0),
        where={quantity: place for quantity, (_, place) in worst.items()},
        seconds=seconds,
    )


def _metrics(found: Outcome, expected: Outcome) -> Iterator[tuple[float, str]]:
    for number, (mine, theirs) in enumerate(zip(found.metrics, expected.metrics, strict=False)):
        _same_names(mine, theirs)
        for name in mine.keys() & theirs.keys():
            yield _relative(mine[name], theirs[name]), f"step {number}: {name}"


def _same_names(mine: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    beyond = sorted(theirs.keys() - mine.keys())
    if beyond:
        raise ValueError(f"metrics that are not reported: {beyond}")


def _of_metric(name: str, found: Outcome, expected: Outcome) -> float:
    pairs = zip(found.metrics, expected.metrics, strict=False)
    return max(_relative(mine[name], theirs[name]) for mine, theirs in pairs if name in theirs)


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), SMALLEST)


def _distances(
    found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]
) -> Iterator[tuple[float, str]]:
    """The relative distance of every tensor in every step; (0, "") first, so that ``max`` has an element."""
    yield 0.0, ""
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=False)):
        if mine.keys() != theirs.keys():
            raise ValueError(f"different weights: {sorted(mine.keys() ^ theirs.keys())}")
        for name in mine:
            distance = float((mine[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-30))
            yield distance, f"step {number}: {name}"


def _rank_difference(rank: Outcome, first: Outcome) -> float:
    numbers = [abs(a[name] - b[name]) for a, b in zip(rank.metrics, first.metrics, strict=True) for name in b]
    weights = [
        float((a[name] - b[name]).abs().max()) for a, b in zip(rank.changes, first.changes, strict=True) for name in b
    ]
    return max(*numbers, *weights)
