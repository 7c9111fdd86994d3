"""Lists what the model spec does not support of a checkpoint and of a run, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_core import RunPlan
from slime_core.types import JsonValue

LAYOUTS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("critic_tensor_model_parallel_size", "critic_pipeline_model_parallel_size", "critic_context_parallel_size"),
)
"""Settings that split a model over ranks."""

OF_MEGATRON = ("fp32_lm_head", "use_routing_replay", "use_rollout_routing_replay", "compile_pointwise")
"""Switches that change layers of Megatron."""


def unsupported(config: Mapping[str, JsonValue], run: RunPlan) -> Iterator[str]:
    """Yield a text for each part of a ``config.json`` or of the run that is not supported."""
    settings = run.settings
    split = [f"{name} = {settings[name]}" for name in LAYOUTS if settings.get(name) not in (None, 1)]
    if split:
        yield f"asks for {', '.join(split)}; only data parallelism is built for layers of transformers"
    if switches := [name for name in OF_MEGATRON if settings.get(name)]:
        yield f"asks for {', '.join(switches)}; layers of transformers do not have this"
    if settings.get("transformer_impl") == "transformer_engine":
        yield "asks for transformer_impl = transformer_engine; layers of transformers do not have this"
    if config.get("quantization_config"):
        yield "holds quantised weights (quantization_config); only unquantised weights are loaded"
    if "text_config" in config:
        yield "has a text_config beside those of images or sounds; only models of text alone are built"
    yield from _unknown(config, trusts=settings.get("trust_remote_code") is True)


def is_in_transformers(config: Mapping[str, JsonValue]) -> bool:
    """Return whether the installed transformers has the causal language model that a ``config.json`` names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")), ())
    return _architecture(config) in ((names,) if isinstance(names, str) else names)


def has_code(config: Mapping[str, JsonValue]) -> bool:
    """Return whether the checkpoint has Python code of a causal language model."""
    code = config.get("auto_map")
    return isinstance(code, Mapping) and "AutoModelForCausalLM" in code


def _unknown(config: Mapping[str, JsonValue], *, trusts: bool) -> Iterator[str]:
    if is_in_transformers(config):
        return
    import transformers

    architecture = _architecture(config)
    if not has_code(config):
        yield (
            f"is a {architecture}, which is no causal language model of transformers {transformers.__version__}; only "
            "those are built"
        )
    elif not trusts:
        yield (
            f"is a {architecture}, whose Python code is in the checkpoint; it only runs with --trust-remote-code, so "
            "the model cannot be built"
        )


def _architecture(config: Mapping[str, JsonValue]) -> JsonValue:
    match config.get("architectures"):
        case [str(architecture), *_]:
            return architecture
    return None
