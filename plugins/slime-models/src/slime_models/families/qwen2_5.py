"""Qwen2 and Qwen2.5 dense models (Qwen2.5 Technical Report, 2412.15115)."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Positions, Shape

__all__ = ["FAMILY"]


def _qwen(size: str, published: Published, *, hidden: int, mlp: int, layers: int, heads: tuple[int, int]) -> Preset:
    small = size in ("0.5B", "1.5B", "3B")
    shape = Shape(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=hidden // heads[0],
        vocab_size=151936 if small else 152064,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        positions=Positions(rope_theta=1e6),
        tie_word_embeddings=small,
        attention_bias=True,
    )
    return Preset(name=f"qwen2.5-{size}", checkpoint=f"Qwen/Qwen2.5-{size}-Instruct", shape=shape, published=published)


THIRTY_TWO = Published(
    total=32.8,
    digits=1,
    stored=32_763_876_352,
    source="the count of its safetensors; the card says 32.5, and that 31.0 are not embeddings: 31.2 are",
)

FAMILY = Family(
    name="qwen2",
    title="Qwen2 and Qwen2.5, dense",
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    target="slime_models.qwen2:Qwen2",
    unsupported="slime_models.refusals:qwen2",
    source="Qwen2.5 Technical Report, 2412.15115",
    presets=(
        _qwen("0.5B", Published(total=0.49, digits=2), hidden=896, mlp=4864, layers=24, heads=(14, 2)),
        _qwen("1.5B", Published(total=1.54, digits=2), hidden=1536, mlp=8960, layers=28, heads=(12, 2)),
        _qwen(
            "3B",
            Published(total=3.09, digits=2, stored=3_085_938_688),
            hidden=2048,
            mlp=11008,
            layers=36,
            heads=(16, 2),
        ),
        _qwen(
            "7B",
            Published(total=7.61, digits=2, stored=7_615_616_512),
            hidden=3584,
            mlp=18944,
            layers=28,
            heads=(28, 4),
        ),
        _qwen(
            "14B",
            Published(total=14.7, digits=1, stored=14_770_033_664),
            hidden=5120,
            mlp=13824,
            layers=48,
            heads=(40, 8),
        ),
        _qwen("32B", THIRTY_TWO, hidden=5120, mlp=27648, layers=64, heads=(40, 8)),
        _qwen(
            "72B",
            Published(total=72.7, digits=1, stored=72_706_203_648),
            hidden=8192,
            mlp=29568,
            layers=80,
            heads=(64, 8),
        ),
    ),
)
