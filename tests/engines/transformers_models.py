"""Tiny checkpoints of architectures that slime-transformers trains, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SIZES: Mapping[str, Any] = {
    **{"vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.1},
    **{"moe_intermediate_size": 32, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "n_group": 1},
    **{"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "sliding_window": 6},
    **{"eos_token_id": 1, "bos_token_id": None, "pad_token_id": None},
}
LINEAR: Mapping[str, Any] = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "shared_expert_intermediate_size": 32,
}
MAMBA: Mapping[str, Any] = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "MistralForCausalLM": {},
    "Olmo3ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "SeedOssForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "SmolLM3ForCausalLM": {},
    "LlamaForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "MixtralForCausalLM": {},
    "GptOssForCausalLM": {},
    "Glm4MoeForCausalLM": {},
    "MiniMaxM2ForCausalLM": {},
    "Qwen3NextForCausalLM": LINEAR,
    "Qwen3_5ForCausalLM": LINEAR,
    "Qwen3_5MoeForCausalLM": LINEAR,
    "NemotronHForCausalLM": MAMBA,
    "BloomForCausalLM": {},
}
"""Architecture -> the fields of its config in addition to those of ``SIZES`` that it has."""

UNPACKED = {name for name, fields in ARCHITECTURES.items() if fields in (LINEAR, MAMBA)} | {"BloomForCausalLM"}
"""Their samples are computed one after the other."""


def write(architecture: str, folder: Path, **changes: Any) -> Any:
    """Write a checkpoint without a tokenizer; return transformers' model of it, in float32 and evaluation mode."""
    import transformers

    kind = getattr(transformers, architecture)
    extra = {**ARCHITECTURES.get(architecture, {}), **changes}
    known = kind.config_class().to_dict()
    torch.manual_seed(0)
    config = kind.config_class(**{name: value for name, value in SIZES.items() if name in known} | extra)
    model = kind(config)
    with torch.no_grad():
        stored = model.state_dict()
        biases = [buffer for name, buffer in model.named_buffers() if name in stored]
        for tensor in [*(parameter for parameter in model.parameters() if parameter.dim() == 1), *biases]:
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    loaded = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    return kind.from_pretrained(folder, **loaded)
