"""``custom_model_provider_path`` and ``--spec``: replace the Megatron model of a family, but keep its weight mapping.

The family's model spec maps the weights by the names of their parameters, and refuses a model that lacks a weight of
the checkpoint.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from slime_compat.calling import PathFunction
from slime_compat.paths import PathOptions
from slime_core import ModelSpec
from slime_core.errors import PluginError
from slime_core.modeling import MBridgeSpec

__all__ = ["change"]


def change(options: PathOptions, spec: ModelSpec) -> None:
    """Make ``spec`` build the model or layers that the run names by path, if any.

    Raises:
        PluginError: a function cannot be imported, or the family's spec cannot be changed.
    """
    for function in options.functions("custom_model_provider_path"):
        _changeable(function, spec).provider = partial(_chunk, function, options.arguments)
    for function in options.functions("spec"):
        _changeable(function, spec).layers = partial(_layers, function, options.arguments)


def _chunk(
    function: PathFunction, args: Any, config: Any, *, pre_process: bool, post_process: bool, vp_stage: int | None
) -> Any:
    """Build a part of the model with ``fn(pre_process, post_process) -> GPTModel``.

    The function also gets those of these arguments that it names: ``vp_stage``, its chunk of an interleaved pipeline;
    ``config``, the TransformerConfig that the model would have otherwise; and ``args``.
    """
    optional = function.named(vp_stage=vp_stage, config=config, args=args)
    chunk = function(pre_process=pre_process, post_process=post_process, **optional)
    if not hasattr(chunk, "config"):
        raise function.refused(chunk, "a GPTModel of Megatron")
    return chunk


def _layers(function: PathFunction, args: Any, config: Any, *, vp_stage: int | None = None) -> Any:
    """Build a layer spec with ``fn(args, config, vp_stage)``."""
    spec = function(args, config, vp_stage)
    if inspect.isroutine(spec):
        raise function.refused(
            spec, "a layer spec of Megatron; name a function that builds the model with --custom-model-provider-path"
        )
    return spec


def _changeable(function: PathFunction, spec: ModelSpec) -> MBridgeSpec:
    if not isinstance(spec, MBridgeSpec):
        raise PluginError(
            f"{function}: the model spec of this checkpoint, {type(spec).__name__}, cannot take another model; "
            "accepted are families whose spec is an MBridgeSpec, as all of slime-models are."
        )
    return spec
