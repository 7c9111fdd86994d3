"""Attention of many sequences in one call, in the place of SGLang's ``torch_native``, which loops over sequences.

SGLang's loop (sglang 0.5.23, srt/layers/attention/torch_native_backend.py) calls torch once a sequence and layer; with
64 short sequences in flight that is most of the time of a step. Here the sequences of a batch that have similar lengths
are padded to the longest of them and computed by one call of ``scaled_dot_product_attention``; padding is masked.
What the loop does beyond that (cross attention, sliding windows, encoders) is left to it. Can go when upstream's backend
computes batches.

Shapes: b sequences of a batch, Q queries and L keys of the longest of them, H query heads, K key-value heads, D of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

WASTE = 1.5
"""Largest ratio of padded to real pairs of a query and a key in one call. Padding costs time; so does another call."""

PAIRS = 2**22
"""Most padded pairs in one call; a quarter of the bytes of its mask. Beyond, another call costs nothing that shows."""

SMALL = 2**12
"""Padded pairs that are always computed together: they cost less than a call does."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences that are computed together.

    Arguments:
        queries_bQ: row of each query in the flat tensor of all queries; 0 where padding.
        slots_bL: slot of each key in the cache; 0, which SGLang keeps for padding, where padding.
        mask_b1QL: True if a query reads a key. None if it reads all, or the earlier ones (is_causal).
        is_causal: query i of every sequence reads keys 0 to i, and there are as many of both.
        rows_T: places of the real queries in queries_bQ, flattened. None if all are real.
    """

    queries_bQ: torch.Tensor
    slots_bL: torch.Tensor
    mask_b1QL: torch.Tensor | None
    is_causal: bool
    rows_T: torch.Tensor | None


def divide(num_queries: list[int], num_keys: list[int]) -> Iterator[list[int]]:
    """Numbers of sequences that are computed together, the shortest first."""
    order = sorted(range(len(num_keys)), key=lambda sequence: (num_keys[sequence], num_queries[sequence]))
    batch: list[int] = []
    real, longest = 0, 0
    for sequence in order:
        pairs = num_queries[sequence] * num_keys[sequence]
        longest = max(longest, num_queries[sequence])
        padded = (len(batch) + 1) * longest * num_keys[sequence]
        if batch and padded > max(SMALL, min(PAIRS, WASTE * (real + pairs))):
            yield batch
            batch, real, longest = [], 0, num_queries[sequence]
        batch.append(sequence)
        real += pairs
    if batch:
        yield batch


def pad(
    queries_B: torch.Tensor, keys_B: torch.Tensor, pools_B: torch.Tensor, slots: torch.Tensor
) -> list[PaddedBatch]:
    """The batches of a forward pass.

    Arguments:
        queries_B: new tokens of each sequence, one after the other in the flat tensor of queries.
        keys_B: all tokens of each sequence; the new ones are the last.
        pools_B: row of each sequence in ``slots``.
        slots: cache slot of every token of every sequence (``req_to_token``).
    """
    starts_B = queries_B.cumsum(0) - queries_B
    columns_4B = torch.stack([starts_B, queries_B, keys_B, pools_B])
    return [_pad(columns_4B[:, sequence], slots) for sequence in divide(queries_B.tolist(), keys_B.tolist())]


def _pad(columns_4b: torch.Tensor, slots: torch.Tensor) -> PaddedBatch:
    starts_b1, queries_b1, keys_b1, pools_b1 = columns_4b[:, :, None]
    place_Q, place_L = torch.arange(int(queries_b1.max())), torch.arange(int(keys_b1.max()))
    is_query_bQ, is_key_bL = place_Q < queries_b1, place_L < keys_b1
    is_causal = len(place_Q) > 1 and bool((is_query_bQ.all() & is_key_bL.all()) & (queries_b1 == keys_b1).all())
    reads_bQL = None if is_causal else place_L <= (place_Q + keys_b1 - queries_b1)[:, :, None]
    return PaddedBatch(
        torch.where(is_query_bQ, starts_b1 + place_Q, 0),
        torch.where(is_key_bL, slots[pools_b1[:, 0], : len(place_L)], 0).long(),
        None if reads_bQL is None or bool(reads_bQL.all()) else reads_bQL[:, None],
        is_causal,
        None if bool(is_query_bQ.all()) else is_query_bQ.flatten().nonzero()[:, 0],
    )


def attend(
    batch: PaddedBatch, query: torch.Tensor, output: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: Any
) -> None:
    """Write the rows of ``output`` [tokens, H, D] that belong to ``batch``; ``keys`` and ``values`` are [slots, K, D]."""
    (b, Q), L = batch.queries_bQ.shape, batch.slots_bL.shape[1]
    H, K = query.shape[1], keys.shape[1]
    rows, slots = batch.queries_bQ.flatten(), batch.slots_bL.flatten()
    query_bHQD = query[rows].view(b, Q, H, -1).transpose(1, 2)
    key_bKLD, value_bKLD = (
        cache.index_select(0, slots).view(b, L, K, -1).transpose(1, 2).to(query.dtype) for cache in (keys, values)
    )
    if Q == 1:  # the query heads of one key-value head are further queries of it
        query_bHQD = query_bHQD.reshape(b, K, H // K, -1)
    elif K != H:
        key_bKLD, value_bKLD = (cache.repeat_interleave(H // K, 1) for cache in (key_bKLD, value_bKLD))
    out = scaled_dot_product_attention(
        query_bHQD, key_bKLD, value_bKLD, attn_mask=batch.mask_b1QL, is_causal=batch.is_causal, scale=scale
    )
    out = out.reshape(b, H, Q, -1).transpose(1, 2).reshape(b * Q, H, -1)
    if batch.rows_T is None:
        output[rows] = out
    else:
        output[rows[batch.rows_T]] = out[batch.rows_T]


class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's backend, computing batches. What is padded is planned once for the layers of a forward pass."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A forward pass of ``forward_batch`` begins."""
        super().init_forward_metadata(forward_batch)
        self._plan: list[PaddedBatch] | None = None

    def _run_sdpa_forward_extend(self, *arguments: Any, **options: Any) -> Any:
        # Positions are those of the call in ``forward_extend``.
        keys, prefixes, queries, encoders = arguments[6:10]
        is_short = bool(((prefixes == 0) | (queries * keys <= PAIRS)).all())
        if not (options["causal"] and is_short and _is_plain(encoders, options)):
            return super()._run_sdpa_forward_extend(*arguments, **options)
        return self._run(arguments, queries, options["scaling"])

    def _run_sdpa_forward_decode(self, *arguments: Any, **options: Any) -> Any:
        keys, encoders = arguments[6:8]
        if not _is_plain(encoders, options):
            return super()._run_sdpa_forward_decode(*arguments, **options)
        return self._run(arguments, torch.ones_like(keys), options["scaling"])

    def _run(self, arguments: tuple[Any, ...], queries: torch.Tensor, scale: Any) -> torch.Tensor:
        query, output, key_cache, value_cache, slots, pools, keys = arguments[:7]
        if self._plan is None:
            self._plan = pad(queries.long(), keys.long(), pools.long(), slots)
        for batch in self._plan:
            attend(batch, query, output, key_cache, value_cache, scale)
        return output  # type: ignore[no-any-return]


def _is_plain(encoder_lens: Any, options: Any) -> bool:
    return encoder_lens is None and not options["is_cross_attn"] and options["sliding_window_size"] is None
