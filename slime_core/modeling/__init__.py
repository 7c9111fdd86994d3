"""PUBLIC. Base classes for model specs: build a Megatron model from a Hugging Face config, map its weights both ways.

    spec         MBridgeSpec, the base class of families that mbridge maps; local_layers, its layers; adapters of
                 configs, weights and layers to mbridge's expectations
    layout       ParallelLayout: the parallel sizes of a model
    layers       the norm; routers that record and replay the chosen experts; the experts of a mixture; core attention
                 and rotary positions over a packed row, without a loop over sequences
    rows         the sequences of a row or of a context-parallel rank's share of it, and attention over them with the
                 kernel that the device has
    mlp          the activation of gated MLPs; matrix products over all experts of a mixture
    patches      lets Megatron-core run without TransformerEngine; the device type of a process
    kernels      which of several implementations a process uses: FlashAttention 2 or 4
    export       gathers the weights of a model over its ranks
    memory       GPU memory of training, in bytes, for every layout

:func:`unsupported` lists the parts of a ``config.json`` that these layers do not support. The trait ``unsupported`` of
a model spec that subclasses ``MBridgeSpec`` should start with it, so that a run is refused before it starts anything;
the ranks repeat the check on the config that they build.

These modules depend on model chunks, a config and packed rows, never on a family's name. ``MBridgeSpec``,
``local_layers`` and ``spec_of_checkpoint`` load torch at their first use; the other names below load nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.components.devices import find_device
from slime_core.modeling.layout import ParallelLayout
from slime_core.types import JsonValue

if TYPE_CHECKING:
    from slime_core.modeling.spec import MBridgeSpec as MBridgeSpec
    from slime_core.modeling.spec import local_layers as local_layers
    from slime_core.modeling.spec import spec_of_checkpoint as spec_of_checkpoint

__all__ = ["MBridgeSpec", "ParallelLayout", "local_layers", "prepare_megatron", "spec_of_checkpoint", "unsupported"]


def __getattr__(name: str) -> object:
    if name not in ("MBridgeSpec", "local_layers", "spec_of_checkpoint"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slime_core.modeling import spec

    return getattr(spec, name)


def prepare_megatron() -> None:
    """Let Megatron-core and mbridge run without TransformerEngine, and without a GPU if torch sees none.

    Raises:
        RunError: Megatron-core is already imported; call this first.
        PluginError: torch sees no GPU, and the plugin ``cpu`` is not installed.
    """
    from slime_core.modeling.patches import accelerator, install

    if accelerator() == "cpu":
        find_device("cpu").prepare_megatron()
    else:
        install()


def unsupported(config: Mapping[str, JsonValue], *, rope_types: Sequence[str] = ("default",)) -> Iterator[str]:
    """Yield a text for each field that :class:`~slime_core.modeling.MBridgeSpec` does not support.

    Texts have the form ``needs ...; only ... is built``.

    Arguments:
        config: the object of a Hugging Face ``config.json``, in the format of transformers 4 or 5; missing fields have
            the defaults of Qwen's and Llama's classes.
        rope_types: types of rotary positions that the family supports.
    """
    kind = _rope_type(config)
    if kind not in rope_types:
        built = " and ".join(map(repr, rope_types))
        are = "is" if len(rope_types) == 1 else "are"
        yield f"needs rotary positions of type {kind!r}; only {built} {are} built"
    if config.get("quantization_config"):
        yield "holds quantised weights (quantization_config); only unquantised weights are loaded"
    if _has_windows(config):
        yield "needs sliding-window attention; only full attention is built"
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        yield f"needs activation {activation!r}; only 'silu' is built"


def _rope_type(config: Mapping[str, Any]) -> Any:
    """Return the type of rotary positions: in ``rope_parameters`` since transformers 5, in ``rope_scaling`` before."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    rope = parameters if isinstance(parameters, Mapping) else {}
    return rope.get("rope_type") or rope.get("type") or "default"


def _has_windows(config: Mapping[str, Any]) -> bool:
    """Return whether a layer has a window: in Qwen's classes, layers from ``max_window_layers`` (28) on by default.

    Source: transformers, models/qwen2/configuration_qwen2.py.
    """
    types = config.get("layer_types")
    if types is not None:
        return "sliding_attention" in types
    windowed = bool(config.get("use_sliding_window")) and config.get("sliding_window", 4096) is not None
    return windowed and config.get("max_window_layers", 28) < config.get("num_hidden_layers", 0)
