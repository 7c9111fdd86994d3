"""Packed rows: attention over their sequences, the indices that it needs, and the tokens of each context-parallel rank.

    Positions    the position of each token in its sequence, for rotary embeddings
    Sequences    numbers of queries and keys of each sequence, and which tokens the keys are
    Spans        the same for kernels that support sequences of unequal length
    Packing      the same as right-padded batches
    Gather       copies tokens to the places that a kernel reads
    zigzag       the tokens of a row on one context-parallel rank
    attend_spans   CUDA, bfloat16 or float16: FlashAttention over sequences of unequal length, directly on the row
    attend_padded  a CPU, and float32 on CUDA: batches of right-padded sequences

Indices are computed once for a row and shared by all its layers. Lengths are read from the device once, so that no
layer waits for the device.

Both kernels compute the same sums; tests compare them with each other, with a loop, and with flex_attention. On CUDA,
torch falls back to a kernel that stores all scores of a batch, 4 bytes for each pair of tokens and head, if no other
kernel supports the call. That kernel is excluded, so a call that only it supports is an error.

A sequence may *continue* another one of its row, which may continue a third: a response whose prompt is in the row once
for its whole group, or the next turn of a conversation that branches. Its queries see the keys of all of them, the
*path*. Such sequences share a batch if their paths are equally long, so that one mask is right for all of them. If they
are longer than the path, the batch has as many queries as keys, some of whose output is not used, and needs no mask:
the causal kernel then does less than half the work of a masked one.

A row of t tokens is split over c ranks in 2c chunks of equal length, and rank r has the chunks r and 2c - 1 - r:
under a causal mask early queries see few keys and late ones many, so every rank has about the same work in a row that
is one long sequence (Megatron splits a sequence in the same way, models/common/embeddings/rope_utils.py:130). The split
is of the row, not of every sequence, so only the row must be padded to a multiple of 2c. A chunk is a range of the row,
so at most one sequence enters it from before. This sequence's tokens need keys of other ranks, which are its path; all
other tokens of the chunk see only tokens of the chunk itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Positions", "Sequences", "attend", "causal_mask", "zigzag"]


@dataclass(frozen=True, slots=True)
class Positions:
    """Position of each of the t tokens of a row in its sequence, for rotary embeddings.

    Arguments:
        positions_T: int64 [t], counted from the start of the path of its sequence.
        whole: int32 [2] on the host, ``[0, t]``: the row as one sequence. Megatron reads it as numbers, three times
            for queries and keys each in every layer, which would wait for a device.
    """

    positions_T: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_tokens: int, continues: torch.Tensor | None = None) -> Positions:
        """Return the positions for ``cu_seqlens``; arguments, caching and errors as in :meth:`Sequences.of`."""

        def compute() -> Positions:
            positions_T = _positions(_ends(cu_seqlens, num_tokens), continues).to(cu_seqlens.device)
            return cls(positions_T, torch.tensor([0, num_tokens], dtype=torch.int32))

        return _cached(cls, cu_seqlens, num_tokens, compute)


@dataclass(frozen=True, slots=True)
class Gather:
    """Copies of some of t tokens. The gradient gathers and adds in a fixed order: no atomics.

    Arguments:
        rows_S: int64 [s], the token of each copy; None for all tokens in their order.
        sources: tokens (int64 [p]) and the copies (int64 [p, c]) whose gradients each of them gets, one pair for each
            count c; without padding.
    """

    rows_S: torch.Tensor | None = None
    sources: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    @classmethod
    def of(
        cls, rows_S: torch.Tensor, *, num_tokens: int, device: torch.device, real_S: torch.Tensor | None = None
    ) -> Gather:
        """Return the copies of these tokens; ``real_S``: bool [s], False at padding, which has no gradient."""
        if torch.equal(rows_S, torch.arange(num_tokens)):
            return cls()
        slots = torch.arange(len(rows_S)) if real_S is None else real_S.nonzero().squeeze(1)
        slots = slots[rows_S[slots].argsort(stable=True)]
        counts_T = torch.bincount(rows_S[slots], minlength=num_tokens)
        firsts_T = counts_T.cumsum(0) - counts_T
        sources = []
        for count in torch.unique(counts_T).tolist():
            tokens = (counts_T == count).nonzero().squeeze(1)
            sources.append((tokens.to(device), slots[firsts_T[tokens][:, None] + torch.arange(count)].to(device)))
        return cls(rows_S.to(device), tuple(sources))

    def __call__(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the copies of ``values_T`` [t, ...], [s, ...]."""
        if self.rows_S is None:
            return values_T
        copies: torch.Tensor = _Gather.apply(values_T, self.rows_S, *chain(*self.sources))  # type: ignore[no-untyped-call]
        return copies


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_T: torch.Tensor, rows_S: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*sources)
        ctx.num_tokens = values_T.size(0)
        return values_T.index_select(0, rows_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_S: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sources = ctx.saved_tensors  # read once: recomputation under torch's checkpoints allows no second time
        unused = [None] * len(sources)
        if len(sources) == 2 and sources[1].size(1) == 1:  # every token is copied once
            return gradient_S.index_select(0, sources[1].squeeze(1)), None, *unused
        gradient_T = gradient_S.new_empty(ctx.num_tokens, *gradient_S.shape[1:])
        for tokens, slots in zip(sources[::2], sources[1::2], strict=True):
            of_copies = gradient_S.index_select(0, slots.flatten()).unflatten(0, slots.shape)
            gradient_T[tokens] = of_copies.sum(dim=1)
        return gradient_T, None, *unused


@dataclass(frozen=True, slots=True)
class Spans:
    """The sequences of a row, one after the other.

    Example: sequence 0 has 2 tokens; 1 and 2, of 1 and 2 tokens, continue it: ``cu_queries = [0, 2, 3, 5]``,
    ``cu_keys = [0, 2, 5, 9]``, ``longest = (2, 4)``; keys are copies of the tokens 0 1, 0 1 2, 0 1 3 4.

    Arguments:
        cu_queries, cu_keys: int32 [n + 1], borders of the queries and keys of each sequence.
        longest: numbers of queries and keys of the longest sequence.
        gather_keys: to where ``cu_keys`` has them.
    """

    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    longest: tuple[int, int]
    gather_keys: Gather


@dataclass(frozen=True, slots=True)
class Packing:
    """The sequences of a row as right-padded batches.

    Example: sequences of 4 and 3 tokens share a batch of 2 x 4 slots, ``shapes = ((2, 4, 4),)``, with copies of the
    tokens 0 1 2 3 and 4 5 6 6: padding has its sequence's last token.

    Arguments:
        shapes: (sequences, queries a sequence, keys a sequence) of each batch.
        gather_queries, gather_keys: to the slots of the batches.
        gather_tokens: from the slots of queries back to the row.
    """

    shapes: tuple[tuple[int, int, int], ...]
    gather_queries: Gather
    gather_keys: Gather
    gather_tokens: Gather

    def pad(self, values_TNH: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the batches of queries [t, heads, size], each [n, heads, L, size]."""
        return _batches(self.gather_queries(values_TNH), [(n, length) for n, length, _ in self.shapes])

    def pad_keys(self, values_TNH: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the batches of keys or values [m, heads, size] for those of the queries, each [n, heads, K, size].

        The last L of a sequence's K slots belong to its L queries.
        """
        return _batches(self.gather_keys(values_TNH), [(n, length) for n, _, length in self.shapes])

    def unpad(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """Invert :meth:`pad` and join heads: [t, heads * size]."""
        parts = [batch.transpose(1, 2).flatten(2).flatten(0, 1) for batch in batches]
        return self.gather_tokens(torch.cat(parts) if len(parts) > 1 else parts[0])


def _batches(slots_SNH: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
    parts = slots_SNH.split([n * length for n, length in shapes])
    for part, (n, length) in zip(parts, shapes, strict=True):
        yield part.view(n, length, *part.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class Sequences:
    """Keys of the queries of a row: query i of a sequence of q queries and m keys sees m - q + i + 1 keys.

    All tensors are on the host.

    Example: sequence 0 has 2 tokens; 1 and 2, of 1 and 2 tokens, continue it: ``queries = [2, 1, 2]``,
    ``keys = [2, 3, 4]``, ``rows_K = [0, 1, 0, 1, 2, 0, 1, 3, 4]``.

    Example: sequences of 3 and 5 tokens over 2 ranks, so chunks of 2. Rank 1 has tokens 2, 3 and 4, 5, which are the
    end of the first sequence, the start of the second, and the middle of it: ``queries = [1, 1, 2]``,
    ``keys = [3, 1, 3]``. The gathered keys of all ranks have the order 0 1 6 7 2 3 4 5: ``rows_K = [0, 1, 4, 5, 5, 6,
    7]``.

    Arguments:
        queries, keys: int64 [n], numbers of queries and keys of each sequence; none is 0.
        rows_K: int64 [k], the token of each key.
        num_keys: tokens that ``rows_K`` refers to.
        device: of the kernels' indices.
        exchanges: True: the keys are those of all context-parallel ranks.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    rows_K: torch.Tensor
    num_keys: int
    device: torch.device
    exchanges: bool = False

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_tokens: int, continues: torch.Tensor | None = None) -> Sequences:
        """Return the sequences of a row; computed at the first call and cached as long as ``cu_seqlens`` lives.

        Arguments:
            cu_seqlens: int32 [b + 1], ascending from 0; must not be changed in place. Sequences may be empty. Tokens
                beyond its end are padding: one more sequence, which no other sees.
            num_tokens: t.
            continues: int [b], for each sequence the number of the sequence that it continues, an earlier one; -1: it
                continues none. None: no sequence continues another.

        Raises:
            ValueError: a sequence ends beyond the row, or continues itself or a later one.
        """

        def compute() -> Sequences:
            ends = _ends(cu_seqlens, num_tokens)
            starts, lengths = ends[:-1], ends.diff()
            path = _path(lengths, continues)
            # An empty sequence has no queries, so nothing sees its path.
            sizes = torch.where((path < 0) | (lengths[:, None] == 0), 0, lengths[path])
            places = _ranges(starts[path].flatten(), sizes.flatten())
            return cls(lengths[lengths > 0], sizes.sum(dim=1)[lengths > 0], places, num_tokens, cu_seqlens.device)

        return _cached(cls, cu_seqlens, num_tokens, compute)

    @classmethod
    def of_rank(cls, cu_seqlens: torch.Tensor, *, num_tokens: int, rank: int, size: int) -> Sequences:
        """Return the sequences on context-parallel rank ``rank`` of ``size``, cached like those of :meth:`of`.

        Arguments:
            cu_seqlens: of the whole row.
            num_tokens: tokens of this rank; the row has ``2 * size`` chunks of half as many.
        """

        def compute() -> Sequences:
            ends, chunk = _ends(cu_seqlens, num_tokens * size).unique(), num_tokens // 2
            exchanges = any(start not in ends for start in range(0, num_tokens * size, chunk))
            queries, keys, places = [], [], []
            for start in (rank * chunk, (2 * size - 1 - rank) * chunk):
                inner = ends[(ends > start) & (ends < start + chunk)]
                lengths = torch.cat([torch.tensor([start]), inner, torch.tensor([start + chunk])]).diff()
                sequence_start = int(ends[ends <= start][-1])
                queries.append(lengths)
                keys.append(torch.cat([lengths[:1] + start - sequence_start, lengths[1:]]))
                places.append(torch.arange(sequence_start, start + chunk))
            rows_K, num_keys = torch.arange(num_tokens), num_tokens
            if exchanges:
                num_keys = num_tokens * size
                gathered = np.concatenate([zigzag(num_keys, rank=other, size=size) for other in range(size)])
                rows_K = torch.from_numpy(gathered.argsort())[torch.cat(places)]
            return cls(torch.cat(queries), torch.cat(keys), rows_K, num_keys, cu_seqlens.device, exchanges)

        return _cached(cls, cu_seqlens, num_tokens, compute)

    @cached_property
    def spans(self) -> Spans:
        """The sequences, one after the other."""
        zero = torch.zeros(1, dtype=torch.int64)
        return Spans(
            cu_queries=torch.cat([zero, self.queries.cumsum(0)]).to(self.device, torch.int32),
            cu_keys=torch.cat([zero, self.keys.cumsum(0)]).to(self.device, torch.int32),
            longest=(int(self.queries.max()), int(self.keys.max())),
            gather_keys=Gather.of(self.rows_K, num_tokens=self.num_keys, device=self.device),
        )

    @cached_property
    def packing(self) -> Packing:
        """One batch for all sequences between two powers of two whose paths before them are equally long."""
        queries, keys, paths = self.queries, self.keys, self.keys - self.queries
        shapes, of_queries, are_used, of_keys, are_real = [], [], [], [], []
        classes = torch.stack([paths, torch.ceil(torch.log2(queries.double())).long()], dim=1)
        for size_class in torch.unique(classes, dim=0):
            members = (classes == size_class).all(dim=1)
            lengths, path = keys[members][:, None], int(size_class[0])
            columns = torch.arange(int(lengths.max()))[None]
            first = 0 if columns.size(1) > 2 * path else path  # the slot of the first query among those of the keys
            starts = (queries.cumsum(0) - keys)[members][:, None]
            of_queries.append(starts + columns[:, first:].clamp(min=path).minimum(lengths - 1))
            are_used.append((columns[:, first:] >= path) & (columns[:, first:] < lengths))
            of_keys.append((keys.cumsum(0) - keys)[members][:, None] + columns.minimum(lengths - 1))
            are_real.append(columns < lengths)
            shapes.append((len(lengths), columns.size(1) - first, columns.size(1)))
        rows_S, used_S, keys_S, real_S = (
            torch.cat([part.flatten() for part in parts]) for parts in (of_queries, are_used, of_keys, are_real)
        )
        num_tokens, slots_T = int(queries.sum()), used_S.nonzero().squeeze(1)
        slots_T = slots_T[rows_S[slots_T].argsort()]
        return Packing(
            shapes=tuple(shapes),
            gather_queries=Gather.of(rows_S, num_tokens=num_tokens, device=self.device, real_S=used_S),
            gather_keys=Gather.of(self.rows_K[keys_S], num_tokens=self.num_keys, device=self.device, real_S=real_S),
            gather_tokens=Gather.of(slots_T, num_tokens=len(rows_S), device=self.device),
        )


_CACHE = WeakTensorKeyDictionary()
"""``cu_seqlens`` -> class and number of tokens -> indices of the row."""

Indices = TypeVar("Indices")


def _cached(cls: type[Indices], cu_seqlens: torch.Tensor, num_tokens: int, compute: Callable[[], Indices]) -> Indices:
    of_row: dict[tuple[type, int], Indices] = _CACHE.setdefault(cu_seqlens, {})
    if (cls, num_tokens) not in of_row:
        of_row[cls, num_tokens] = compute()
    return of_row[cls, num_tokens]


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


def _ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return ``[s, s + 1, ..., s + n - 1]`` for every pair of ``starts`` and ``lengths``, one after the other."""
    offsets = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - offsets).repeat_interleave(lengths)


def _positions(ends: torch.Tensor, continues: torch.Tensor | None) -> torch.Tensor:
    lengths = ends.diff()
    path = _path(lengths, continues)
    starts = ends[1:] - torch.where(path < 0, 0, lengths[path]).sum(dim=1)
    return torch.arange(int(ends[-1])) - starts.repeat_interleave(lengths)


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


# --- Kernels ----------------------------------------------------------------------------------------------------------


LARGEST_HEAD = 256
HEAD_MULTIPLE = 8
"""Limits of FlashAttention 2: heads of at most 256 entries, a multiple of 8 (aten/native/transformers/cuda/flash_attn/
flash_api.cpp, ``mha_varlen_fwd``)."""

LINEAR = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
"""Kernels whose memory grows with the number of tokens, not with its square."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequences: Sequences,
    *,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Return softmax(scale q k) v of every sequence, causal, aligned at its end: [t, heads * value size].

    Arguments:
        query: [t, heads, size].
        key, value: [m, heads or a divisor of it, size]; values may have another size.
        scale: by default 1 / sqrt(size).
        window: number of the last keys that a query sees; by default all up to its position.

    Raises:
        RuntimeError: on CUDA, only the kernel that stores all scores supports the call.
    """
    if takes_spans(query):
        return attend_spans(query, key, value, sequences.spans, scale=scale, window=window)
    return attend_padded(query, key, value, sequences.packing, scale=scale, window=window)


def takes_spans(query: torch.Tensor) -> bool:
    """Return whether the kernel for sequences of unequal length supports this query, ``[t, heads, size]``."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_half and query.size(-1) <= LARGEST_HEAD


def attend_spans(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: Spans,
    *,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the result of :func:`attend` with a kernel for sequences of unequal length."""
    from torch.nn.attention.varlen import varlen_attn

    size, value_size = query.size(-1), value.size(-1)
    width = -(-max(size, value_size) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    # Columns of zeros change no score; the added columns of the output are cut off.
    query, key, value = (_widened(part, width) for part in (query, spans.gather_keys(key), spans.gather_keys(value)))
    is_grouped = query.size(1) != key.size(1)
    options: dict[str, Any] = {"enable_gqa": is_grouped} if _takes_grouped_heads(varlen_attn) else {}
    if is_grouped and not options:
        key, value = (part.repeat_interleave(query.size(1) // part.size(1), dim=1) for part in (key, value))
    output = varlen_attn(
        query,
        key,
        value,
        spans.cu_queries,
        spans.cu_keys,
        *spans.longest,
        scale=size**-0.5 if scale is None else scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(output, torch.Tensor)  # a tuple only if return_aux is requested
    return output[..., :value_size].flatten(1)


@cache
def _takes_grouped_heads(kernel: Callable[..., object]) -> bool:
    """Return whether ``varlen_attn`` accepts fewer heads of keys than of queries; that of torch 2.11 does not."""
    return "enable_gqa" in signature(kernel).parameters


def _widened(values: torch.Tensor, width: int) -> torch.Tensor:
    return values if values.size(-1) == width else pad(values, (0, width - values.size(-1)))


def attend_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    *,
    scale: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """Return the result of :func:`attend` with a kernel for batches."""
    batches = zip(packing.pad(query), packing.pad_keys(key), packing.pad_keys(value), strict=True)
    return packing.unpad([_attend_batch(q, k, v, scale=scale, window=window) for q, k, v in batches])


def causal_mask(
    num_queries: int, num_keys: int, window: int | None = None, *, device: torch.device | None = None
) -> torch.Tensor:
    """Return which keys each query sees: bool [queries, keys].

    Arguments:
        num_queries: they belong to the last keys.
        window: as for :func:`attend`.
    """
    before = num_keys - num_queries
    visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(diagonal=before)
    return visible if window is None else visible.triu(diagonal=before - window + 1)


def _attend_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, window: int | None
) -> torch.Tensor:
    """Attend with the last s of m tokens, [b, heads, s, size], over all m, [b, heads or a divisor of it, m, size]."""
    s, m = q.size(2), k.size(2)
    visible = None if s == m and (window is None or window >= m) else causal_mask(s, m, window, device=q.device)
    if q.is_cuda and q.size(1) != k.size(1):  # the kernel for masks and float32 does not support grouped heads
        k, v = (part.repeat_interleave(q.size(1) // part.size(1), dim=1) for part in (k, v))
    with sdpa_kernel(list(LINEAR)) if q.is_cuda else nullcontext():
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            is_causal=visible is None,
            scale=scale,
            enable_gqa=q.size(1) != k.size(1),
        )
