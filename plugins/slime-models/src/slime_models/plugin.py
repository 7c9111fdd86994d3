"""What this distribution contributes. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core import Component, ModelSpecTraits, hookimpl


@hookimpl
def slime_register_model_specs() -> Iterator[Component]:
    """One component a family."""
    yield Component(
        "qwen3",
        target="slime_models.qwen3:Qwen3",
        traits=ModelSpecTraits(architectures={"Qwen3ForCausalLM"}, unsupported="slime_models.refusals:qwen3"),
        summary="Qwen3 dense models (Qwen3 Technical Report, 2505.09388)",
    )
    yield Component(
        "qwen2",
        target="slime_models.qwen2:Qwen2",
        traits=ModelSpecTraits(architectures={"Qwen2ForCausalLM"}, unsupported="slime_models.refusals:qwen2"),
        summary="Qwen2 and Qwen2.5 dense models (Qwen2.5 Technical Report, 2412.15115)",
    )
    yield Component(
        "qwen3_moe",
        target="slime_models.qwen3_moe:Qwen3Moe",
        traits=ModelSpecTraits(architectures={"Qwen3MoeForCausalLM"}, unsupported="slime_models.refusals:qwen3_moe"),
        summary="Qwen3 mixtures of experts (Qwen3 Technical Report, 2505.09388)",
    )
    yield Component(
        "llama",
        target="slime_models.llama:Llama",
        traits=ModelSpecTraits(architectures={"LlamaForCausalLM"}, unsupported="slime_models.refusals:llama"),
        summary="Llama dense models without scaled positions (Llama 2, 2307.09288), SmolLM2 among them",
    )
