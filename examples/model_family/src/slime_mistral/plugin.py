"""Plugin ``mistral``; imports nothing heavy, because every process and every command loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slime_core import Registration, hookimpl
from slime_core.modeling import unsupported
from slime_core.types import JsonValue


@hookimpl
def slime_register(add: Registration) -> None:
    """Add the family. A run of a checkpoint with this architecture uses it."""
    add.model_spec(
        "mistral",
        "slime_mistral.model:Mistral",
        architectures={"MistralForCausalLM"},
        unsupported="slime_mistral.plugin:refusals",
    )


def refusals(config: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield a text for each unsupported field of a ``config.json``; a run with one does not start."""
    yield from unsupported(config)
    if config.get("sliding_window", 4096) is not None:  # transformers' default is 4096; v0.1 relies on it
        yield "asks for sliding-window attention (sliding_window); only full attention is built"
