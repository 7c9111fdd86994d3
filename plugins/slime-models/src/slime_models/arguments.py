"""The Megatron arguments that describe a model, as launch scripts use them: ``${MODEL_ARGS[@]}``.

Arguments that select kernels or losses (``--moe-grouped-gemm``, ``--moe-aux-loss-coeff``) are left out: they are no
property of a model, and slime sets them itself. ``slime run`` compares each argument with ``config.json``.
"""

from __future__ import annotations

from collections.abc import Iterator

from slime_models.shape import Experts, Latent, Shape

__all__ = ["Argument", "arguments"]

Argument = tuple[str, str | int | float | None]
"""Flag without dashes, and its value; None if the flag takes no value."""


def arguments(shape: Shape) -> Iterator[Argument]:
    """Yield the arguments, in the order of slime's launch scripts."""
    yield "swiglu", None
    yield "num-layers", shape.num_hidden_layers
    yield "hidden-size", shape.hidden_size
    yield "ffn-hidden-size", shape.intermediate_size
    yield "num-attention-heads", shape.num_attention_heads
    if shape.latent is not None:
        yield from _latent(shape.latent)
    else:
        if shape.num_key_value_heads != shape.num_attention_heads:
            yield "group-query-attention", None
            yield "num-query-groups", shape.num_key_value_heads
        yield "kv-channels", shape.head_dim
    if shape.use_qk_norm or shape.latent is not None:
        yield "qk-layernorm", None
    if shape.attention_bias:
        yield "add-qkv-bias", None
    yield "disable-bias-linear", None
    yield "normalization", "RMSNorm"
    yield "norm-epsilon", shape.rms_norm_eps
    yield "position-embedding-type", "rope"
    yield "rotary-base", int(shape.positions.rope_theta)
    if shape.positions.partial_rotary_factor != 1.0:
        yield "rotary-percent", shape.positions.partial_rotary_factor
    yield "vocab-size", shape.vocab_size
    if not shape.tie_word_embeddings:
        yield "untie-embeddings-and-output-weights", None
    if shape.experts is not None:
        yield from _experts(shape.experts, shape.num_hidden_layers)


def _latent(latent: Latent) -> Iterator[Argument]:
    yield "multi-latent-attention", None
    if latent.q_lora_rank is not None:
        yield "q-lora-rank", latent.q_lora_rank
    yield "kv-lora-rank", latent.kv_lora_rank
    yield "qk-head-dim", latent.qk_nope_head_dim
    yield "qk-pos-emb-head-dim", latent.qk_rope_head_dim
    yield "v-head-dim", latent.v_head_dim


def _experts(experts: Experts, layers: int) -> Iterator[Argument]:
    dense = experts.first_k_dense_replace
    yield "num-experts", experts.n_routed_experts
    yield "moe-layer-freq", f"[0]*{dense}+[1]*{layers - dense}" if dense else f"[1]*{layers}"
    yield "moe-ffn-hidden-size", experts.moe_intermediate_size
    yield "moe-router-topk", experts.num_experts_per_tok
    yield "moe-router-score-function", experts.scoring_func
    if experts.n_shared_experts:
        yield "moe-shared-expert-intermediate-size", experts.n_shared_experts * experts.moe_intermediate_size
    if experts.scoring_func == "sigmoid":
        yield "moe-router-pre-softmax", None
        yield "moe-router-enable-expert-bias", None
    if experts.routed_scaling_factor != 1.0:
        yield "moe-router-topk-scaling-factor", experts.routed_scaling_factor
    if experts.n_group > 1:
        yield "moe-router-num-groups", experts.n_group
        yield "moe-router-group-topk", experts.topk_group
