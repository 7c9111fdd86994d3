"""What of a ``config.json`` the layers of this room do not build, found without torch or Megatron.

The trait ``unsupported`` of a model spec that subclasses ``MBridgeSpec`` starts here, so that a run is refused before
anything has started; the ranks say the same of the config that they build.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.types import JsonValue

__all__ = ["unsupported"]


def unsupported(config: Mapping[str, JsonValue]) -> Iterator[str]:
    """Each field that :class:`~slime_core.modeling.MBridgeSpec` builds none of: ``asks for ...; only ... is built``.

    Arguments:
        config: the object of a Hugging Face ``config.json``, in the form of transformers 4 or 5; what it leaves out has
            the value that Qwen's and Llama's classes give it.
    """
    kind = _rope_type(config)
    if kind != "default":
        yield f"asks for rotary positions of type {kind!r}; only 'default' is built"
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
