"""The calls through which a plugin declares what it offers; each is made once, at start, and carries declarations only.

A plugin implements any of them, as plain functions without parameters::

    from slime_core import Component, hookimpl

    @hookimpl
    def slime_register_reward_models():
        yield Component("length", target="my_plugin.rewards:Length", summary="Shorter is better")

Order between plugins never decides anything: two plugins that claim one name, or set one preset, are an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

from slime_core.plugins.component import Component, Kind

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = [
    "PROJECT",
    "REGISTRATION_HOOKS",
    "hookimpl",
    "hookspec",
    "slime_options",
    "slime_presets",
    "slime_register_advantage_estimators",
    "slime_register_data_sources",
    "slime_register_generate_functions",
    "slime_register_model_specs",
    "slime_register_policy_losses",
    "slime_register_reward_models",
    "slime_register_trackers",
]

PROJECT = "slime"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def slime_register_advantage_estimators() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield advantage estimators: how rewards become advantages (contract ``AdvantageEstimator``)."""


@hookspec
def slime_register_policy_losses() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield policy losses: what is minimised, token by token (contract ``PolicyLoss``)."""


@hookspec
def slime_register_reward_models() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield reward models: how responses are scored (contract ``RewardModel``)."""


@hookspec
def slime_register_generate_functions() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield generate functions: how a response comes about (contract ``GenerateFunction``)."""


@hookspec
def slime_register_data_sources() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield data sources: where prompts come from (contract ``DataSource``)."""


@hookspec
def slime_register_model_specs() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield model specs: what a model looks like in Megatron (contract ``ModelSpec``)."""


@hookspec
def slime_register_trackers() -> Iterable[Component]:  # type: ignore[empty-body]
    """Yield trackers: where metrics go (contract ``Tracker``)."""


@hookspec
def slime_presets() -> Mapping[str, object]:  # type: ignore[empty-body]
    """Return the defaults that naming the plugin sets, by flag name: ``{"advantage_estimator": "grpo"}``."""


@hookspec
def slime_options() -> type[BaseModel]:  # type: ignore[empty-body]
    """Return the frozen pydantic model of the plugin's own settings; every field has a default and a description."""


REGISTRATION_HOOKS: dict[str, Kind] = {
    "slime_register_advantage_estimators": Kind.ADVANTAGE_ESTIMATOR,
    "slime_register_policy_losses": Kind.POLICY_LOSS,
    "slime_register_reward_models": Kind.REWARD_MODEL,
    "slime_register_generate_functions": Kind.GENERATE_FUNCTION,
    "slime_register_data_sources": Kind.DATA_SOURCE,
    "slime_register_model_specs": Kind.MODEL_SPEC,
    "slime_register_trackers": Kind.TRACKER,
}
