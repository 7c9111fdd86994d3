"""Qwen3 dense models (Qwen3 Technical Report, 2505.09388)."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Positions, Shape

__all__ = ["FAMILY"]


def _qwen(
    size: str,
    published: Published,
    *,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    rope_theta: float = 1e6,
    context: int = 40960,
) -> Preset:
    shape = Shape(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=context,
        rms_norm_eps=1e-6,
        positions=Positions(rope_theta=rope_theta),
        tie_word_embeddings=hidden < 4096,
        use_qk_norm=True,
    )
    return Preset(name=f"qwen3-{size}", checkpoint=f"Qwen/Qwen3-{size}", shape=shape, published=published)


FAMILY = Family(
    name="qwen3",
    title="Qwen3, dense",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    target="slime_models.qwen3:Qwen3",
    unsupported="slime_models.refusals:qwen3",
    source="Qwen3 Technical Report, 2505.09388",
    presets=(
        _qwen("0.6B", Published(total=0.6, digits=1), hidden=1024, mlp=3072, layers=28, heads=16),
        _qwen("1.7B", Published(total=1.7, digits=1), hidden=2048, mlp=6144, layers=28, heads=16),
        _qwen("4B", Published(total=4.0, digits=1, stored=4_022_468_096), hidden=2560, mlp=9728, layers=36, heads=32),
        _qwen(
            "4B-Instruct-2507",
            Published(total=4.0, digits=1, stored=4_022_468_096),
            hidden=2560,
            mlp=9728,
            layers=36,
            heads=32,
            rope_theta=5e6,
            context=262144,
        ),
        _qwen("8B", Published(total=8.2, digits=1, stored=8_190_735_360), hidden=4096, mlp=12288, layers=36, heads=32),
        _qwen(
            "14B", Published(total=14.8, digits=1, stored=14_768_307_200), hidden=5120, mlp=17408, layers=40, heads=40
        ),
        _qwen(
            "32B", Published(total=32.8, digits=1, stored=32_762_123_264), hidden=5120, mlp=25600, layers=64, heads=64
        ),
    ),
)
