"""Flags of Megatron's launch scripts that describe the model and the training: checked, but otherwise without effect.

slime's scripts repeat properties of the checkpoint (``--num-layers 36 --swiglu``) and switch off features that do not
exist here (``--no-rope-fusion``). These flags are accepted if they are true, so that the scripts keep working. A flag
that contradicts the model's config.json, or that the file does not decide, was meant for another checkpoint.

The command line gets :func:`checks` through the entry point of :func:`slime_compat.flags.advice`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

__all__ = ["WITHOUT_EFFECT", "Described", "Value", "always", "checks", "describing", "expected"]

Value = bool | int | float | str
Described = Mapping[str, Any]
"""The object in a checkpoint's config.json."""

_LOCAL = "the layers are Megatron's local ones, without fused kernels"
_ROUTER = "a router is trained by the policy's loss alone"

_ALWAYS: Mapping[tuple[str, Value], str] = {
    ("it would make two passes over the same tokens differ", 0.0): "hidden_dropout attention_dropout",
    (_LOCAL, False): """
        masked_softmax_fusion bias_activation_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion
        apply_rope_fusion rope_fusion gradient_accumulation_fusion persist_layer_norm moe_shared_expert_overlap
        cross_entropy_loss_fusion
    """,
    ("softmax and reductions are computed in float32", True): """
        attention_softmax_in_fp32 grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32
    """,
    ("softmax and reductions are computed in float32", False): "grad_reduce_in_bf16",
    ("the optimizer's state is always spread over the data-parallel ranks", True): "use_distributed_optimizer",
    ("the optimizer is Adam with decoupled weight decay", "adam"): "optimizer",
    ("the optimizer is Adam with decoupled weight decay", True): "decoupled_weight_decay",
    ("gradients are summed, because the divisors are in the loss", False): """
        average_in_collective ddp_average_in_collective
    """,
    ("a run always stops at a loss or a gradient that is not finite", True): "check_for_nan_in_loss_and_grad",
    ("models are Megatron-core's", True): "use_mcore_models",
    ("checkpoints are distributed ones", "torch_dist"): "ckpt_format dist_ckpt_format",
    ("checkpoints are distributed ones", True): "use_dist_ckpt",
    ("the tokenizer is the checkpoint's", "HuggingFaceTokenizer"): "tokenizer_type",
    ("only a plain RMSNorm is built", False): "layernorm_zero_centered_gamma apply_layernorm_1p",
    ("float16 is not built; --bf16 computes in bfloat16", False): "fp16",
    ("experts exchange tokens all to all", "alltoall"): "moe_token_dispatcher_type",
    ("scores of a router are computed in float32", "fp32"): "moe_router_dtype",
    ("no token is dropped", "probs"): "moe_token_drop_policy",
    (_ROUTER, 0.0): "moe_aux_loss_coeff moe_router_bias_update_rate",
}

_ANY_NUMBER = "N"
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
    "balance_data": (),
    "distributed_backend": ("nccl",),
    "distributed_timeout_minutes": ("10",),
    "flush_cache_interval": ("1",),
    "log_probs_max_tokens_per_gpu": (_ANY_NUMBER,),
    "loss_type": ("policy_loss",),
    "megatron_to_hf_mode": ("bridge", "raw"),
    "moe_grouped_gemm": (),
    "moe_permute_fusion": (),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "num_gpus_per_node": (_ANY_NUMBER,),
    "opd_type": ("megatron",),
    "pg_loss_type": ("ppo",),
    "rollout_data_transport": ("object-store",),
    "seq_length": (_ANY_NUMBER,),
    "train_backend": ("megatron",),
    "update_weight_mode": ("full",),
    "use_dynamic_batch_size": (),
    "use_rollout_entropy": (),
}
"""Flag -> the values with which a run does what it does without the flag; empty: a switch, which takes no value.

They choose a kernel, a library or a default of slime's. The type of a router's auxiliary loss has no effect because its
coefficient is 0. ``flags.txt`` and ``megatron_flags.txt`` have the replacements of other values.
"""

