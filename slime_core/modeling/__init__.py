"""PUBLIC. What model specs are written with: a Megatron model from a Hugging Face config, and its weights both ways.

    spec         MBridgeSpec, the base class of families that mbridge maps; local_layers, its layers; what mbridge is
                 shown of a config, of weights and of layers
    unsupported  what of a config.json they do not build, found without torch
    layout       ParallelLayout: how a model is cut over ranks
    layers       the norm; routers that record the experts they chose, or take those of the engine; core attention and
                 rotary positions over a packed row, without a loop over sequences
    rows         the sequences of a row as padded batches, for attention; the tokens of each context-parallel rank

The rule between them: they see model chunks, a config and packed rows, never a family's name. ``MBridgeSpec`` and
``local_layers`` load torch at their first use; the other names below load nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.modeling.layout import ParallelLayout
from slime_core.modeling.unsupported import unsupported

if TYPE_CHECKING:
    from slime_core.modeling.spec import MBridgeSpec as MBridgeSpec
    from slime_core.modeling.spec import local_layers as local_layers

__all__ = ["MBridgeSpec", "ParallelLayout", "local_layers", "unsupported"]


def __getattr__(name: str) -> object:
    if name not in ("MBridgeSpec", "local_layers"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime_core.modeling import spec

    return getattr(spec, name)
