"""Whether a model can take rows in which several responses continue one prompt (``docs/shared-prompts.md``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["can_share_prompts"]


def can_share_prompts(chunks: Sequence[Any], *, context: int, device: torch.device) -> bool:
    """Whether a row of shared prompts gives the sums that it gives with each prompt repeated. Collective.

    It does not where another module than our attention mixes tokens, or where the result of a token depends on which
    other tokens there are, or on chance.

    Arguments:
        chunks: what the model spec built.
        context: ranks that share a row.
        device: of this rank.

    Returns:
        The same on every rank.
    """
    able = torch.tensor(int(context == 1 and all(map(_is_able, chunks))), device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN)
    return bool(able)


def _is_able(chunk: Any) -> bool:
    from megatron.core.models.gpt import GPTModel

    if not isinstance(chunk, GPTModel) or chunk.position_embedding_type not in ("rope", "learned_absolute", "none"):
        return False
    config = chunk.config
    routed_together = config.moe_expert_capacity_factor is not None or config.moe_router_enable_expert_bias
    by_chance = bool(config.hidden_dropout or config.attention_dropout)
    across = config.multi_latent_attention or config.mtp_num_layers
    return not (routed_together or by_chance or across) and all(map(_is_ours, chunk.decoder.layers))


def _is_ours(layer: Any) -> bool:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from slime_core.modeling.attention import PackedAttention, PackedSelfAttention

    if type(layer) is not TransformerLayer or not isinstance(layer.self_attention, PackedSelfAttention):
        return False
    return isinstance(layer.self_attention.core_attention, PackedAttention)
