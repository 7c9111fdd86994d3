"""Dense GLM-4 of April 2025 (GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1-9B-0414): norms before and after each part, half of
each head rotated in interleaved pairs. Source: zai-org/GLM-4 and transformers, models/glm4."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Positions, Shape

__all__ = ["FAMILY"]


def _glm(
    name: str,
    checkpoint: str,
    published: Published,
    *,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    bias: bool,
) -> Preset:
    shape = Shape(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=151552,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        positions=Positions(rope_theta=1e4, partial_rotary_factor=0.5),
        attention_bias=bias,
        sandwich_norm=True,
    )
    return Preset(name=name, checkpoint=f"zai-org/{checkpoint}", shape=shape, published=published)


NINE = {"hidden": 4096, "mlp": 13696, "layers": 40, "heads": 32}

FAMILY = Family(
    name="glm4",
    title="GLM-4 and GLM-Z1, dense",
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    target="slime_models.glm4:Glm4",
    unsupported="slime_models.refusals:glm4",
    source="ChatGLM: from GLM-130B to GLM-4, 2406.12793; zai-org/GLM-4 for the models of April 2025",
    presets=(
        _glm("glm4-9B", "GLM-4-9B-0414", Published(total=9.4, digits=1, stored=9_400_279_040), **NINE, bias=True),
        _glm("glm-z1-9B", "GLM-Z1-9B-0414", Published(total=9.4, digits=1, stored=9_400_279_040), **NINE, bias=True),
        _glm(
            "glm4-32B",
            "GLM-4-32B-0414",
            Published(total=32.57, digits=2, source="ik_llama.cpp, pull request 344: model params"),
            hidden=6144,
            mlp=23040,
            layers=61,
            heads=48,
            bias=False,
        ),
    ),
)
