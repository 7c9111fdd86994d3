"""Trains a gain of the last norm and freezes the model; engines receive the product of gain and norm.

Pipeline parallelism is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slime_core import hookimpl
from slime_core.provisional import NamedTensors, WrappedModel

if TYPE_CHECKING:
    import torch


@hookimpl
def slime_wrap_model(chunks: Sequence[torch.nn.Module], export_weights: Callable[[], NamedTensors]) -> WrappedModel:
    from acme_gain.gain import Gain, write

    (chunk,) = chunks
    parts: Any = chunk
    chunk.requires_grad_(False)
    gain = Gain(parts.decoder.final_layernorm.weight, summed=parts.config.sequence_parallel)
    chunk.add_module("acme_gain", gain)
    parts.decoder.final_layernorm.register_forward_hook(lambda norm, inputs, hidden: gain(hidden))

    def published() -> NamedTensors:
        for name, weight in export_weights():
            yield name, gain(weight) if name == "model.norm.weight" else weight

    return WrappedModel(
        published=published,
        saved=lambda: iter([("gain", gain.gain_H.detach())]),
        write=write,
        original=gain.off,
        stores=lambda name: name.startswith("acme_gain."),
    )
