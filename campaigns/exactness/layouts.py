"""On how many ranks a case runs and how these cut the model; and which cases run where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slime_core.modeling.layout import ParallelLayout

__all__ = ["LAYOUTS", "ONE", "PLAIN", "SMALL", "WHOLE", "Layout"]

PLAIN, ONE = "torch", "one rank"
"""What one rank is compared with; and what all layouts are."""


@dataclass(frozen=True)
class Layout:
    """A number of processes, and how they share the model; what is left of them is data parallel."""

    name: str
    ranks: int
    parallel: ParallelLayout = field(default_factory=ParallelLayout)


_ALL = (
    Layout(ONE, 1),
    Layout("DP2", 2),
    Layout("TP2", 2, ParallelLayout(tensor=2)),
    Layout("TP2 SP", 2, ParallelLayout(tensor=2, sequence=True)),
    Layout("PP2", 2, ParallelLayout(pipeline=2)),
    Layout("PP2xVPP2", 2, ParallelLayout(pipeline=2, virtual_pipeline=2)),
    Layout("CP2", 2, ParallelLayout(context=2)),
    Layout("EP2", 2, ParallelLayout(expert=2)),
    Layout("TP2 SPxEP2 ETP1", 2, ParallelLayout(tensor=2, expert=2, expert_tensor=1, sequence=True)),
    Layout("DP4", 4),
    Layout("CP4", 4, ParallelLayout(context=4)),
    Layout("TP2xPP2", 4, ParallelLayout(tensor=2, pipeline=2)),
    Layout("TP2 SPxPP2xVPP2", 4, ParallelLayout(tensor=2, pipeline=2, virtual_pipeline=2, sequence=True)),
    Layout("TP2 SPxDP2", 4, ParallelLayout(tensor=2, sequence=True)),
    Layout("TP2xDP2", 4, ParallelLayout(tensor=2)),
    Layout("TP2xCP2", 4, ParallelLayout(tensor=2, context=2)),
    Layout("TP2 SPxCP2", 4, ParallelLayout(tensor=2, context=2, sequence=True)),
    Layout("PP2xDP2", 4, ParallelLayout(pipeline=2)),
    Layout("PP2xCP2", 4, ParallelLayout(pipeline=2, context=2)),
    Layout("CP2xDP2", 4, ParallelLayout(context=2)),
    Layout("EP4", 4, ParallelLayout(expert=4)),
    Layout("EP2xDP2", 4, ParallelLayout(expert=2)),
    Layout("PP2xEP2", 4, ParallelLayout(pipeline=2, expert=2)),
    Layout("CP2xEP2", 4, ParallelLayout(context=2, expert=2)),
    Layout("TP2 SPxEP2", 4, ParallelLayout(tensor=2, expert=2, sequence=True)),
    Layout("TP2 SPxEP4 ETP1", 4, ParallelLayout(tensor=2, expert=4, expert_tensor=1, sequence=True)),
)
LAYOUTS = {layout.name: layout for layout in _ALL}

_DENSE = ("clipped", "gspo", "divisor", "cispo", "sft", "tokens", "adam", "corrected", "ppo", "tied")
_MIXED = ("experts", "experts, gspo", "experts, tokens")


def _cases_of(layout: Layout) -> tuple[str, ...]:
    """A dense model has no experts to share, and a mixture trains tensor parallel only with sequence parallelism."""
    cut = layout.parallel
    dense = _DENSE if cut.expert == 1 else ()
    mixed = _MIXED if cut.tensor == 1 or cut.sequence else ()
    return (*dense, *mixed, *(("trained",) if layout.name in (ONE, "TP2 SP", "CP2") else ()))


WHOLE: Mapping[str, tuple[str, ...]] = {layout.name: _cases_of(layout) for layout in _ALL}

SMALL: Mapping[str, tuple[str, ...]] = {
    ONE: ("clipped", "gspo", "divisor", "tokens", "tied", "experts"),
    "DP2": ("clipped", "tokens", "corrected"),
    "TP2 SP": ("clipped", "gspo", "experts"),
    "PP2xVPP2": ("clipped", "divisor", "tokens", "tied", "experts"),
    "CP2": ("clipped", "gspo", "divisor", "tokens", "corrected", "ppo"),
    "EP2": ("experts",),
    "TP2 SPxEP2 ETP1": ("experts",),
    "CP2xDP2": ("gspo", "tokens"),
    "TP2xPP2": ("clipped",),
    "PP2xEP2": ("experts",),
    "TP2 SPxEP2": ("experts",),
}
"""Each way to cut at least once, each loss whose sums go over ranks where they do."""
