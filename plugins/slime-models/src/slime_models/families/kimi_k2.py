"""Kimi K2 (2507.20534): the architecture of DeepSeek-V3 under another ``model_type``, with one group of experts."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Experts, Latent, Positions, Shape

__all__ = ["FAMILY"]


def _kimi(name: str, checkpoint: str, *, factor: float, context: int, eps: float = 1e-6) -> Preset:
    shape = Shape(
        architecture="DeepseekV3ForCausalLM",
        model_type="kimi_k2",
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=64,
        vocab_size=163840,
        max_position_embeddings=context,
        rms_norm_eps=eps,
        positions=Positions(
            rope_theta=5e4,
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=4096,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        latent=Latent(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        experts=Experts(
            n_routed_experts=384,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            n_shared_experts=1,
            first_k_dense_replace=1,
            scoring_func="sigmoid",
            routed_scaling_factor=2.827,
        ),
    )
    published = Published(
        total=1026,
        active=32,
        stored=1_026_408_232_448,
        source="logical parameters in the headers of its safetensors; the card says 1T, the report 1.04T",
    )
    return Preset(name=name, checkpoint=f"moonshotai/{checkpoint}", shape=shape, published=published)


FAMILY = Family(
    name="kimi_k2",
    title="Kimi K2",
    architecture="DeepseekV3ForCausalLM",
    model_type="kimi_k2",
    target="slime_models.deepseek_v3:DeepseekV3",
    unsupported="slime_models.refusals:deepseek_v3",
    source="Kimi K2: Open Agentic Intelligence, 2507.20534",
    presets=(
        _kimi("kimi-k2", "Kimi-K2-Instruct", factor=32.0, context=131072),
        _kimi("kimi-k2-thinking", "Kimi-K2-Thinking", factor=64.0, context=262144, eps=1e-5),
    ),
)
