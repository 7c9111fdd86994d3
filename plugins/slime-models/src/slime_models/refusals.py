"""What of a ``config.json`` each family does not build, in words; imports nothing heavy, so that a run asks first.

Every function takes the object of the file and yields one text a field, as ``ModelSpecTraits.unsupported`` wants it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.modeling import unsupported

__all__ = ["llama", "qwen2", "qwen3", "qwen3_moe"]

PLAIN_MIXTURE: Mapping[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "shared_expert_intermediate_size": 0,
    "use_sliding_window": False,
}
"""The only values of a mixture that are built; a field that is missing has it."""


def qwen2(config: Mapping[str, Any]) -> Iterator[str]:
    """Scaled positions, sliding windows, other activations."""
    yield from unsupported(config)


def qwen3(config: Mapping[str, Any]) -> Iterator[str]:
    """Also biases in the attention, which no released Qwen3 has and mbridge does not map."""
    yield from unsupported(config)
    yield from _biases(config, attention_bias="attention")


def llama(config: Mapping[str, Any]) -> Iterator[str]:
    """Also biases in the attention or the MLP: mbridge maps some of them and loses the others."""
    yield from unsupported(config)
    yield from _biases(config, attention_bias="attention", mlp_bias="MLP")


def qwen3_moe(config: Mapping[str, Any]) -> Iterator[str]:
    """Also all that makes the model more than a plain stack of mixtures."""
    yield from unsupported(config)
    for name, built in PLAIN_MIXTURE.items():
        found = config.get(name) or built
        if found != built:
            yield f"asks for {name} = {found}; only {built} is built"


def _biases(config: Mapping[str, Any], **places: str) -> Iterator[str]:
    for name, place in places.items():
        if config.get(name):
            yield f"asks for biases in its {place} ({name}); only models without are mapped"
