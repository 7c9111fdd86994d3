"""Packed rows: attention over their sequences, the indices that it needs, and the tokens of each context-parallel rank.

    Positions    the position of each token in its sequence, for rotary embeddings
    Spans        queries and keys of each sequence, for kernels that support sequences of unequal length
    Packing      the sequences of a row as right-padded batches
    SharedKeys   the keys of a row in which sequences continue others; part of its packing
    zigzag       the tokens of a row on one context-parallel rank
    Share        the part of a row's attention on one such rank, and the keys of other ranks that it needs
    attend_spans CUDA, bfloat16 or float16: FlashAttention over sequences of unequal length, directly on the row
    attend_batch a CPU, and float32 or dropout on CUDA: batches of right-padded sequences

Indices are computed once for a row and shared by all its layers. Lengths are read from the device once, so that no
layer waits for the device.

Both kernels compute the same sums; tests compare them with each other, with a loop, and with flex_attention. On CUDA,
torch falls back to a kernel that stores all scores of a batch, 4 bytes for each pair of tokens and head, if no other
kernel supports the call. That kernel is excluded, so a call that only it supports is an error.

A sequence may *continue* another one of its row, which may continue a third: a response whose prompt is in the row once
for its whole group, or the next turn of a conversation that branches. Its queries see the keys of all of them, the
*path*. Such sequences share a batch if their paths are equally long, so that one mask is right for all of them. If they
are longer than the path, the batch also has queries for the path, whose output is not used, and needs no mask: the
causal kernel then does less than half the work of a masked one.

A row of t tokens is split over c ranks in 2c chunks of equal length, and rank r has the chunks r and 2c - 1 - r:
under a causal mask early queries see few keys and late ones many, so every rank has about the same work in a row that
is one long sequence (Megatron splits a sequence in the same way, models/common/embeddings/rope_utils.py:130). The split
is of the row, not of every sequence, so only the row must be padded to a multiple of 2c. A chunk is a range of the row,
so at most one sequence enters it from before. Tokens of this sequence in the chunk are *crossing* and need keys of
other ranks; all other tokens of the chunk see only tokens of the chunk itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from slime_core.errors import RunError

__all__ = [
    "Packing",
    "Positions",
    "Share",
    "SharedKeys",
    "Spans",
    "attend_batch",
    "attend_spans",
    "takes_spans",
    "zigzag",
]


@dataclass(frozen=True, slots=True)
class Positions:
    """Position of each of the t tokens of a row in its sequence, for rotary embeddings.

    Arguments:
        positions_T: int64 [t], counted from the start of the first sequence that the token's own one continues, if any.
        whole: int32 [2] on the host, ``[0, t]``: the row as one sequence. Megatron reads it as numbers, three times
            for queries and keys each in every layer, which would wait for a device.
    """

    positions_T: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_tokens: int, continues: torch.Tensor | None = None) -> Positions:
        """Return the positions for ``cu_seqlens``; arguments, caching and errors as in :meth:`Packing.of`."""

        def compute() -> Positions:
            positions_T = _positions(_ends(cu_seqlens, num_tokens), continues).to(cu_seqlens.device)
            return cls(positions_T, torch.tensor([0, num_tokens], dtype=torch.int32))

        return _cached(cls, cu_seqlens, num_tokens, compute)


@dataclass(frozen=True, slots=True)
class Spans:
    """Keys of the t queries of a row: query i of a sequence of q queries and m keys sees m - q + i + 1 keys.

    Example: sequence 0 has 2 tokens; 1 and 2, of 1 and 2 tokens, continue it: ``cu_queries = [0, 2, 3, 5]``,
    ``cu_keys = [0, 2, 5, 9]``, ``longest = (2, 4)``, ``rows_K = [0, 1, 0, 1, 2, 0, 1, 3, 4]``.

    Arguments:
        cu_queries, cu_keys: int32 [n + 1], borders of the queries and keys of each sequence; none is empty.
        longest: numbers of queries and keys of the longest sequence.
        rows_K: int64 [k], the token of each key; None: keys are the row's tokens in order.
        sources: as in :class:`SharedKeys`, for the gradient.
    """

    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    longest: tuple[int, int]
    rows_K: torch.Tensor | None = None
    sources: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_tokens: int, continues: torch.Tensor | None = None) -> Spans:
        """Return the spans for ``cu_seqlens``; arguments, caching and errors as in :meth:`Packing.of`."""

        def compute() -> Spans:
            ends = _ends(cu_seqlens, num_tokens)
            starts, lengths = ends[:-1], ends.diff()
            path = _path(lengths, continues)
            rows_K = None if continues is None else _rows_of(path, starts, lengths)
            return cls.between(lengths, _lengths_of(path, lengths), rows_K, num_tokens, cu_seqlens.device)

        return _cached(cls, cu_seqlens, num_tokens, compute)

    @classmethod
    def between(
        cls, queries: torch.Tensor, keys: torch.Tensor, rows_K: torch.Tensor | None, num_keys: int, device: torch.device
    ) -> Spans:
        """Return the spans for these numbers of queries and keys a sequence, int64 [n], out of ``num_keys`` tokens."""
        queries, keys = queries[queries > 0], keys[queries > 0]
        zero = torch.zeros(1, dtype=torch.int64)
        sources: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        if rows_K is not None:
            sources = _sources(rows_K, torch.arange(len(rows_K)), num_keys, device)
        return cls(
            cu_queries=torch.cat([zero, queries.cumsum(0)]).to(device, torch.int32),
            cu_keys=torch.cat([zero, keys.cumsum(0)]).to(device, torch.int32),
            longest=(int(queries.max()) if len(queries) else 0, int(keys.max()) if len(keys) else 0),
            rows_K=None if rows_K is None else rows_K.to(device),
            sources=sources,
        )

    def gather(self, values_TNH: torch.Tensor) -> torch.Tensor:
        """Return keys or values [t, heads, size] in the order of the spans, [k, heads, size]."""
        if self.rows_K is None:
            return values_TNH
        gathered: torch.Tensor = _PadKeys.apply(values_TNH, self.rows_K, *_flat(self.sources))  # type: ignore[no-untyped-call]
        return gathered


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Tokens of the k slots for keys and values, in a row whose sequences continue others.

    Example: sequence 0 has 2 tokens; 1 and 2, of 1 and 2 tokens, continue it. Without rounding to a power of two, a
    batch of the first and one of the others: ``rows_K = [0, 1, 0, 1, 2, 2, 0, 1, 3, 4]``, ``lengths = (2, 4)``.

    Arguments:
        rows_K: int64 [k], the token of each slot; padding has its sequence's last token.
        lengths: slots a sequence of each batch of :class:`Packing`.
        sources: tokens (int64 [p]) and the slots (int64 [p, c]) that have each of them, one pair for each count c;
            without padding.
    """

    rows_K: torch.Tensor
    lengths: tuple[int, ...]
    sources: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class Packing:
    """Slots of the t tokens of a row in right-padded batches of s slots in total.

    Example: sequences of 4 and 3 tokens share a batch of 2 x 4 slots: ``rows_S = [0, 1, 2, 3, 4, 5, 6, 6]``,
    ``slots_T = [0, 1, 2, 3, 4, 5, 6]``, ``shapes = ((2, 4),)``.

    Arguments:
        rows_S: int64 [s], the token of each slot; padding has its sequence's last token.
        slots_T: int64 [t], the slot of each token.
        shapes: (sequences, slots a sequence) of each batch, in the order of the slots.
        shared: slots of keys and values; None: the same as those of queries.
        moves: False: slot i has token i, as where all sequences are equally long, so none is copied.
    """

    rows_S: torch.Tensor
    slots_T: torch.Tensor
    shapes: tuple[tuple[int, int], ...]
    shared: SharedKeys | None = None
    moves: bool = True

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_tokens: int, continues: torch.Tensor | None = None) -> Packing:
        """Return the packing for ``cu_seqlens``; computed at the first call and cached as long as the tensor lives.

        Arguments:
            cu_seqlens: int32 [b + 1], ascending from 0; must not be changed in place. Sequences may be empty. Tokens
                beyond its end are padding: one more sequence, which no other sees.
            num_tokens: t.
            continues: int [b], for each sequence the number of the sequence that it continues, an earlier one; -1: it
                continues none. None: no sequence continues another.

        Raises:
            ValueError: a sequence ends beyond the row, or continues itself or a later one.
        """
        return _cached(cls, cu_seqlens, num_tokens, lambda: _pack(cu_seqlens, num_tokens, continues))

    def pad(self, values_TNH: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the batches of ``values_TNH`` [t, heads, size], each [n, heads, L, size]."""
        padded_SNH = values_TNH
        if self.moves:
            padded_SNH = _Pad.apply(values_TNH, self.rows_S, self.slots_T)  # type: ignore[no-untyped-call]
        parts = torch.split(padded_SNH, [n * length for n, length in self.shapes])
        for part, (n, length) in zip(parts, self.shapes, strict=True):
            yield part.view(n, length, *part.shape[1:]).transpose(1, 2)

    def pad_keys(self, values_TNH: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the batches of keys or values [t, heads, size] for those of the queries, each [n, heads, K, size].

        The last L of a sequence's K slots belong to its L queries.
        """
        if self.shared is None:
            yield from self.pad(values_TNH)
            return
        keys = self.shared
        padded: torch.Tensor = _PadKeys.apply(values_TNH, keys.rows_K, *_flat(keys.sources))  # type: ignore[no-untyped-call]
        sizes = [n * length for (n, _), length in zip(self.shapes, keys.lengths, strict=True)]
        for part, (n, _), length in zip(torch.split(padded, sizes), self.shapes, keys.lengths, strict=True):
            yield part.view(n, length, *part.shape[1:]).transpose(1, 2)

    def unpad(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """Invert :meth:`pad` and join heads: [t, heads * size]."""
        parts = [batch.transpose(1, 2).flatten(2).flatten(0, 1) for batch in batches]
        slots = torch.cat(parts) if len(parts) > 1 else parts[0]
        result: torch.Tensor = _Unpad.apply(slots, self.slots_T) if self.moves else slots  # type: ignore[no-untyped-call]
        return result


_KNOWN = WeakTensorKeyDictionary()
"""By ``cu_seqlens``: what was computed for the row, by its class and the number of tokens."""

Known = TypeVar("Known")


def _cached(cls: type[Known], cu_seqlens: torch.Tensor, num_tokens: int, compute: Callable[[], Known]) -> Known:
    known: dict[tuple[type, int], Known] = _KNOWN.setdefault(cu_seqlens, {})
    if (cls, num_tokens) not in known:
        known[cls, num_tokens] = compute()
    return known[cls, num_tokens]


def _ends(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the borders of the sequences, including the padding's end: int64 on the host."""
    ends = torch.cat([cu_seqlens.detach().to("cpu", torch.int64), torch.tensor([num_tokens])])
    if bool((ends.diff() < 0).any()):
        raise ValueError(f"cu_seqlens ends at {int(ends[-2])}, but the packed row holds {num_tokens} tokens")
    return ends


def _path(lengths: torch.Tensor, continues: torch.Tensor | None) -> torch.Tensor:
    """Return for each sequence those that it continues, the first one first, and itself: int64 [b, d]; -1: none."""
    numbers = torch.arange(len(lengths))
    before = torch.full_like(numbers, -1)
    if continues is not None:
        before[: len(continues)] = continues.to(before)
    if bool((before >= numbers).any()):
        number = int((before >= numbers).nonzero()[0])
        raise ValueError(f"sequence {number} continues sequence {int(before[number])}; accepted: an earlier one, or -1")
    path = [numbers]
    while bool(((last := path[-1]) >= 0).any()):
        path.append(torch.where(last < 0, -1, before[last]))
    return torch.stack(path[-2::-1], dim=1) if len(path) > 1 else numbers[:, None]


def _sizes(path: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.where(path < 0, 0, lengths[path])


def _lengths_of(path: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the tokens of every path, the sequence itself included: int64 [b]; empty sequences have none."""
    return torch.where(lengths > 0, _sizes(path, lengths).sum(dim=1), 0)


def _rows_of(path: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the tokens of every path, one after the other; skip empty sequences."""
    sizes = torch.where(lengths[:, None] > 0, _sizes(path, lengths), 0).flatten()
    places = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return starts[path].flatten().repeat_interleave(sizes) + places


def _pack(cu_seqlens: torch.Tensor, num_tokens: int, continues: torch.Tensor | None = None) -> Packing:
    device, ends = cu_seqlens.device, _ends(cu_seqlens, num_tokens)
    batches = list(_batches(ends, continues))
    slots_T, used = torch.empty(num_tokens, dtype=torch.int64), 0
    for batch in batches:
        slots_T[batch.rows_nL[batch.home_nL]] = used + batch.home_nL.flatten().nonzero().squeeze(1)
        used += batch.rows_nL.numel()
    rows_S = torch.cat([ends[:0], *(batch.rows_nL.flatten() for batch in batches)])
    return Packing(
        rows_S=rows_S.to(device),
        slots_T=slots_T.to(device),
        shapes=tuple((batch.rows_nL.size(0), batch.rows_nL.size(1)) for batch in batches),
        shared=None if continues is None else _shared_keys(batches, num_tokens, device),
        moves=not torch.equal(rows_S, torch.arange(num_tokens)),
    )


@dataclass(frozen=True, slots=True)
class _Batch:
    """n sequences: ``rows_nL`` tokens of the queries, ``home_nL`` True if their output is used, ``keys_nK`` tokens of
    the keys, ``real_nK`` True if they are not padding."""

    rows_nL: torch.Tensor
    home_nL: torch.Tensor
    keys_nK: torch.Tensor
    real_nK: torch.Tensor


def _batches(ends: torch.Tensor, continues: torch.Tensor | None) -> Iterator[_Batch]:
    """Yield one batch for all sequences between two powers of two whose paths before them are equally long."""
    starts, lengths = ends[:-1], ends.diff()
    path = _path(lengths, continues)
    totals, rows_K = _lengths_of(path, lengths), _rows_of(path, starts, lengths)
    firsts, prefixes = totals.cumsum(0) - totals, totals - lengths
    classes = torch.stack([prefixes, torch.ceil(torch.log2(lengths.double())).long()], dim=1)
    for size_class in torch.unique(classes[lengths > 0], dim=0):
        members = (classes == size_class).all(dim=1) & (lengths > 0)
        own_nL, real_nL = _right_pad(starts[members], lengths[members])
        yield _batch(own_nL, real_nL, rows_K[firsts[members][:, None] + torch.arange(int(size_class[0]))])


def _batch(own_nL: torch.Tensor, real_nL: torch.Tensor, before_nP: torch.Tensor) -> _Batch:
    """Return a batch; ``before_nP`` has the tokens of the paths before the sequences."""
    keys_nK = torch.cat([before_nP, own_nL], dim=1)
    real_nK = torch.cat([torch.ones_like(before_nP, dtype=torch.bool), real_nL], dim=1)
    if own_nL.size(1) <= before_nP.size(1):
        return _Batch(own_nL, real_nL, keys_nK, real_nK)
    return _Batch(keys_nK, torch.cat([torch.zeros_like(before_nP, dtype=torch.bool), real_nL], dim=1), keys_nK, real_nK)


def _positions(ends: torch.Tensor, continues: torch.Tensor | None) -> torch.Tensor:
    lengths = ends.diff()
    starts = ends[1:] - _sizes(_path(lengths, continues), lengths).sum(dim=1)
    return torch.arange(int(ends[-1])) - starts.repeat_interleave(lengths)


def _shared_keys(batches: list[_Batch], num_tokens: int, device: torch.device) -> SharedKeys:
    rows_K = torch.cat([batch.keys_nK.flatten() for batch in batches])
    slots = torch.cat([batch.real_nK.flatten() for batch in batches]).nonzero().squeeze(1)
    sources = _sources(rows_K, slots, num_tokens, device)
    return SharedKeys(rows_K.to(device), tuple(batch.keys_nK.size(1) for batch in batches), sources)


def _sources(
    rows_K: torch.Tensor, slots: torch.Tensor, num_tokens: int, device: torch.device
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return, for each count of slots, the tokens that have so many of ``slots``, and these slots."""
    slots = slots[rows_K[slots].argsort(stable=True)]
    counts_T = torch.bincount(rows_K[slots], minlength=num_tokens)
    firsts_T = counts_T.cumsum(0) - counts_T
    sources = []
    for count in torch.unique(counts_T).tolist():
        tokens = (counts_T == count).nonzero().squeeze(1)
        sources.append((tokens.to(device), slots[firsts_T[tokens][:, None] + torch.arange(count)].to(device)))
    return tuple(sources)


def _flat(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for pair in pairs for tensor in pair]


def _right_pad(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [n, L] of sequences, each padded with its last row, and a mask of the real ones."""
    columns = torch.arange(int(lengths.max()))[None]
    return starts[:, None] + torch.minimum(columns, lengths[:, None] - 1), columns < lengths[:, None]


class _Pad(torch.autograd.Function):
    """Gather tokens into slots. The gradient is a gather, too, because padding has no gradient: no atomics."""

    @staticmethod
    def forward(ctx: Any, values_T: torch.Tensor, rows_S: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots_T)
        return values_T.index_select(0, rows_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_S: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slots_T,) = ctx.saved_tensors
        return gradient_S.index_select(0, slots_T), None, None


class _PadKeys(torch.autograd.Function):
    """Gather tokens into slots, some into several. The gradient gathers and adds in a fixed order: no atomics."""

    @staticmethod
    def forward(ctx: Any, values_T: torch.Tensor, rows_K: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*sources)
        ctx.num_tokens = values_T.size(0)
        return values_T.index_select(0, rows_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_K: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sources = ctx.saved_tensors
        gradient_T = gradient_K.new_empty(ctx.num_tokens, *gradient_K.shape[1:])
        for tokens, slots in zip(sources[::2], sources[1::2], strict=True):
            taken = gradient_K.index_select(0, slots.flatten()).view(*slots.shape, *gradient_K.shape[1:])
            gradient_T[tokens] = taken.sum(dim=1)
        return gradient_T, None, *(None for _ in sources)


class _Unpad(torch.autograd.Function):
    """Gather slots back into tokens; padding gets a zero gradient."""

    @staticmethod
    def forward(ctx: Any, values_S: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots_T)
        ctx.num_slots = values_S.size(0)
        return values_S.index_select(0, slots_T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_T: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slots_T,) = ctx.saved_tensors
        gradient_S = gradient_T.new_zeros(ctx.num_slots, *gradient_T.shape[1:])
        gradient_S[slots_T] = gradient_T
        return gradient_S, None


def zigzag(num_tokens: int, *, rank: int, size: int) -> np.ndarray:
    """Return the row's positions of the tokens of context-parallel rank ``rank`` of ``size``, in its order: int64.

    Example: 8 tokens over 2 ranks: ``[0, 1, 6, 7]`` and ``[2, 3, 4, 5]``.

    Raises:
        ValueError: ``num_tokens`` is not a multiple of ``2 * size`` (with one rank, any number is accepted).
    """
    if size == 1:
        return np.arange(num_tokens)
    if num_tokens % (2 * size):
        raise ValueError(f"{num_tokens} tokens cannot be split into {2 * size} equal chunks; pad the row first")
    chunks = np.arange(num_tokens).reshape(2 * size, -1)
    return np.asarray(chunks[[rank, 2 * size - 1 - rank]].ravel())


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a row's attention that one context-parallel rank computes.

    Example: sequences of 3 and 5 tokens over 2 ranks, so chunks of 2. Rank 1 has tokens 2, 3 and 4, 5. Token 2
    crosses into its first chunk, 4 and 5 into its second: ``sizes = (1, 1, 2, 0)``. The gathered keys of all ranks
    have the order 0 1 6 7 2 3 4 5, in which ``keys`` finds tokens 0 to 2 and 3 to 5: ``([0, 1, 4], [5, 6, 7])``.

    Arguments:
        sizes: of each chunk the number of crossing and of other tokens.
        keys: int64, for each chunk's crossing tokens the rows of the gathered keys from their sequence's start up to
            themselves; empty if none cross.
        rest: the packing of the tokens that do not cross.
        spans: spans of all tokens of this rank, with keys among the gathered ones; without exchange, among its own.
        exchanges: True if any rank has crossing tokens, so that keys must be gathered.
    """

    sizes: tuple[int, int, int, int]
    keys: tuple[torch.Tensor, torch.Tensor]
    rest: Packing
    spans: Spans
    exchanges: bool

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_tokens: int, rank: int, size: int) -> Share:
        """Return the share of rank ``rank`` of ``size``; computed at the first call for this tensor, then cached.

        Arguments:
            cu_seqlens: of the whole row; see :meth:`Packing.of`.
            num_tokens: tokens of this rank; the row has ``2 * size`` chunks of half as many.
        """

        def compute() -> Share:
            ends = torch.cat([cu_seqlens.cpu().long(), torch.tensor([num_tokens * size])]).unique()
            return _share(ends, num_tokens // 2, rank, size, cu_seqlens.device)

        return _cached(cls, cu_seqlens, num_tokens, compute)


def _share(ends: torch.Tensor, chunk: int, rank: int, size: int, device: torch.device) -> Share:
    """Compute a share; ``ends``: int64, borders of the sequences, each once, from 0 to the end of the row."""
    sizes, keys, queries, places, lengths = [], [], [], [], []
    starts = (rank * chunk, (2 * size - 1 - rank) * chunk)
    for own, start in zip((2 * rank * chunk, (2 * rank + 1) * chunk), starts, strict=True):
        sequence_start, crossing = _crossing(ends, start, chunk)
        inner = ends[(ends > start + crossing) & (ends < start + chunk)]
        borders = torch.cat([torch.tensor([start + crossing]), inner, torch.tensor([start + chunk])])
        sizes += [crossing, chunk - crossing]
        lengths.append(borders.diff())
        keys.append(
            _gathered(torch.arange(sequence_start, start + crossing if crossing else sequence_start), chunk, size)
        )
        queries.append(torch.cat([torch.tensor([crossing]), lengths[-1]]))
        places += [keys[-1], torch.arange(own + crossing, own + chunk)]
    rest = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)]).to(device)
    exchanges = any(start not in ends for start in range(0, 2 * size * chunk, chunk))
    num_keys = torch.cat([torch.cat([torch.tensor([len(k)]), own]) for k, own in zip(keys, lengths, strict=True)])
    rows_K = torch.cat(places) if exchanges else None
    return Share(
        sizes=(sizes[0], sizes[1], sizes[2], sizes[3]),
        keys=(keys[0].to(device), keys[1].to(device)),
        rest=Packing.of(rest, num_tokens=sizes[1] + sizes[3]),
        spans=Spans.between(torch.cat(queries), num_keys, rows_K, 2 * size * chunk, device),
        exchanges=exchanges,
    )


def _crossing(ends: torch.Tensor, start: int, chunk: int) -> tuple[int, int]:
    """Return the start of the sequence at ``start``, and its number of crossing tokens in the chunk."""
    place = int(torch.searchsorted(ends, start, right=True))
    sequence_start, sequence_end = int(ends[place - 1]), int(ends[place])
    return sequence_start, 0 if sequence_start == start else min(sequence_end, start + chunk) - start


def _gathered(places: torch.Tensor, chunk: int, size: int) -> torch.Tensor:
    """Convert places in the row to places in the gathered tokens of all ranks, which are in rank order."""
    number, offset = places // chunk, places % chunk
    late = number >= size
    owner = torch.where(late, 2 * size - 1 - number, number)
    return (2 * owner + late) * chunk + offset


# --- Kernels ----------------------------------------------------------------------------------------------------------


LARGEST_HEAD = 256
HEAD_MULTIPLE = 8
"""Limits of FlashAttention 2: heads of at most 256 entries, a multiple of 8 (aten/native/transformers/cuda/flash_attn/
flash_api.cpp, ``mha_varlen_fwd``)."""

LINEAR = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
"""Kernels whose memory grows with the number of tokens, not with its square."""


def takes_spans(query: torch.Tensor, *, dropout: float) -> bool:
    """Return whether the kernel for sequences of unequal length supports this query, ``[t, heads, size]``."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and dropout == 0 and query.size(-1) <= LARGEST_HEAD


def attend_spans(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: Spans, *, scale: float | None
) -> torch.Tensor:
    """Return softmax(scale q k) v of every sequence, causal, aligned at its end: [t, heads * value size].

    Arguments:
        query: [t, heads, size].
        key, value: [m, heads or a divisor of it, size], before ``spans`` gathers them; values may have another size.
        scale: None: 1 / sqrt(size).
    """
    from torch.nn.attention.varlen import varlen_attn

    size, value_size = query.size(-1), value.size(-1)
    width = -(-max(size, value_size) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    # Columns of zeros change no score; the added columns of the output are cut off.
    query, key, value = (_widened(part, width) for part in (query, spans.gather(key), spans.gather(value)))
    output = varlen_attn(
        query,
        key,
        value,
        spans.cu_queries,
        spans.cu_keys,
        *spans.longest,
        scale=size**-0.5 if scale is None else scale,
        window_size=(-1, 0),
        enable_gqa=query.size(1) != key.size(1),
    )
    assert isinstance(output, torch.Tensor)  # a tuple only if return_aux is requested
    return output[..., :value_size].flatten(1)


def _widened(values: torch.Tensor, width: int) -> torch.Tensor:
    return values if values.size(-1) == width else pad(values, (0, width - values.size(-1)))


def attend_batch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    *,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """Return attention over [b, heads, s, size] each; keys and values may have a divisor of the heads.

    ``visible`` None: causal.

    Raises:
        RunError: on CUDA, only the kernel that stores all scores supports the call.
    """
    if q.is_cuda and q.size(1) != k.size(1):  # the kernel for masks and float32 does not support grouped heads
        k, v = (part.repeat_interleave(q.size(1) // part.size(1), dim=1) for part in (k, v))
    with _linear_memory(q):
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            is_causal=visible is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.size(1) != k.size(1),
        )


@contextmanager
def _linear_memory(q: torch.Tensor) -> Iterator[None]:
    if not q.is_cuda:
        yield
        return
    try:
        with sdpa_kernel(list(LINEAR)):
            yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise RunError(
            f"torch {torch.__version__} has no attention kernel on this GPU for {str(q.dtype).removeprefix('torch.')} "
            f"and heads of size {q.size(-1)} that does not store the scores of all pairs of tokens; use --bf16, and "
            f"heads of at most {LARGEST_HEAD}"
        ) from error
