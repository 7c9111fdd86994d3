"""Converts a shape to the sizes that memory depends on; :mod:`slime_core.modeling.memory` computes with them."""

from __future__ import annotations

from slime_core.modeling.memory import ModelSize
from slime_models.count import count
from slime_models.shape import Shape

__all__ = ["size_of"]


def size_of(shape: Shape) -> ModelSize:
    """Return the sizes of ``shape``."""
    counted, experts, latent = count(shape), shape.experts, shape.latent
    inner = shape.intermediate_size if shape.dense_layers else 0
    head = latent.qk_nope_head_dim + latent.qk_rope_head_dim if latent else shape.head_dim
    return ModelSize(
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        vocab=shape.vocab_size,
        heads=shape.num_attention_heads,
        # Compressed keys and values are expanded to all heads before attention.
        key_heads=shape.num_attention_heads if latent else shape.num_key_value_heads,
        head=head,
        inner=inner,
        embedding=counted.embedding,
        output=counted.output,
        dense=counted.dense,
        experts=experts.n_routed_experts if experts else 0,
        taken=experts.num_experts_per_tok if experts else 0,
        expert_inner=experts.moe_intermediate_size if experts else 0,
        shared_inner=experts.moe_intermediate_size * experts.n_shared_experts if experts else 0,
        routed=counted.experts,
        latent=latent.kv_lora_rank + latent.qk_rope_head_dim if latent else 0,
    )
