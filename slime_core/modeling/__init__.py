"""PUBLIC. What model specs are written with: a Megatron model from a Hugging Face config, and its weights both ways.

    spec         MBridgeSpec, the base class of families that mbridge maps; local_layers, its layers; what mbridge is
                 shown of a config, of weights and of layers
    layout       ParallelLayout: how a model is cut over ranks
    layers       the norm; routers that record the experts they chose, or take those of the engine; core attention and
                 rotary positions over a packed row, without a loop over sequences
    attention    attention over a row, by the kernel that the device has
    rows         the sequences of a row, for attention; the tokens of each context-parallel rank
    memory       bytes of a GPU that training takes, for every layout
    experts      the experts of a mixture, as products over all of them
    swiglu       the activation of gated MLPs

:func:`unsupported` says what of a ``config.json`` these layers do not build. The trait ``unsupported`` of a model spec
that subclasses ``MBridgeSpec`` starts there, so that a run is refused before anything has started; the ranks say the
same of the config that they build.

The rule between them: they see model chunks, a config and packed rows, never a family's name. ``MBridgeSpec`` and
``local_layers`` load torch at their first use; the other names below load nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.modeling.layout import ParallelLayout
from slime_core.types import JsonValue

if TYPE_CHECKING:
    from slime_core.modeling.spec import MBridgeSpec as MBridgeSpec
    from slime_core.modeling.spec import local_layers as local_layers

__all__ = ["MBridgeSpec", "ParallelLayout", "local_layers", "unsupported"]


def __getattr__(name: str) -> object:
    if name not in ("MBridgeSpec", "local_layers"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime_core.modeling import spec

    return getattr(spec, name)


def unsupported(config: Mapping[str, JsonValue], *, rope_types: Sequence[str] = ("default",)) -> Iterator[str]:
    """Each field that :class:`~slime_core.modeling.MBridgeSpec` builds none of: ``asks for ...; only ... is built``.

    Arguments:
        config: the object of a Hugging Face ``config.json``, in the form of transformers 4 or 5; what it leaves out has
            the value that Qwen's and Llama's classes give it.
        rope_types: rotary positions that the family builds.
    """
    kind = _rope_type(config)
    if kind not in rope_types:
        built = " and ".join(map(repr, rope_types))
        are = "is" if len(rope_types) == 1 else "are"
        yield f"asks for rotary positions of type {kind!r}; only {built} {are} built"
    if config.get("quantization_config"):
        yield "holds quantised weights (quantization_config); only unquantised weights are loaded"
    if _has_windows(config):
        yield "asks for sliding-window attention; only full attention is built"
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        yield f"asks for activation {activation!r}; only 'silu' is built"


def _rope_type(config: Mapping[str, Any]) -> Any:
    """Transformers 5 writes ``rope_parameters``; 4 wrote ``rope_scaling``, and before 4.45 ``type`` in it."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    found = parameters if isinstance(parameters, Mapping) else {}
    return found.get("rope_type") or found.get("type") or "default"


def _has_windows(config: Mapping[str, Any]) -> bool:
    """Qwen's classes give windows to all layers from ``max_window_layers`` (28) on, unless the layers' types are named.

    Source: transformers, models/qwen2/configuration_qwen2.py.
    """
    types = config.get("layer_types")
    if types is not None:
        return "sliding_attention" in types
    windowed = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    return windowed and config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0)
