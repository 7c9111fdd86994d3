"""Activates the plugins that a run names, and no others: the driver's side; other processes use ``manifest.attach``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from slime_core.errors import PluginError
from slime_core.plugins.discovery import (
    CORE,
    PATHS,
    PluginIdentity,
    PluginSource,
    claimants,
    claimed_architectures,
    resolve,
)
from slime_core.plugins.functions import FunctionSource, find_function
from slime_core.plugins.manifest import Manifest, record
from slime_core.plugins.registration import Registry, register

__all__ = ["ActivePlugins", "Registry", "activate"]


@dataclass(frozen=True, slots=True)
class ActivePlugins:
    """What a run's plugins offer, and the record that makes other processes load the same.

    Arguments:
        registry: the components.
        manifest: hand it to every actor, and to every checkpoint.
        by_need: the plugin that the checkpoint's architecture activated, if one did; print it at start.
        functions: setting -> the functions that it names by path.
    """

    registry: Registry
    manifest: Manifest
    by_need: PluginIdentity | None = None
    functions: Mapping[str, tuple[FunctionSource, ...]] = field(default_factory=dict)

    @property
    def presets(self) -> Mapping[str, tuple[object, str]]:
        """Flag name -> (value, plugin that sets it)."""
        return self.registry.presets

    @property
    def options(self) -> Mapping[str, type[BaseModel]]:
        """Plugin -> its options class."""
        return self.registry.options


def activate(
    names: Sequence[str], *, architecture: str | None = None, paths: Mapping[str, Sequence[str]] | None = None
) -> ActivePlugins:
    """Load ``core``, the named plugins and, where needed, the one that claims the checkpoint's architecture.

    Arguments:
        names: installed plugins (``grpo``), files (``./mine.py``) or modules (``my_lab.plugin``); repeats are ignored.
        architecture: of the checkpoint's ``config.json``; None: no model is going to be built.
        paths: setting -> functions that it names by path; any of them activates plugin ``paths``.

    Raises:
        PluginError: a plugin cannot be found or loaded, two claim the same thing, or no plugin fits the architecture.
    """
    functions = {
        setting: tuple(find_function(path, setting=setting) for path in found)
        for setting, found in (paths or {}).items()
    }
    code = [function.code for found in functions.values() for function in found]
    wanted = [*names, *([PATHS.name] if functions else [])]
    sources = [PluginSource(CORE), *(resolve(name) for name in dict.fromkeys(wanted) if name != CORE.name)]
    registry = register(sources)
    if architecture is None or registry.model_spec(architecture) is not None:
        return ActivePlugins(registry, record(sources, code), functions=functions)
    needed = _claimant(architecture)
    sources.append(needed)
    registry = register(sources)
    if registry.model_spec(architecture) is None:
        raise PluginError(
            f"{needed.plugin} claims architecture {architecture}, but declares no model spec for it.\n"
            f"Report this to the author of {needed.plugin.distribution}, or name another plugin with --plugin."
        )
    return ActivePlugins(registry, record(sources, code), by_need=needed.plugin, functions=functions)


def _claimant(architecture: str) -> PluginSource:
    found = claimants(architecture)
    if not found:
        known = ", ".join(claimed_architectures()) or "none"
        raise PluginError(
            f"no active plugin has a model spec for architecture {architecture}, and no installed one claims it. "
            f"Claimed are: {known}.\nInstall a plugin that claims it (slime-models has the common ones), or name one "
            "that has a model spec for it: --plugin ./mine.py"
        )
    if len(found) > 1:
        both = " and ".join(map(str, found))
        raise PluginError(f"architecture {architecture} is claimed twice: by {both}.\nName one of them with --plugin.")
    return resolve(found[0].plugin)
