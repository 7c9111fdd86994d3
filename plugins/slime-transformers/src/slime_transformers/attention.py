"""Attention of transformers' models over packed rows; registered as the attention implementation ``slime_packed``.

transformers calls it in every attention layer. Full causal attention and sliding windows run on the core's kernels. Two
variants that the kernels lack are computed from all scores of a batch: soft caps (Gemma 2) and sinks (gpt-oss). They
take memory that grows with the square of the longest sample.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime_core.errors import ConfigError
from slime_core.modeling.layers import PackedRow
from slime_core.modeling.rows import Packing, Sequences, attend, causal_mask

IMPLEMENTATION = "slime_packed"
"""Name of the attention function in transformers' registry. transformers creates no mask for such a name."""

ROW = "packed_row"
"""Keyword argument by which a model passes the description of its row on to attention."""

IGNORED = frozenset(
    [
        *("is_causal", "position_ids", "cache_position", "past_key_values", "past_key_value", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
        *("position_embeddings", "layer_idx", "layer_type"),
    ]
)
"""Arguments that change nothing here: packed rows are causal, and training uses no cache."""


def register() -> None:
    """Register :func:`packed_attention` with transformers; a second call changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return softmax(scaling q k) v of every sequence of a row, causal, as transformers' attention functions do.

    Arguments:
        query: [1, heads, t, size].
        key, value: [1, heads or a divisor of it, t, size]; values may have another size.
        sliding_window: number of keys that a token sees, its own included. None for all keys before it.
        softcap: replaces a score by ``softcap * tanh(score / softcap)``. None for no soft cap.
        s_aux: [heads], a score for each head that takes part in the softmax and has no value. None for no sinks.
        others: must contain ``packed_row``, the description of the row.

    Returns:
        [1, t, heads, value size], and None instead of the probabilities.

    Raises:
        ConfigError: the layer passes another argument, or does not pass the description of the row on.
    """
    row: PackedSeqParams | None = others.pop(ROW, None)
    _refuse_unknown(module, others, attention_mask=attention_mask, dropout=dropout, row=row)
    assert row is not None
    num_tokens = query.size(2)
    continues = row.continues if isinstance(row, PackedRow) else None
    sequences = Sequences.of(row.cu_seqlens_q, num_tokens=num_tokens, continues=continues)
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    window = sliding_window if sliding_window is not None and sliding_window < int(sequences.keys.max()) else None
    if softcap is None and s_aux is None:
        output = attend(q, k, v, sequences, scale=scaling, window=window)
    else:
        output = attend_scores(q, k, v, sequences.packing, scale=scaling, window=window, softcap=softcap, sinks=s_aux)
    return output.view(1, num_tokens, query.size(1), value.size(-1)), None


def attend_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the result of :func:`packed_attention`, [t, heads * value size], from all scores of each batch.

    Arguments: query, key and value [t, heads, size], as for :func:`slime_core.modeling.rows.attend`.
    """
    scale = query.size(-1) ** -0.5 if scale is None else scale
    repeats = query.size(1) // key.size(1)
    outputs = []
    for q, k, v in zip(packing.pad(query), packing.pad_keys(key), packing.pad_keys(value), strict=True):
        k, v = (part.repeat_interleave(repeats, dim=1) for part in (k, v))
        scores = (q @ k.transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        size, keys = scores.shape[2:]
        visible = causal_mask(size, keys, window, device=q.device)
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        if sinks is not None:
            column = sinks.reshape(1, -1, 1, 1).expand(scores.size(0), -1, size, 1).to(scores.dtype)
            scores = torch.cat([scores, column], dim=-1)
        outputs.append(scores.float().softmax(dim=-1).to(q.dtype)[..., :keys] @ v)
    return packing.unpad(outputs)


def _refuse_unknown(
    module: torch.nn.Module,
    others: dict[str, Any],
    *,
    attention_mask: torch.Tensor | None,
    dropout: float,
    row: PackedSeqParams | None,
) -> None:
    name = type(module).__name__
    if row is None:
        raise ConfigError(f"{name} does not pass keyword arguments to its attention, so rows cannot be packed")
    unknown = sorted(key for key, value in others.items() if value is not None and key not in IGNORED)
    if unknown or attention_mask is not None or dropout:
        more = [*unknown, *(["a mask"] if attention_mask is not None else []), *(["dropout"] if dropout else [])]
        raise ConfigError(f"{name} passes {', '.join(more)} to its attention, which packed rows do not support")
