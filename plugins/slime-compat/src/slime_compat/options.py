"""What every adapter is made with: the run's settings and the code that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from slime_compat.arguments import slime_arguments
from slime_core import FunctionSource, RunPlan, load_function
from slime_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from slime_compat.rollout import PathFunctions
    from slime_compat.weights import PostWrite

__all__ = ["PathOptions", "read_extra"]


@dataclass(frozen=True)
class PathOptions:
    """The options of plugin ``compat``; no flag of its own, since ``[custom]`` is the core's section.

    Arguments:
        plan: the run, with all its settings.
        sources: path setting -> the functions it names, in order.
        extra: what ``custom_config_path`` holds.
        derived: entries of ``args`` that became known in the sampler, for the processes that it starts.
    """

    plan: RunPlan
    sources: Mapping[str, tuple[FunctionSource, ...]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)

    def __getstate__(self) -> dict[Any, Any]:
        # Each process makes its own args: what functions and adapters write there need not travel.
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def arguments(self) -> SimpleNamespace:
        """The ``args`` that all functions of this process share; what one of them writes there, the others read."""
        return slime_arguments(self.plan, self.extra, **self.derived)

    @property
    def group_rm(self) -> bool:
        """Whether a reward function is called with all samples of a group at once."""
        return self.plan.settings.get("group_rm") is True

    @cached_property
    def rollout_functions(self) -> PathFunctions:
        """The functions of this process that see whole rollouts.

        Raises:
            PluginError: one cannot be imported or called.
        """
        from slime_compat.rollout import PathFunctions

        return PathFunctions(self)

    @cached_property
    def post_write(self) -> PostWrite | None:
        """The function that is called once weights are written; None: the run names none.

        Raises:
            PluginError: it cannot be imported or called.
        """
        from slime_compat.weights import SETTING, PostWrite

        return PostWrite(self) if SETTING in self.sources else None

    def load(self, setting: str, *, fits: Callable[[Any], bool] = callable) -> Any:
        """The function that ``setting`` names; imported now, in this process.

        Raises:
            PluginError: see :func:`slime_core.load_function`.
        """
        return load_function(self.sources[setting][0], fits=fits)

    def source(self, setting: str) -> FunctionSource:
        """Where the function of ``setting`` comes from, for messages."""
        if setting not in self.sources:
            raise PluginError(f"--{setting.replace('_', '-')} was not given, and its component is used by name")
        return self.sources[setting][0]


def read_extra(path: Path | None, plan: RunPlan) -> dict[str, Any]:
    """The entries of a YAML file, for ``args``; None: none.

    Raises:
        ConfigError: the file is missing or is no table, or an entry has the name of a setting.
    """
    if path is None:
        return {}
    flag = f"--custom-config-path {path}"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{flag}: cannot be read: {error}. Give a YAML file of names and values.") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{flag}: found {type(found).__name__}; accepted is a table of names and values.")
    taken = sorted(found.keys() & plan.settings.keys())
    if taken:
        raise ConfigError(
            f"{flag}: {', '.join(taken)} are settings of the run; give them as flags or in --config FILE."
        )
    return found
