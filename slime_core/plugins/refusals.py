"""Asks a model spec before the start what of a checkpoint it does not build; the answer is its plugin's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Kind
from slime_core.plugins.loading import load_attribute
from slime_core.plugins.registration import Registry

__all__ = ["refusals"]


def refusals(registry: Registry, architecture: str, config: Mapping[str, Any]) -> list[str]:
    """What of a checkpoint the model spec of its architecture does not build, each text with who says so.

    Empty: nothing, or it says so only when it builds, or there is no such spec.

    Arguments:
        config: the object of the checkpoint's ``config.json``.

    Raises:
        PluginError: what the spec's traits name as ``unsupported`` cannot be imported, fails, or returns no texts.
    """
    component = registry.model_spec(architecture)
    traits: Any = None if component is None else component.traits
    if component is None or traits.unsupported is None:
        return []
    plugin = registry.owner(Kind.MODEL_SPEC, component.name)
    action = f"asking {traits.unsupported} what model spec {component.name!r} does not build"
    step = f"Report it to the author of {plugin.distribution}: it takes the object of a config.json and returns texts."
    with boundary(plugin, action, next_step=step):
        found = list(load_attribute(traits.unsupported)(config))
        if not all(isinstance(text, str) for text in found):
            raise TypeError(f"it returned {found!r}")
    return [f"{text} by model spec {component.name!r} of {plugin}" for text in found]
