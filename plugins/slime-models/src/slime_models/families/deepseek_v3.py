"""DeepSeek V3, V3.1 and R1 (DeepSeek-V3 Technical Report, 2412.19437): latent attention, experts chosen in groups."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Experts, Latent, Positions, Shape

__all__ = ["FAMILY"]

V3 = Shape(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    head_dim=64,
    vocab_size=129280,
    max_position_embeddings=163840,
    rms_norm_eps=1e-6,
    positions=Positions(
        rope_theta=1e4,
        rope_type="yarn",
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    latent=Latent(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    experts=Experts(
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        first_k_dense_replace=3,
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
    ),
    num_nextn_predict_layers=1,
)

NAMES = {"deepseek-v3": "DeepSeek-V3", "deepseek-v3.1": "DeepSeek-V3.1", "deepseek-r1": "DeepSeek-R1"}
PUBLISHED = Published(total=671, active=37, stored=684_531_386_000, other=41_540_496)

FAMILY = Family(
    name="deepseek_v3",
    title="DeepSeek V3, V3.1, R1",
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    target="slime_models.deepseek_v3:DeepseekV3",
    unsupported="slime_models.refusals:deepseek_v3",
    source="DeepSeek-V3 Technical Report, 2412.19437",
    presets=tuple(
        Preset(name=name, checkpoint=f"deepseek-ai/{card}", shape=V3, published=PUBLISHED)
        for name, card in NAMES.items()
    ),
)
