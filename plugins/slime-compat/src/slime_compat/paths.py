"""``PathOptions``: the options of adapters and hooks, with the settings of the run and the code that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_compat.arguments import slime_arguments
from slime_compat.calling import PathFunction, loaded
from slime_compat.forms import forms_of
from slime_core import RunPlan
from slime_core.errors import ConfigError, PluginError
from slime_core.generation import Encoder
from slime_core.provisional import FunctionSource

__all__ = ["PathOptions", "read_extra"]


@dataclass(frozen=True, eq=False)
class PathOptions:
    """Options of adapters and hooks.

    Arguments:
        plan: the run, with all its settings.
        sources: path setting -> its functions, in order.
        extra: entries of ``custom_config_path``.
        derived: entries of ``args`` that the sampler adds, for the processes that it starts.
        encoder: of training prompts, in the sampler; None elsewhere.
    """

    plan: RunPlan
    sources: Mapping[str, tuple[FunctionSource, ...]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    encoder: Encoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Without functions and args: each process imports its functions, and has args that they may change.
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "encoder"}

    @cached_property
    def arguments(self) -> SimpleNamespace:
        """The ``args`` that all functions of this process share, including their changes to it."""
        return slime_arguments(self.plan, self.extra, **self.derived)

    @property
    def group_rm(self) -> bool:
        """True: a reward function is called once with all samples of a group."""
        return self.plan.settings.get("compat.group_rm") is True

    @property
    def disable_rewards_normalization(self) -> bool:
        """True: rewards are used as advantages."""
        return self.plan.settings.get("compat.disable_rewards_normalization") is True

    @cached_property
    def _loaded(self) -> dict[str, list[PathFunction]]:
        return {}

    def functions(self, setting: str) -> list[PathFunction]:
        """Return the functions of ``setting`` in order, imported in this process; empty if the run names none.

        Raises:
            PluginError: a function cannot be imported, or its signature is not accepted.
        """
        if setting not in self._loaded:
            forms = forms_of(group_rm=self.group_rm)[setting]
            self._loaded[setting] = [loaded(source, forms) for source in self.sources.get(setting, ())]
        return self._loaded[setting]

    def find(self, setting: str) -> PathFunction | None:
        """Return the function of ``setting``, imported in this process; None if the run names none."""
        return next(iter(self.functions(setting)), None)

    def function(self, setting: str) -> PathFunction:
        """Return the function of ``setting``, imported in this process; raises PluginError if the run names none."""
        function = self.find(setting)
        if function is None:
            raise PluginError(f"--{setting.replace('_', '-')} was not given, and its component is used by name")
        return function


def read_extra(path: Path | None, plan: RunPlan) -> dict[str, Any]:
    """Read the entries of a YAML file, for ``args``; empty if ``path`` is None.

    Raises:
        ConfigError: the file is missing or not a table, or an entry has the name of a setting.
    """
    if path is None:
        return {}
    import yaml

    flag = f"--custom-config-path {path}"
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{flag}: cannot be read: {error}. Give a YAML file of names and values.") from error
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise ConfigError(f"{flag}: found {type(entries).__name__}; accepted: a table of names and values.")
    settings = sorted(entries.keys() & {name.removeprefix("compat.") for name in plan.settings})
    if settings:
        raise ConfigError(
            f"{flag}: {', '.join(settings)} are settings of the run; give them as flags or in --config FILE."
        )
    return entries
