"""Qwen3 mixtures of experts (Qwen3 Technical Report, 2505.09388)."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Experts, Positions, Shape

__all__ = ["FAMILY"]


def _qwen(size: str, published: Published, *, hidden: int, mlp: int, expert: int, layers: int, heads: int) -> Preset:
    shape = Shape(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        positions=Positions(rope_theta=1e6),
        use_qk_norm=True,
        experts=Experts(n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=expert),
    )
    return Preset(name=f"qwen3-{size}", checkpoint=f"Qwen/Qwen3-{size}", shape=shape, published=published)


FAMILY = Family(
    name="qwen3_moe",
    title="Qwen3, mixtures of experts",
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    target="slime_models.qwen3_moe:Qwen3Moe",
    unsupported="slime_models.refusals:qwen3_moe",
    source="Qwen3 Technical Report, 2505.09388",
    presets=(
        _qwen(
            "30B-A3B",
            Published(total=30.5, active=3.3, digits=1, stored=30_532_122_624),
            hidden=2048,
            mlp=6144,
            expert=768,
            layers=48,
            heads=32,
        ),
        _qwen(
            "235B-A22B",
            Published(total=235, active=22, stored=235_093_634_560),
            hidden=4096,
            mlp=12288,
            expert=1536,
            layers=94,
            heads=64,
        ),
    ),
)
