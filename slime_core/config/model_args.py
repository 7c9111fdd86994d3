"""Megatron's flags that describe a model, compared with ``config.json``: users' launch scripts carry them.

The model is the checkpoint's; nothing here changes it. A flag that says something else, or something that the file does
not tell, is a mistake: it was meant for another checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from slime_core.config.section import Value

__all__ = ["expected"]

Described = Mapping[str, Any]


def expected(name: str, value: Value, described: Described) -> Value | None:
    """What ``--name`` must say for the model: ``value`` itself where it agrees; None: ``config.json`` does not tell.

    Arguments:
        name: of a flag that describes the model, with underscores.
        value: what was given.
        described: the JSON object of the file.
    """
    try:
        return _told(name, value, described)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return None  # text where a number belongs, or the like


def _told(name: str, value: Value, described: Described) -> Value | None:
    if name == "make_vocab_size_divisible_by":
        return _divisor(value, described)
    if name == "moe_layer_freq":
        return _frequency(value, described)
    found: Value | None = _TOLD[name](described)
    close = isinstance(found, float) and isinstance(value, float) and math.isclose(found, value, rel_tol=1e-9)
    return value if close else found


def _divisor(value: Value, described: Described) -> Value | None:
    """Megatron pads the vocabulary to a multiple of it; here nothing is padded."""
    size = described.get("vocab_size")
    return None if size is None else (value if isinstance(value, int) and value and size % value == 0 else 1)


def _frequency(value: Value, described: Described) -> Value | None:
    layers = _expert_layers(described)
    if layers is None or _listed(str(value), len(layers)) == layers:
        return None if layers is None else value
    return str(layers).replace(" ", "")


def _expert_layers(described: Described) -> list[int] | None:
    """1 for each layer with experts, 0 for each without."""
    number = described.get("num_hidden_layers")
    if _experts(described) is None or number is None:
        return None
    dense, every = described.get("first_k_dense_replace", 0), described.get("decoder_sparse_step", 1)
    only = described.get("mlp_only_layers") or ()
    return [int(place >= dense and (place + 1) % every == 0 and place not in only) for place in range(number)]


def _listed(text: str, number: int) -> list[int]:
    """``([0]*1+[1]*45)``, ``[0,1,1]`` or ``2`` (every second layer) as one entry a layer."""
    if text.isdigit():
        return [int(place % max(int(text), 1) == 0) for place in range(number)]
    found: list[int] = []
    for part in re.sub(r"[\s()]", "", text).split("+"):
        entries = re.fullmatch(r"\[([\d,]+)\](?:\*(\d{1,4}))?", part)
        found += [int(entry) for entry in entries[1].split(",")] * int(entries[2] or 1) if entries else []
    return found


def _first(*names: str) -> Callable[[Described], Any]:
    """The first of these keys that the file has."""
    return lambda described: next((described[name] for name in names if described.get(name) is not None), None)


def _number(*names: str) -> Callable[[Described], float | None]:
    return lambda described: None if (found := _first(*names)(described)) is None else float(found)


_experts = _first("num_experts", "n_routed_experts", "num_local_experts")
_heads = _first("num_attention_heads")


def _rope(described: Described) -> Mapping[str, Any] | None:
    """Parameters of rotary positions; transformers 5 keeps them apart, 4 among the others."""
    held = {**described, **(described.get("rope_parameters") or {})}
    return held if "rope_theta" in held else None


def _base(described: Described) -> float | None:
    rope = _rope(described)
    return None if rope is None else float(rope["rope_theta"])


def _share(described: Described) -> float | None:
    rope = _rope(described)
    return None if rope is None else float(rope.get("partial_rotary_factor") or 1.0)


def _head_size(described: Described) -> int | None:
    size, heads = described.get("hidden_size"), _heads(described)
    return described.get("head_dim") or (size // heads if size and heads else None)


def _is_grouped(described: Described) -> bool | None:
    heads, groups = _heads(described), _first("num_key_value_heads", "num_attention_heads")(described)
    return None if heads is None else groups != heads


def _shared_size(described: Described) -> int | None:
    number, size = described.get("n_shared_experts"), described.get("moe_intermediate_size")
    return described.get("shared_expert_intermediate_size") or (number * size if number and size else None)


def _is_untied(described: Described) -> bool | None:
    tied = described.get("tie_word_embeddings")
    return None if tied is None else not tied


def _has_qkv_bias(described: Described) -> bool:
    return bool(described.get("attention_bias", described.get("model_type") in _BIASED))


_BIASED = ("qwen2", "qwen2_moe")
"""What config.json calls the models that have biases on queries, keys and values without saying so."""


def _has_qk_norm(described: Described) -> bool:
    return bool(described.get("use_qk_norm", str(described.get("model_type")).startswith("qwen3")))


def _score_function(described: Described) -> str | None:
    """Qwen's files do not name it."""
    named: str | None = described.get("scoring_func")
    return "softmax" if named is None and described.get("model_type") in _QWEN_MIXTURES else named


