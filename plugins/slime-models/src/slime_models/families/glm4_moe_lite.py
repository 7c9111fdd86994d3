"""GLM-4.7-Flash, a mixture of experts with multi-latent attention. Source: zai-org/GLM-4.7-Flash and transformers,
models/glm4_moe_lite."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Experts, Latent, Positions, Shape

__all__ = ["FAMILY"]

FLASH = Shape(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    hidden_size=2048,
    intermediate_size=10240,
    num_hidden_layers=47,
    num_attention_heads=20,
    num_key_value_heads=20,
    head_dim=64,
    vocab_size=154880,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
    positions=Positions(rope_theta=1e6),
    latent=Latent(q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256),
    experts=Experts(
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        n_shared_experts=1,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        routed_scaling_factor=1.8,
    ),
    num_nextn_predict_layers=1,
)

FAMILY = Family(
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    target="slime_models.glm4_moe_lite:Glm4MoeLite",
    unsupported="slime_models.refusals:glm4_moe_lite",
    source="the model card of zai-org/GLM-4.7-Flash",
    presets=(
        Preset(
            name="glm4.7-30B-A3B",
            checkpoint="zai-org/GLM-4.7-Flash",
            shape=FLASH,
            published=Published(total=30, active=3),
        ),
    ),
)
