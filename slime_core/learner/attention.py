"""Attention over packed sequences without a loop over sequences.

    Packing              where the tokens of every sequence of a row go; computed once for a row, shared by all layers
    PackedAttention      the core attention: softmax(q k) v
    PackedSelfAttention  the layer around it: gives every packed token its rotary position

A row holds hundreds of short sequences. The core gathers them into right-padded batches ``[n, L]``, one batch for all
lengths between two powers of two, so that at most half of a batch is padding and a row costs a handful of calls. Under
a causal mask no token looks at what stands to its right, so the padding needs no mask: it repeats the sequence's last
token, and since nothing reads the output there, its gradient is exactly zero.

The rotary part avoids three things in Megatron's THD path (models/common/embeddings/rope_utils.py:178), which cuts
the table of angles once a sequence, for queries and for keys, in every layer: its time (with 256 sequences of 12
tokens some 7 % of a small model's step), a wait for the device in every layer (``cu_seqlens.tolist()``), and its
refusal of padding at the end of a row. The same function takes a table that already has one entry a token, told by
its length (:211). So the layer looks the entries up by position and hands them over as one sequence. Multi-latent
attention asks for its own table and keeps Megatron's path.

Left out: context parallelism, sliding windows, attention that is not causal. All are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from slime_core.errors import ConfigError

__all__ = ["PackedAttention", "PackedSelfAttention", "Packing"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the t tokens of a row stand in right-padded batches of s slots altogether.

    Example: sequences of 4 and 3 tokens share a batch of 2 x 4 slots: ``rows_S = [0, 1, 2, 3, 4, 5, 6, 6]``,
    ``slots_T = [0, 1, 2, 3, 4, 5, 6]``, ``shapes = ((2, 4),)``, ``positions_T = [0, 1, 2, 3, 0, 1, 2]``.

    Arguments:
        rows_S: int64 [s], the token each slot takes; padding takes its sequence's last one.
        slots_T: int64 [t], the slot each token stands in.
        positions_T: int64 [t], place of each token in its own sequence.
        shapes: sequences and slots a sequence of each batch, in the order of the slots.
        whole: int32 [2], ``[0, t]``: the row taken for one sequence.
    """

    rows_S: torch.Tensor
    slots_T: torch.Tensor
    positions_T: torch.Tensor
    shapes: tuple[tuple[int, int], ...]
    whole: torch.Tensor

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, *, num_tokens: int) -> Packing:
        """The packing of ``cu_seqlens``; computed at the first call for this tensor, remembered as long as it lives.

        Arguments:
            cu_seqlens: int32 [b + 1], ascending from 0; must not be changed in place. Sequences may be empty. Tokens
                beyond its end are padding: one more sequence, which no other sees.
            num_tokens: t.

        Raises:
            ValueError: a sequence ends after the row does.
        """
        found: Packing | None = _PACKINGS.get(cu_seqlens)
        if found is None or found.positions_T.numel() != num_tokens:
            found = _PACKINGS[cu_seqlens] = _pack(cu_seqlens, num_tokens)
        return found

    def pad(self, values_TNH: torch.Tensor) -> Iterator[torch.Tensor]:
        """The batches of ``values_TNH`` [t, heads, size], each [n, heads, L, size]."""
        padded_SNH: torch.Tensor = _Pad.apply(values_TNH, self.rows_S, self.slots_T)  # type: ignore[no-untyped-call]
        parts = torch.split(padded_SNH, [n * length for n, length in self.shapes])
        for part, (n, length) in zip(parts, self.shapes, strict=True):
            yield part.view(n, length, *part.shape[1:]).transpose(1, 2)

    def unpad(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """The inverse of :meth:`pad`, heads joined: [t, heads * size]."""
        slots = [batch.transpose(1, 2).flatten(2).flatten(0, 1) for batch in batches]
        result: torch.Tensor = _Unpad.apply(torch.cat(slots), self.slots_T)  # type: ignore[no-untyped-call]
        return result


_PACKINGS = WeakTensorKeyDictionary()


def _pack(cu_seqlens: torch.Tensor, num_tokens: int) -> Packing:
    device = cu_seqlens.device
    ends = torch.cat([cu_seqlens.detach().to("cpu", torch.int64), torch.tensor([num_tokens])])
    if bool((ends.diff() < 0).any()):
        raise ValueError(f"cu_seqlens ends at {int(ends[-2])}, but the packed row holds {num_tokens} tokens")
    lengths = ends.diff()
    starts, lengths = ends[:-1][lengths > 0], lengths[lengths > 0]
    classes = torch.ceil(torch.log2(lengths.double()))
    rows, shapes, slots_T, used = [], [], torch.empty(num_tokens, dtype=torch.int64), 0
    for size_class in torch.unique(classes).tolist():
        members = classes == size_class
        rows_nL, real_nL = _right_pad(starts[members], lengths[members])
        slots_T[rows_nL[real_nL]] = used + real_nL.flatten().nonzero().squeeze(1)
        rows.append(rows_nL.flatten())
        shapes.append((rows_nL.size(0), rows_nL.size(1)))
        used += rows_nL.numel()
    positions_T = torch.arange(num_tokens) - starts.repeat_interleave(lengths)
    return Packing(
        rows_S=torch.cat(rows).to(device),
        slots_T=slots_T.to(device),
        positions_T=positions_T.to(device),
        shapes=tuple(shapes),
        whole=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
    )


def _right_pad(starts: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, L] of sequences, each filled up with its last row, and which of them are real."""
    columns = torch.arange(int(lengths.max()))[None]
    return starts[:, None] + torch.minimum(columns, lengths[:, None] - 1), columns < lengths[:, None]


class _Pad(torch.autograd.Function):
    """Gather tokens into slots. The gradient is a gather as well, since padding has none: no atomics."""

    @staticmethod
    def forward(ctx: Any, values_T: torch.Tensor, rows_S: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots_T)
        return values_T.index_select(0, rows_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_S: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slots_T,) = ctx.saved_tensors
        return gradient_S.index_select(0, slots_T), None, None


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


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal core attention over packed rows or padded batches; takes the place of Megatron's in the layer spec.

    Queries may have a multiple of the heads of keys and values, and values another size than queries (multi-latent
    attention).

    Arguments: those that Megatron hands to every core attention (transformer/attention.py:318).

    Raises:
        ConfigError: context parallelism, a sliding window or attention that is not causal was asked for.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        _refuse_unsupported(config, attn_mask_type, attention_type)
        self._scale = softmax_scale
        if config.apply_query_key_layer_scaling:
            self._scale = (softmax_scale or 1 / math.sqrt(config.kv_channels)) / max(1, layer_number)
        self._dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """softmax(scale q k + causal mask) v.

        Arguments:
            query, key, value: packed [t, heads, size], with or without a batch dimension of 1 in second place; else
                [s, b, heads, size].
            attention_mask: bool, True hides, broadcast over [b, heads, s, s]; of padded batches only. It hides *more*
                than the causal mask, which always holds.
            packed_seq_params: where the sequences of a packed row start and end.

        Returns:
            [t, heads * size], [t, 1, heads * size] or [s, b, heads * size].
        """
        if packed_seq_params is None:
            return self._attend_padded(query, key, value, attention_mask)
        if query.dim() == 4:
            return self._attend_packed(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params).unsqueeze(
                1
            )
        return self._attend_packed(query, key, value, packed_seq_params)

    def _attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        packing = Packing.of(packed.cu_seqlens_q, num_tokens=query.size(0))
        batches = zip(packing.pad(query), packing.pad(key), packing.pad(value), strict=True)
        return packing.unpad([self._attend(q, k, v, None) for q, k, v in batches])

    def _attend_padded(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        visible = None
        if hidden is not None:
            ones = torch.ones(query.size(0), key.size(0), dtype=torch.bool, device=query.device)
            visible = ones.tril() & ~hidden
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        return self._attend(q, k, v, visible).permute(2, 0, 1, 3).flatten(2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        """[b, heads, s, size] each; ``visible`` None: causal."""
        dropout = self._dropout if self.training else 0.0
        with self._random_state(dropout):
            return scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=visible,
                is_causal=visible is None,
                dropout_p=dropout,
                scale=self._scale,
                enable_gqa=q.size(1) != k.size(1),
            )

    def _random_state(self, dropout: float) -> AbstractContextManager[Any]:
        """Every tensor-parallel rank drops entries of its own heads; sequence parallelism sees to that already."""
        if dropout == 0 or self.config.sequence_parallel:
            return nullcontext()
        state: AbstractContextManager[Any] = tensor_parallel.get_cuda_rng_tracker().fork()
        return state


def _refuse_unsupported(config: Any, mask_type: AttnMaskType, attention_type: str) -> None:
    if config.context_parallel_size > 1:
        raise ConfigError(
            f"context parallel size {config.context_parallel_size} was asked for; packed attention keeps every "
            "sequence whole on one rank, so only 1 is accepted; use tensor or pipeline parallelism for long sequences"
        )
    if config.window_size is not None:
        raise ConfigError(f"sliding-window attention {config.window_size} was asked for; only full attention is built")
    if attention_type != "self" or mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise ConfigError(
            f"{attention_type} attention with mask {mask_type.name} was asked for; only causal self-attention is built"
        )


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's self-attention layer; the rotary angles of a packed row are looked up in one go."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **options: Any,
    ) -> Any:
        """As upstream; ``rotary_pos_emb`` [longest sequence, 1, 1, size] are the angles by position."""
        if packed_seq_params is not None and rotary_pos_emb is not None:
            packing = Packing.of(packed_seq_params.cu_seqlens_q, num_tokens=self._num_tokens(hidden_states))
            rotary_pos_emb = rotary_pos_emb.index_select(0, packing.positions_T)
            packed_seq_params = replace(
                packed_seq_params, cu_seqlens_q_padded=packing.whole, cu_seqlens_kv_padded=packing.whole
            )
        return super().forward(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **options,
        )

    def _num_tokens(self, hidden_states: torch.Tensor) -> int:
        shards = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        return hidden_states.size(0) * int(shards)
