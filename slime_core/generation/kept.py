"""Which tokens top-p and top-k left to sample from at each position of a response (truncated-sampling mask)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from slime_core.types import Sample, TokenIds

__all__ = ["Kept", "joined", "keep", "kept_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The tokens that were kept at each position of a response of t tokens.

    Example, of two tokens, the first sampled from 7 and 2, the second from all: ``Kept(array("i", [7, 2]), array("i",
    [0, 2, 2]))``.

    Arguments:
        token_ids: int32 [s], position after position, the likeliest first.
        offsets: int32 [t + 1], where each position begins and the last one ends; a position without any kept all.
    """

    token_ids: array[int]
    offsets: array[int]

    def until(self, count: int) -> Kept:
        """That of the first ``count`` tokens."""
        return Kept(self.token_ids[: self.offsets[count]], self.offsets[: count + 1])


def keep(sample: Sample, kept: Kept | None) -> None:
    """Record in ``sample`` what its response was sampled from; None: from all tokens."""
    sample.rollout_top_p_token_ids = None if kept is None else TokenIds(kept.token_ids)
    sample.rollout_top_p_token_offsets = None if kept is None else TokenIds(kept.offsets)


def kept_of(sample: Sample) -> Kept | None:
    """What the response of ``sample`` was sampled from, as :func:`keep` recorded it; None: from all tokens."""
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    return None if ids is None or offsets is None else Kept(array("i", ids), array("i", offsets))


def joined(parts: Sequence[tuple[Kept | None, int]]) -> Kept | None:
    """What was kept in a response of several parts, each with its number of tokens; None: all tokens, everywhere.

    Example: of three ids that a tool wrote, and one id sampled from 7 and 2: ``joined([(None, 3), (kept, 1)])`` has the
    offsets 0 0 0 0 2.
    """
    if all(kept is None for kept, _ in parts):
        return None
    token_ids, offsets = array("i"), array("i", [0])
    for kept, count in parts:
        ends = kept.offsets[1:] if kept is not None else [0] * count
        offsets.extend([offsets[-1] + end for end in ends])
        token_ids.extend(kept.token_ids if kept is not None else ())
    return Kept(token_ids, offsets)
