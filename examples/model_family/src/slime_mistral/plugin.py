"""The hooks of plugin ``mistral``; imports nothing heavy, because every process and every command loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slime_core import Component, ModelSpecTraits, hookimpl
from slime_core.modeling import unsupported
from slime_core.types import JsonValue


@hookimpl
def slime_register_model_specs() -> Iterator[Component]:
    """Register one component for the family; ``pyproject.toml`` claims the same architecture."""
    yield Component(
        "mistral",
        target="slime_mistral.model:Mistral",
        traits=ModelSpecTraits(architectures={"MistralForCausalLM"}, unsupported=f"{__name__}:refusals"),
        summary="Mistral 7B v0.3 and Mistral Nemo (2310.06825)",
    )


def refusals(config: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield a text for each unsupported field of a ``config.json``; a run with one does not start."""
    yield from unsupported(config)
    if config.get("sliding_window", 4096) is not None:  # transformers' default is 4096; v0.1 relies on it
        yield "asks for sliding-window attention (sliding_window); only full attention is built"
