"""Llama 3, 3.1, 3.2 and 3.3 (2407.21783). Llama 2 (2307.09288) and SmolLM2 (2502.02737) share the architecture."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Positions, Shape

__all__ = ["FAMILY"]


def _llama(
    name: str,
    checkpoint: str,
    published: Published,
    *,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    factor: float = 1.0,
) -> Preset:
    plain = Positions(rope_theta=5e5)
    scaled = Positions(rope_theta=5e5, rope_type="llama3", factor=factor, original_max_position_embeddings=8192)
    shape = Shape(
        architecture="LlamaForCausalLM",
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=hidden // heads,
        vocab_size=128256,
        max_position_embeddings=8192 if factor == 1 else 131072,
        rms_norm_eps=1e-5,
        positions=plain if factor == 1 else scaled,
        tie_word_embeddings=hidden < 4096,
    )
    return Preset(name=name, checkpoint=f"meta-llama/{checkpoint}", shape=shape, published=published)


EIGHT = {"hidden": 4096, "mlp": 14336, "layers": 32, "heads": 32}
SEVENTY = {"hidden": 8192, "mlp": 28672, "layers": 80, "heads": 64}
EIGHT_BILLION = Published(total=8.03, digits=2, stored=8_030_261_248)
SEVENTY_BILLION = Published(total=70.6, digits=1, stored=70_553_706_496)

FAMILY = Family(
    name="llama",
    title="Llama 3, 3.1, 3.2, 3.3",
    architecture="LlamaForCausalLM",
    model_type="llama",
    target="slime_models.llama:Llama",
    unsupported="slime_models.refusals:llama",
    source="The Llama 3 Herd of Models, 2407.21783",
    presets=(
        _llama("llama3-8B", "Meta-Llama-3-8B-Instruct", EIGHT_BILLION, **EIGHT),
        _llama("llama3-70B", "Meta-Llama-3-70B-Instruct", SEVENTY_BILLION, **SEVENTY),
        _llama("llama3.1-8B", "Llama-3.1-8B-Instruct", EIGHT_BILLION, **EIGHT, factor=8.0),
        _llama("llama3.1-70B", "Llama-3.1-70B-Instruct", SEVENTY_BILLION, **SEVENTY, factor=8.0),
        _llama(
            "llama3.2-1B",
            "Llama-3.2-1B-Instruct",
            Published(total=1.23, digits=2),
            hidden=2048,
            mlp=8192,
            layers=16,
            heads=32,
            factor=32.0,
        ),
        _llama(
            "llama3.2-3B",
            "Llama-3.2-3B-Instruct",
            Published(total=3.21, digits=2, stored=3_212_749_824),
            hidden=3072,
            mlp=8192,
            layers=28,
            heads=24,
            factor=32.0,
        ),
    ),
)
