"""Moonlight-16B-A3B (2502.16982): the architecture of DeepSeek-V3 without compressed queries."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Experts, Latent, Positions, Shape

__all__ = ["FAMILY"]

MOONLIGHT = Shape(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    hidden_size=2048,
    intermediate_size=11264,
    num_hidden_layers=27,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=64,
    vocab_size=163840,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    positions=Positions(rope_theta=5e4),
    latent=Latent(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    experts=Experts(
        n_routed_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        n_shared_experts=2,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        routed_scaling_factor=2.446,
    ),
)

FAMILY = Family(
    name="moonlight",
    title="Moonlight",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    target="slime_models.deepseek_v3:DeepseekV3",
    unsupported="slime_models.refusals:deepseek_v3",
    source="Muon is Scalable for LLM Training, 2502.16982",
    presets=(
        Preset(
            name="moonlight-16B-A3B",
            checkpoint="moonshotai/Moonlight-16B-A3B-Instruct",
            shape=MOONLIGHT,
            published=Published(
                total=15.29,
                active=2.24,
                digits=2,
                counts="without_embeddings",
                stored=15_960_111_936,
                other=1728,
            ),
        ),
    ),
)
