"""Finds the common prefixes of samples, as a tree, and plans rows that hold each of them once. The sampler makes the
plan; the learner lays the rows out.

    5 14 · 7 1 · 3 · 6 · 8      the samples 5 14 7 1 3, 5 14 7 1 6 and 5 14 8

A *node* is a run of tokens that samples with the same tokens before it have in common, or that one sample has alone. A
prompt with its responses is a tree of depth one; a conversation that branches has more. Samples that share nodes should
be in one micro-batch. Such a *piece* is placed like one long sample with all their nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from slime_core.ops.packing import balance, pack

__all__ = ["LEAST_OF_NODE", "LEAST_SAVED", "Nodes", "Prefixes"]

LEAST_SAVED = 0.05
"""Fraction of a rollout's tokens that sharing has to save; below it, the time of a step stays the same."""

LEAST_OF_NODE = 16
"""Tokens that a shared node has to save; below it, the nodes after it repeat its tokens."""

Piece = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nodes:
    """The s nodes of n samples, in the order of a row; every node comes after its parent.

    Arguments:
        lengths: int64 [s], tokens.
        parents: int64 [s], the number of the parent node; -1: none.
        depths: int64 [s], tokens from the start of a sample to the end of the node.
        last: int64 [n], the node in which each sample ends.
    """

    lengths: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    last: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """n samples in the order of their tokens, so that those with a common prefix follow each other.

    Example: ``5 14 7 1``, ``20`` and ``5 14 8`` make ``samples = [0, 2, 1]``, ``lengths = [4, 3, 1]`` and
    ``common = [0, 2, 0]``; together they take 6 tokens.

    Arguments:
        samples: int64 [n], the numbers of the samples.
        lengths: int64 [n], their tokens.
        common: int64 [n], length of the prefix that each shares with the sample before it.
    """

    samples: NDArray[np.int64]
    lengths: NDArray[np.int64]
    common: NDArray[np.int64]

    @classmethod
    def of(cls, samples: Sequence[NDArray[np.int64]], *, least: int = LEAST_OF_NODE) -> Prefixes:
        """Find the prefixes of token ids of 32 bits; a node is shared if that saves at least ``least`` tokens."""
        keys = [np.asarray(sample, ">u4").tobytes() for sample in samples]
        order = sorted(range(len(samples)), key=keys.__getitem__)
        common = [0, *(_num_common(samples[a], samples[b]) for a, b in pairwise(order))][: len(order)]
        lengths = np.array([len(samples[i]) for i in order], np.int64)
        return cls(np.array(order, np.int64), lengths, _drop_small_nodes(common, least))

    @classmethod
    def of_columns(
        cls, order_B: NDArray[np.int64] | None, common_B: NDArray[np.int64] | None, *, lengths_B: NDArray[np.int64]
    ) -> Prefixes | None:
        """Restore the prefixes of b samples from ``samples`` and ``common``; return None if nothing is shared."""
        return None if order_B is None or common_B is None else cls(order_B, lengths_B[order_B], common_B)

    @property
    def tokens(self) -> int:
        """Tokens of a row of these samples."""
        return int((self.lengths - self.common).sum())

    @property
    def saved(self) -> float:
        """Fraction of all tokens that is saved if every shared node is in the row once."""
        return 1 - self.tokens / max(int(self.lengths.sum()), 1)

    def take(self, samples: Sequence[int] | NDArray[np.int64]) -> Prefixes:
        """Select the samples with the numbers ``samples``.

        The common prefix of two selected neighbours is the shortest of the common prefixes between them.
        """
        return self._at(np.flatnonzero(np.isin(self.samples, samples)))

    def _at(self, places: NDArray[np.int64]) -> Prefixes:
        """Select the samples at ``places``, which ascend."""
        common = np.zeros(len(places), np.int64)
        if len(places) > 1:
            first, last = places[0], places[-1]
            common[1:] = np.minimum.reduceat(self.common[first : last + 1], places[:-1] + 1 - first)
        return Prefixes(self.samples[places], self.lengths[places], common)

    def nodes(self) -> Nodes:
        """Return the tree. Its row has the tokens of each sample that the sample does not share with the one before it.

        The prefix that a sample shares with the one before it ends among the tokens of its *owner*: the last earlier
        sample that shares a shorter prefix with its predecessor. So the sample that owns its last token, and its depth,
        identify a node.
        """
        owners: list[int] = []
        path: list[int] = []
        shared, lengths = self.common.tolist(), self.lengths.tolist()
        for place, common in enumerate(shared):
            while path and shared[path[-1]] >= common:
                path.pop()
            owners.append(path[-1] if path else -1)
            path.append(place)
        before = list(zip(owners, shared, strict=True))
        last = [
            (place, length) if length > common or not common else (owner, common)
            for place, (length, (owner, common)) in enumerate(zip(lengths, before, strict=True))
        ]
        ends = sorted({*last, *(end for end in before if end[1])})
        number = {end: n for n, end in enumerate(ends)}
        parents_s = np.array(
            [
                number[end] if end[0] == place else number.get(before[place], -1)
                for end, (place, _) in pairwise([(-1, 0), *ends])
            ],
            np.int64,
        )
        depths = np.array([depth for _, depth in ends], np.int64)
        return Nodes(
            lengths=depths - np.where(parents_s < 0, 0, depths[parents_s]),
            parents=parents_s,
            depths=depths,
            last=np.array([number[end] for end in last], np.int64),
        )

    def plan(self, samples: Sequence[int], *, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
        """Plan the micro-batches of each rank. Pieces stay whole unless splitting them makes the heaviest rank lighter.

        Whole pieces, halves, quarters and so on are tried; the plan whose heaviest rank has the fewest tokens is taken.
        A micro-batch has at most ``max_tokens``, a shared token counted once; a longer sample gets a separate one.

        Raises:
            ValueError: ``max_tokens`` is not positive.
        """
        mine = self.take(samples)
        splits = [split for split in _splits(mine._pieces(max_tokens)) if len(split) >= min(num_ranks, len(samples))]
        plans = [mine._assign(split, num_ranks) for split in splits[: None if num_ranks > 1 else 1]]
        best = min(plans, key=lambda ranks: max(rank.tokens for rank in ranks))
        return [rank._pack(max_tokens) for rank in best]

    def _pieces(self, max_tokens: int) -> list[Piece]:
        """Group the places into few pieces of at most ``max_tokens``, by first fit at every node, children first."""
        nodes = self.nodes()
        pieces: list[tuple[Piece, int]] = []
        parts: list[list[tuple[Piece, int]]] = [[] for _ in nodes.lengths]
        for place, node in enumerate(nodes.last.tolist()):
            parts[node].append(((place,), int(self.lengths[place])))
        for node in reversed(range(len(parts))):
            parent = int(nodes.parents[node])
            merged = _merge(sorted(parts[node]), int(nodes.depths[node]), max_tokens)
            (pieces if parent < 0 else parts[parent]).extend(merged)
        return sorted((piece for piece, _ in pieces), key=lambda piece: int(self.samples[list(piece)].min()))

    def _assign(self, pieces: Sequence[Piece], num_ranks: int) -> list[Prefixes]:
        ranks = balance(range(len(pieces)), [self._at(np.array(piece)).tokens for piece in pieces], num_ranks)
        return [self._at(np.array(sorted(place for i in rank for place in pieces[i]), np.int64)) for rank in ranks]

    def _pack(self, max_tokens: int) -> list[list[int]]:
        pieces = [self._at(np.array(piece)) for piece in self._pieces(max_tokens)]
        bins = pack(range(len(pieces)), [piece.tokens for piece in pieces], max_tokens)
        return [sorted(sample for i in part for sample in pieces[i].samples.tolist()) for part in bins]


def _num_common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    count = min(len(a), len(b))
    differs = np.append(np.asarray(a[:count]) != np.asarray(b[:count]), True)
    return int(differs.argmax())


def _drop_small_nodes(common: Sequence[int], least: int) -> NDArray[np.int64]:
    """Return ``common`` without the nodes that save less than ``least`` tokens; their children follow their parent.

    A node saves its tokens for each of its children except the first.
    """
    reduced = np.zeros(len(common), np.int64)
    nodes: list[tuple[int, list[int]]] = [(0, [])]  # on the path of a sample: depth, and all children but the first
    for place, depth in enumerate([*common[1:], 0], 1):
        while nodes[-1][0] > depth:
            end, after = nodes.pop()
            if nodes[-1][0] < depth:
                nodes.append((depth, []))
            if len(after) * (end - nodes[-1][0]) >= least:
                reduced[after] = end
            else:
                nodes[-1][1].extend(after)
        if nodes[-1][0] < depth:
            nodes.append((depth, []))
        nodes[-1][1].append(place)
    return reduced


def _merge(parts: list[tuple[Piece, int]], depth: int, max_tokens: int) -> list[tuple[Piece, int]]:
    """Merge pieces that have their first ``depth`` tokens in common into fewer and larger ones, with their tokens."""
    budget = max_tokens - depth
    if len(parts) < 2 or budget < 1:
        return parts
    bins = pack(range(len(parts)), [tokens - depth for _, tokens in parts], budget)
    return [
        (tuple(sorted(place for i in part for place in parts[i][0])), depth + sum(parts[i][1] - depth for i in part))
        for part in bins
    ]


def _splits(pieces: list[Piece]) -> Iterator[list[Piece]]:
    """Yield ``pieces``, then all of them halved, and so on down to single samples."""
    yield pieces
    while any(len(piece) > 1 for piece in pieces):
        pieces = [half for piece in pieces for half in _halve(piece)]
        yield pieces


def _halve(piece: Piece) -> list[Piece]:
    middle = (len(piece) + 1) // 2
    return [half for half in (piece[:middle], piece[middle:]) if half]
