"""GLM-4.5, 4.6 and 4.7, mixtures of experts (GLM-4.5 report, 2508.06471)."""

from __future__ import annotations

from slime_models.families.family import Family, Preset, Published
from slime_models.shape import Experts, Positions, Shape

__all__ = ["FAMILY"]


def _large(name: str, checkpoint: str, *, context: int) -> Preset:
    shape = _glm(
        hidden=5120,
        mlp=12288,
        layers=92,
        context=context,
        normed=True,
        experts=_experts(number=160, size=1536, dense=3, scaling=2.5),
    )
    published = Published(total=355, active=32, counts="next_token", stored=358_337_791_296)
    return Preset(name=name, checkpoint=f"zai-org/{checkpoint}", shape=shape, published=published)


def _experts(*, number: int, size: int, dense: int, scaling: float) -> Experts:
    return Experts(
        n_routed_experts=number,
        num_experts_per_tok=8,
        moe_intermediate_size=size,
        n_shared_experts=1,
        first_k_dense_replace=dense,
        scoring_func="sigmoid",
        routed_scaling_factor=scaling,
    )


def _glm(*, hidden: int, mlp: int, layers: int, context: int, normed: bool, experts: Experts) -> Shape:
    return Shape(
        architecture="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151552,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        positions=Positions(rope_theta=1e6, partial_rotary_factor=0.5),
        attention_bias=True,
        use_qk_norm=normed,
        experts=experts,
        num_nextn_predict_layers=1,
    )


AIR = _glm(
    hidden=4096,
    mlp=10944,
    layers=46,
    context=131072,
    normed=False,
    experts=_experts(number=128, size=1408, dense=1, scaling=1.0),
)

FAMILY = Family(
    name="glm4_moe",
    title="GLM-4.5, 4.6, 4.7",
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    target="slime_models.glm4_moe:Glm4Moe",
    unsupported="slime_models.refusals:glm4_moe",
    source="GLM-4.5: Agentic, Reasoning, and Coding Foundation Models, 2508.06471",
    presets=(
        _large("glm4.5-355B-A32B", "GLM-4.5", context=131072),
        Preset(
            name="glm4.5-106B-A12B",
            checkpoint="zai-org/GLM-4.5-Air",
            shape=AIR,
            published=Published(total=106, active=12, counts="without_embeddings", stored=110_468_824_832),
        ),
        _large("glm4.6-355B-A32B", "GLM-4.6", context=202752),
        _large("glm4.7-355B-A32B", "GLM-4.7", context=202752),
    ),
)
