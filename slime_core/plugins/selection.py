"""Whether the components that a run names exist, and ask for nothing that the core cannot give."""

from __future__ import annotations

from typing import Any

from slime_core.config.schema import RunConfig
from slime_core.errors import PluginError
from slime_core.plugins.component import Kind
from slime_core.plugins.registration import Registry

__all__ = ["check_selection"]

FILLED = frozenset({"rewards", "groups", "lengths", "mask_sums"})
"""Columns that an advantage estimator of scope ``sample`` is handed."""


def check_selection(config: RunConfig, registry: Registry, *, trains: bool) -> None:
    """Returns if every component that ``config`` names can be used.

    Arguments:
        trains: False: an evaluation, which needs neither prompts nor an advantage estimator.

    Raises:
        PluginError: no active plugin offers a component, or it reads a column that nothing fills.
    """
    registry.find(Kind.GENERATE_FUNCTION, config.rollout.generate_function)
    registry.find(Kind.REWARD_MODEL, config.rollout.rm_type)
    if not trains:
        return
    registry.find(Kind.DATA_SOURCE, config.data.data_source)
    name = str(config.algorithm.advantage_estimator)
    traits: Any = registry.find(Kind.ADVANTAGE_ESTIMATOR, name).traits
    registry.find(Kind.POLICY_LOSS, traits.policy_loss)
    unknown = sorted(traits.reads - FILLED)
    if unknown:
        owner = registry.owner(Kind.ADVANTAGE_ESTIMATOR, name)
        raise PluginError(
            f"advantage estimator {name!r} of {owner} reads {', '.join(unknown)}, which nothing fills; filled are "
            f"{', '.join(sorted(FILLED))}. Choose another estimator, or a version of slime-rl that fills it."
        )