def _softmax_comes_first(described: Described) -> bool | None:
    """Over all experts, before some are chosen; else over the chosen ones, which norms their sum to 1."""
    normed = described.get("norm_topk_prob")
    return None if normed is None or described.get("model_type") not in _QWEN_MIXTURES else not normed


_QWEN_MIXTURES = ("qwen2_moe", "qwen3_moe")
"""What config.json calls them."""


def _corrects_routing(described: Described) -> bool | None:
    return None if _experts(described) is None else described.get("topk_method") == "noaux_tc"


_TOLD: Mapping[str, Callable[[Described], Any]] = {
    "num_layers": _first("num_hidden_layers"),
    "hidden_size": _first("hidden_size"),
    "ffn_hidden_size": _first("intermediate_size"),
    "num_attention_heads": _heads,
    "num_query_groups": _first("num_key_value_heads", "num_attention_heads"),
    "group_query_attention": _is_grouped,
    "kv_channels": _head_size,
    "vocab_size": _first("vocab_size"),
    "max_position_embeddings": _first("max_position_embeddings"),
    "norm_epsilon": _number("rms_norm_eps"),
    "layernorm_epsilon": _number("rms_norm_eps"),
    "normalization": lambda described: "RMSNorm" if "rms_norm_eps" in described else None,
    "swiglu": lambda described: described.get("hidden_act") == "silu",
    "untie_embeddings_and_output_weights": _is_untied,
    "disable_bias_linear": lambda described: not described.get("mlp_bias", False),
    "add_bias_linear": lambda described: bool(described.get("mlp_bias", False)),
    "add_qkv_bias": _has_qkv_bias,
    "qk_layernorm": _has_qk_norm,
    "position_embedding_type": lambda described: None if _rope(described) is None else "rope",
    "use_rotary_position_embeddings": lambda described: _rope(described) is not None,
    "no_position_embedding": lambda described: _rope(described) is not None,  # no *learned* ones
    "rotary_base": _base,
    "rotary_percent": _share,
    "num_experts": _experts,
    "moe_router_topk": _first("num_experts_per_tok"),
    "moe_ffn_hidden_size": _first("moe_intermediate_size"),
    "moe_shared_expert_intermediate_size": _shared_size,
    "moe_router_num_groups": _first("n_group"),
    "moe_router_group_topk": _first("topk_group"),
    "moe_router_topk_scaling_factor": _number("routed_scaling_factor"),
    "moe_router_score_function": _score_function,
    "moe_router_pre_softmax": _softmax_comes_first,
    "moe_router_enable_expert_bias": _corrects_routing,
    "multi_latent_attention": lambda described: described.get("kv_lora_rank") is not None,
    "q_lora_rank": _first("q_lora_rank"),
    "kv_lora_rank": _first("kv_lora_rank"),
    "qk_head_dim": _first("qk_nope_head_dim"),
    "qk_pos_emb_head_dim": _first("qk_rope_head_dim"),
    "v_head_dim": _first("v_head_dim"),
}
"""Flag -> what the file tells of it, by the names that Hugging Face's configs use."""
