"""Attention over the sequences of a packed row, with the kernel that the device has.

    varlen     CUDA, bfloat16 or float16: FlashAttention over sequences of unequal length, directly on the row
    padded     a CPU, and float32 or dropout on CUDA: batches of right-padded sequences (slime_core.modeling.rows)

Both compute the same sums; tests compare them with each other, with a loop, and with flex_attention. On CUDA, torch
falls back to a kernel that stores all scores of a batch, 4 bytes for each pair of tokens and head, if no other kernel
supports the call. That kernel is excluded, so a call that only it supports is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from slime_core.errors import RunError
from slime_core.modeling.rows import Spans

__all__ = ["attend_batch", "attend_spans", "takes_spans"]

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
