"""Lists the parts of a ``config.json`` that each family does not support; cheap to import, so runs check this first.

Each function takes the object of the file and yields one text for each field; see ``unsupported`` of
:meth:`slime_core.Registration.model_spec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.modeling import unsupported

__all__ = ["deepseek_v3", "glm4", "glm4_moe", "glm4_moe_lite", "llama", "qwen2", "qwen3", "qwen3_moe"]

PLAIN_MIXTURE: Mapping[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 0,
    "use_sliding_window": False,
}
"""The only supported values of a mixture of experts; a missing field has this value."""


def qwen2(config: Mapping[str, Any]) -> Iterator[str]:
    """Refuse scaled positions, sliding windows and other activations."""
    yield from unsupported(config)


def qwen3(config: Mapping[str, Any]) -> Iterator[str]:
    """Also refuse attention biases, which no released Qwen3 has and mbridge does not map."""
    yield from unsupported(config)
    yield from _biases(config, attention_bias="attention")


LLAMA_3: Mapping[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The only constants of scaled positions that Megatron supports; the factor may have any value."""


def llama(config: Mapping[str, Any]) -> Iterator[str]:
    """Also refuse biases in the attention or the MLP: mbridge maps some of them and loses the others."""
    yield from unsupported(config, rope_types=("default", "llama3"))
    yield from _biases(config, attention_bias="attention", mlp_bias="MLP")
    rope = _rope(config)
    if rope.get("rope_type") == "llama3":
        yield from _others(rope, LLAMA_3)
        if missing := [name for name in ("factor", *LLAMA_3) if rope.get(name) is None]:
            yield f"has rotary positions of type 'llama3' without {' and '.join(missing)}"


def glm4(config: Mapping[str, Any]) -> Iterator[str]:
    """Refuse scaled positions and other activations."""
    yield from unsupported(config)


SIGMOID_ROUTER: Mapping[str, Any] = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""The only supported values of a router; a missing field has this value."""


def glm4_moe(config: Mapping[str, Any]) -> Iterator[str]:
    """Also refuse other kinds of routers."""
    yield from unsupported(config)
    yield from _others(config, SIGMOID_ROUTER)
    yield from _groups(config)


def glm4_moe_lite(config: Mapping[str, Any]) -> Iterator[str]:
    """Also refuse attention biases, which no weight mapping has."""
    yield from deepseek_v3(config)


def deepseek_v3(config: Mapping[str, Any]) -> Iterator[str]:
    """Also refuse other kinds of routers, and rotary entries that are not interleaved."""
    yield from unsupported(config, rope_types=("default", "yarn"))
    yield from _biases(config, attention_bias="attention")
    yield from _others(config, {**SIGMOID_ROUTER, "rope_interleave": True, "moe_layer_freq": 1})
    yield from _groups(config)
    if _rope(config).get("truncate") is False:
        yield "has YaRN with bounds that are not rounded (truncate = false); only rounded ones are built"


def _groups(config: Mapping[str, Any]) -> Iterator[str]:
    """Refuse other sizes: transformers sums a group's two best scores, Megatron its ``topk / chosen groups`` best."""
    groups, chosen, experts = (config.get(name) for name in ("n_group", "topk_group", "num_experts_per_tok"))
    if groups and groups > 1 and (not chosen or not experts or experts // chosen != 2):
        yield (
            f"asks for {experts} experts from {chosen} of {groups} groups (num_experts_per_tok, topk_group, n_group); "
            "only two experts a chosen group are built"
        )


def qwen3_moe(config: Mapping[str, Any]) -> Iterator[str]:
    """Also refuse anything but a plain stack of mixture layers."""
    yield from unsupported(config)
    yield from _others({name: value for name, value in config.items() if value}, PLAIN_MIXTURE)


def _others(config: Mapping[str, Any], built: Mapping[str, Any]) -> Iterator[str]:
    for name, value in built.items():
        if (setting := config.get(name)) is not None and setting != value:
            yield f"asks for {name} = {setting}; only {value} is built"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {}


def _biases(config: Mapping[str, Any], **places: str) -> Iterator[str]:
    for name, place in places.items():
        if config.get(name):
            yield f"has biases in its {place} ({name}); only models without are mapped"
