"""Fields of Megatron's TransformerConfig for parts that several families share, from Hugging Face configs.

Only the policy loss trains a router, and its bias keeps the checkpoint's value, because the engines route with it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["latent_attention", "sigmoid_experts"]


def sigmoid_experts(config: Any) -> dict[str, Any]:
    """Return the fields of experts that a sigmoid router with a bias selects (DeepSeek-V3, 2412.19437, section 2.1.2).

    Arguments:
        config: the Hugging Face config of such a family.
    """
    kinds = getattr(config, "mlp_layer_types", None)
    dense = getattr(config, "first_k_dense_replace", 0)
    sparse = [layer >= dense for layer in range(config.num_hidden_layers)]
    grouped = {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
    return {
        "num_moe_experts": config.n_routed_experts,
        "moe_layer_freq": [int(kind) for kind in ([kind == "sparse" for kind in kinds] if kinds else sparse)],
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        **(grouped if config.n_group > 1 else {}),
    }


def latent_attention(config: Any) -> dict[str, Any]:
    """Return the fields of multi-latent attention (DeepSeek-V2, 2405.04434), with plain or YaRN positions.

    Arguments:
        config: the Hugging Face config of such a family, as transformers 5 reads it.
    """
    rope = config.rope_parameters
    scaled = rope.get("rope_type", "default") == "yarn"
    yarn = {
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "original_max_position_embeddings": rope.get("original_max_position_embeddings"),
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rotary_base": rope["rope_theta"],
        "rope_type": "yarn" if scaled else "rope",
        **(yarn if scaled else {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}),
    }