_READ: Mapping[str, tuple[Callable[[str], Value], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "str": (str, "one word"),
}
"""Type -> function that parses its word, and the accepted values."""


@cache
def describing() -> Mapping[str, str]:
    """Return flag that describes the model, with underscores -> its type."""
    types = {name: kind for kind, flags in _EXPECTED.items() for name in flags}
    return {**types, "make_vocab_size_divisible_by": "int", "moe_layer_freq": "str"}


@cache
def always() -> Mapping[str, tuple[Value, str]]:
    """Return flag with a single accepted value, with underscores -> that value and the reason."""
    return {name: (value, why) for (why, value), names in _ALWAYS.items() for name in names.split()}


def checks() -> Mapping[str, Callable[[Sequence[str], Described], str | None]]:
    """Return flag with its dashes, for switches also with ``--no-`` -> its check."""
    kinds = {**describing(), **{name: type(value).__name__ for name, (value, _) in always().items()}}
    switches = [name for name, kind in kinds.items() if kind == "bool" and not name.startswith("no_")]
    by_name = {
        **{name: partial(_check, name, kind, True) for name, kind in kinds.items()},
        **{f"no_{name}": partial(_check, name, "bool", False) for name in switches},
        **{name: partial(_check_superfluous, name) for name in WITHOUT_EFFECT},
    }
    return {"--" + name.replace("_", "-"): check for name, check in by_name.items()}


def _check_superfluous(name: str, words: Sequence[str], described: Described) -> str | None:
    """Return the mistake in a flag of ``WITHOUT_EFFECT``; None if it changes nothing."""
    del described
    accepted = WITHOUT_EFFECT[name]
    if not accepted:
        return "accepted: no value" if words else None
    if len(words) == 1 and (words[0] in accepted or (accepted == (_ANY_NUMBER,) and words[0].isdigit())):
        return None
    values = "a whole number" if accepted == (_ANY_NUMBER,) else " or ".join(accepted)
    return f"accepted: {values}, which changes nothing"


def _check(name: str, kind: str, switch: bool, words: Sequence[str], described: Described) -> str | None:
    """Return the mistake in a flag with these ``words``; None if it is true of the model."""
    if kind == "bool":
        if words:
            return "accepted: no value"
        value: Value = switch
    else:
        read, accepted = _READ[kind]
        try:
            (word,) = words
            value = read(word)
        except ValueError:
            return f"accepted: {accepted}"
    if name in always():
        only, why = always()[name]
        return None if value == only else f"slime always uses {_text(only)}: {why}; leave it out"
    true_value = expected(name, value, described)
    if true_value == value:
        return None
    says = "does not set it" if true_value is None else f"says {_text(true_value)}"
    return f"the model's config.json {says}; the checkpoint decides, so leave it out"


def _text(value: Value) -> str:
    """Return ``value`` as users write it: ``true``, ``0``, ``1e-06``, ``local``."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def expected(name: str, value: Value, described: Described) -> Value | None:
    """Return the value that ``--name`` must have: ``value`` if it is right; None if ``config.json`` does not decide.

    Arguments:
        name: name of a flag that describes the model, with underscores.
        value: the given value.
        described: the JSON object of the file.
    """
    try:
        return _expected(name, value, described)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return None  # the file has a value of another type


def _expected(name: str, value: Value, described: Described) -> Value | None:
    if name == "make_vocab_size_divisible_by":
        return _divisor(value, described)
    if name == "moe_layer_freq":
        return _frequency(value, described)
    kind = describing()[name]
    in_file: Value | None = _EXPECTED[kind][name](described)
    if kind != "float" or in_file is None:
        return in_file
    number = float(in_file)
    return value if isinstance(value, float) and math.isclose(number, value, rel_tol=1e-9) else number


def _divisor(value: Value, described: Described) -> Value | None:
    """Return ``value`` if it divides the vocabulary size, else 1: Megatron would pad, and slime does not."""
    size = described.get("vocab_size")
    return None if size is None else (value if isinstance(value, int) and value and size % value == 0 else 1)


def _frequency(value: Value, described: Described) -> Value | None:
    layers = _expert_layers(described)
    if layers is None or _listed(str(value), len(layers)) == layers:
        return None if layers is None else value
    return str(layers).replace(" ", "")


def _expert_layers(described: Described) -> list[int] | None:
    """Return 1 for each layer with experts, 0 for each without; None if unknown."""
    number = described.get("num_hidden_layers")
    if _experts(described) is None or number is None:
        return None
    dense, every = described.get("first_k_dense_replace", 0), described.get("decoder_sparse_step", 1)
    only = described.get("mlp_only_layers") or ()
    return [int(place >= dense and (place + 1) % every == 0 and place not in only) for place in range(number)]


def _listed(text: str, number: int) -> list[int]:
    """Convert ``([0]*1+[1]*45)``, ``[0,1,1]`` or ``2`` (every second layer) to one entry per layer."""
    if text.isdigit():
        return [int(place % max(int(text), 1) == 0) for place in range(number)]
    layers: list[int] = []
    for part in re.sub(r"[\s()]", "", text).split("+"):
        entries = re.fullmatch(r"\[([\d,]+)\](?:\*(\d{1,4}))?", part)
        layers += [int(entry) for entry in entries[1].split(",")] * int(entries[2] or 1) if entries else []
    return layers


def _first(*names: str) -> Callable[[Described], Any]:
    """Return a function that returns the value of the first of these keys that the file has."""
    return lambda described: next((described[name] for name in names if described.get(name) is not None), None)


_experts = _first("num_experts", "n_routed_experts", "num_local_experts")
_heads = _first("num_attention_heads")


def _rope(described: Described) -> Mapping[str, Any] | None:
    """Return parameters of rotary positions; transformers 5 has a table for them, 4 does not. None: there are none."""
    held = {**described, **(described.get("rope_parameters") or {})}
    return held if "rope_theta" in held else None


def _base(described: Described) -> Any:
    rope = _rope(described)
    return None if rope is None else rope["rope_theta"]


def _share(described: Described) -> Any:
    rope = _rope(described)
    return None if rope is None else rope.get("partial_rotary_factor") or 1.0


def _scaled(described: Described) -> Mapping[str, Any]:
    """Return how rotary positions are stretched; transformers 5 has this in the table of their parameters."""
    return described.get("rope_scaling") or described.get("rope_parameters") or {}


def _scaling(name: str) -> Callable[[Described], Any]:
    return lambda described: _scaled(described).get(name)


def _is_type(*types: str) -> Callable[[Described], bool]:
    return lambda described: described.get("model_type") in types


def _scaling_type(described: Described) -> str | None:
    kind: str | None = _scaled(described).get("rope_type") or _scaled(described).get("type")
    return kind


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
"""Model types that have biases on queries, keys and values that their files do not mention."""


def _has_qk_norm(described: Described) -> bool:
    normed = described.get("kv_lora_rank") is not None or str(described.get("model_type")).startswith("qwen3")
    return bool(described.get("use_qk_norm", normed))


def _score_function(described: Described) -> str | None:
    """Return the router's score function; the files of Qwen and GLM do not contain it."""
    named: str | None = described.get("scoring_func")
    if named is None and described.get("model_type") in _GLM_MIXTURES:
        return "sigmoid"
    return "softmax" if named is None and described.get("model_type") in _QWEN_MIXTURES else named


def _softmax_comes_first(described: Described) -> bool | None:
    """Return whether scores are normalised over all experts before selection, rather than over the selected ones.

    A sigmoid scores each expert independently, so it always comes first. None: unknown.
    """
    if _score_function(described) == "sigmoid":
        return True
    normed = described.get("norm_topk_prob")
    return None if normed is None or described.get("model_type") not in _QWEN_MIXTURES else not normed


_QWEN_MIXTURES = ("qwen2_moe", "qwen3_moe")
_GLM_MIXTURES = ("glm4_moe", "glm4_moe_lite")
"""Model types of the mixtures of experts of Qwen and GLM."""


def _corrects_routing(described: Described) -> bool | None:
    if _experts(described) is None:
        return None
    return described.get("topk_method") == "noaux_tc" or described.get("model_type") in _GLM_MIXTURES


_EXPECTED: Mapping[str, Mapping[str, Callable[[Described], Any]]] = {
    "int": {
        "num_layers": _first("num_hidden_layers"),
        "hidden_size": _first("hidden_size"),
        "ffn_hidden_size": _first("intermediate_size"),
        "num_attention_heads": _heads,
        "num_query_groups": _first("num_key_value_heads", "num_attention_heads"),
        "kv_channels": _head_size,
        "vocab_size": _first("vocab_size"),
        "max_position_embeddings": _first("max_position_embeddings"),
        "num_experts": _experts,
        "moe_router_topk": _first("num_experts_per_tok"),
        "moe_ffn_hidden_size": _first("moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": _shared_size,
        "moe_router_num_groups": _first("n_group"),
        "moe_router_group_topk": _first("topk_group"),
        "q_lora_rank": _first("q_lora_rank"),
        "kv_lora_rank": _first("kv_lora_rank"),
        "qk_head_dim": _first("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": _first("qk_rope_head_dim"),
        "v_head_dim": _first("v_head_dim"),
    },
    "float": {
        "norm_epsilon": _first("rms_norm_eps"),
        "layernorm_epsilon": _first("rms_norm_eps"),
        "rotary_base": _base,
        "rotary_percent": _share,
        "rotary_scaling_factor": _scaling("factor"),
        "mscale": _scaling("mscale"),
        "mscale_all_dim": _scaling("mscale_all_dim"),
        "moe_router_topk_scaling_factor": _first("routed_scaling_factor"),
    },
    "str": {
        "normalization": lambda described: "RMSNorm" if "rms_norm_eps" in described else None,
        "position_embedding_type": lambda described: None if _rope(described) is None else "rope",
        "moe_router_score_function": _score_function,
    },
    "bool": {
        "swiglu": lambda described: described.get("hidden_act") == "silu",
        "group_query_attention": _is_grouped,
        "untie_embeddings_and_output_weights": _is_untied,
        "disable_bias_linear": lambda described: not described.get("mlp_bias", False),
        "add_bias_linear": lambda described: bool(described.get("mlp_bias", False)),
        "add_qkv_bias": _has_qkv_bias,
        "qk_layernorm": _has_qk_norm,
        "use_rotary_position_embeddings": lambda described: _rope(described) is not None,
        "no_position_embedding": lambda described: _rope(described) is not None,  # the flag means learned embeddings
        "multi_latent_attention": lambda described: described.get("kv_lora_rank") is not None,
        "moe_router_enable_expert_bias": _corrects_routing,
        "moe_router_pre_softmax": _softmax_comes_first,
        "post_self_attn_layernorm": _is_type("glm4"),
        "post_mlp_layernorm": _is_type("glm4"),
        "rotary_interleaved": _is_type("glm4"),
        "use_rope_scaling": lambda described: _scaling_type(described) == "llama3",
    },
}
"""Type -> flag that describes the model -> function that returns the file's value, by Hugging Face's keys."""
