"""``custom_model_provider_path`` and ``--spec``: replace the Megatron model of a family, but keep its weight mapping.

The family's model spec maps the weights by the names of their parameters, and refuses a model that lacks a weight of
the checkpoint.
"""

from __future__ import annotations

import inspect
from typing import Any

from slime_compat.check import load_checked
from slime_compat.options import PathOptions
from slime_compat.training import TRAINING_FORMS
from slime_core import ModelSpec, boundary
from slime_core.errors import PluginError
from slime_core.modeling import MBridgeSpec

__all__ = ["CustomLayers", "CustomProvider", "change"]


def change(options: PathOptions, spec: ModelSpec) -> None:
    """Make ``spec`` build the model or layers that the run names by path, if any.

    Raises:
        PluginError: a function cannot be imported, or the family's spec cannot be changed.
    """
    if "custom_model_provider_path" in options.sources:
        CustomProvider(options)(spec)
    if "spec" in options.sources:
        CustomLayers(options)(spec)


class CustomProvider:
    """Makes a model spec build its chunks with a function ``(pre_process, post_process) -> GPTModel``.

    The function also gets those of these arguments that it names: ``vp_stage``, its chunk of an interleaved pipeline;
    ``config``, the TransformerConfig that the model would have otherwise; and ``args``.
    """

    def __init__(self, options: PathOptions) -> None:
        self._loaded = load_checked(options, "custom_model_provider_path", TRAINING_FORMS)
        self._args = options.arguments

    def __call__(self, spec: ModelSpec) -> None:
        """Change ``spec``; raises PluginError if the family's spec cannot be changed."""
        _changeable(self._loaded.source, spec).provider = self._build

    def _build(self, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        loaded = self._loaded
        wanted = loaded.named(vp_stage=vp_stage, config=config, args=self._args)
        with boundary(loaded.source, "building a part of the model", locate=True):
            chunk = loaded.function(pre_process=pre_process, post_process=post_process, **wanted)
        if not hasattr(chunk, "config"):
            found = type(chunk).__name__
            raise PluginError(f"{loaded.source}: it returned a {found}; accepted: a GPTModel of Megatron.")
        return chunk


class CustomLayers:
    """Makes a model spec build the layers of a function ``(args, config, vp_stage) -> layer spec``."""

    def __init__(self, options: PathOptions) -> None:
        loaded = load_checked(options, "spec", TRAINING_FORMS)
        self._source = loaded.source
        self._function = loaded.function
        self._args = options.arguments

    def __call__(self, spec: ModelSpec) -> None:
        """Change ``spec``; raises PluginError if the family's spec cannot be changed."""
        _changeable(self._source, spec).layers = self._layers

    def _layers(self, config: Any, *, vp_stage: int | None = None) -> Any:
        with boundary(self._source, "making the layer spec", locate=True):
            found = self._function(self._args, config, vp_stage)
        if inspect.isroutine(found):
            raise PluginError(
                f"{self._source}: it returned a function; accepted: a layer spec of Megatron. A function that builds "
                "the model is named with --custom-model-provider-path."
            )
        return found


def _changeable(source: object, spec: ModelSpec) -> MBridgeSpec:
    if not isinstance(spec, MBridgeSpec):
        raise PluginError(
            f"{source}: the model spec of this checkpoint, {type(spec).__name__}, builds its model by itself; accepted "
            "are families whose spec is an MBridgeSpec, as all of slime-models are."
        )
    return spec
