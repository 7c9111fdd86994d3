"""Decides which plugins take part in a run: ``core``, named ones, and those whose components or options it uses.

All installed plugins are loaded, so that their components, options and commands exist. Only plugins that take part have
their hooks called and are in the manifest. Rows of data choose only among their components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from slime_core.config.options import KIND_NAMED_BY
from slime_core.errors import PluginError
from slime_core.plugins.discovery import CORE, short_name
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.manifest import Manifest, record
from slime_core.plugins.registration import ANY_ARCHITECTURE, Kind
from slime_core.plugins.registry import Registry, load_plugins

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.config.load import Peek, Uses
    from slime_core.config.options import DerivedSetting
    from slime_core.types import JsonValue


@dataclass(frozen=True)
class ActivePlugins:
    """All loaded plugins, and which of them take part in a run.

    Arguments:
        loaded: all plugins.
        named: the plugins whose presets count, in the order of the command line.
        without: the plugins that the run leaves out.
        used: the plugins that take part without being named.
        uses: the components, options and functions that the settings name. None without settings.
        functions: plugin -> option -> the functions that it names by path.
    """

    loaded: Registry
    named: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    used: tuple[str, ...] = (CORE.name,)
    uses: Uses | None = None
    functions: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)

    @property
    def takes_part(self) -> tuple[str, ...]:
        """The plugins that take part. Their hooks are registered in this order."""
        return (*self.used, *self.named)

    @cached_property
    def registry(self) -> Registry:
        """The plugins that take part."""
        return self.loaded.only(self.takes_part)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest that is passed to every actor and stored in every checkpoint.

        Raises:
            PluginError: the files of a plugin cannot be found or read.
        """
        options = (sources for of_plugin in self.functions.values() for sources in of_plugin.values())
        modules = (module for sources in options for source in sources for module in source.modules)
        return record(self.registry.plugins, dict.fromkeys(modules))

    @property
    def for_load(self) -> dict[str, Any]:
        """Arguments of :func:`slime_core.config.load.load` and :meth:`~slime_core.config.load.Peek.uses`."""
        return {
            "presets": self.presets,
            "plugin_options": self.loaded.options,
            "takes_part": self.takes_part,
            "without": self.without,
            "derive": self.derived,
        }

    @property
    def presets(self) -> dict[str, list[tuple[object, str]]]:
        """Setting -> value and plugin of each preset, and the defaults that name components of the core which other
        plugins offer too."""
        from slime_core.config.settings import core_settings

        presets: dict[str, list[tuple[object, str]]] = {}
        for name in self.named:
            for key, value in self.loaded.loaded[name].added.preset_values.items():
                presets.setdefault(key, []).append((self._meant(key, value, name), name))
        defaults = {key: core_settings()[key].default for key in KIND_NAMED_BY}
        meant = {key: self._meant(key, default, CORE.name) for key, default in defaults.items()}
        return {key: [(meant[key], CORE.name)] for key in meant if meant[key] != defaults[key]} | presets

    def _meant(self, setting: str, value: Any, plugin: str) -> Any:
        """Return the value with the names of components as ``plugin`` means them."""
        from slime_core.config.sampling import with_reward_names

        if isinstance(value, list | tuple):
            return tuple(self._meant(setting, entry, plugin) for entry in value)
        if setting not in KIND_NAMED_BY or not isinstance(value, str):
            return value
        name_of = partial(self.loaded.meant, Kind(KIND_NAMED_BY[setting]), plugin=plugin)
        return with_reward_names(value, name_of) if setting == "rm_type" else name_of(value)

    def derived(
        self, options: Mapping[str, BaseModel], settings: Mapping[str, JsonValue]
    ) -> list[tuple[str, DerivedSetting]]:
        """Return the settings of the core that ``slime_settings`` derives, each with its plugin."""
        hooks = Hooks(self.registry, options=options)
        return [entry for entries in hooks.call("slime_settings", settings=settings) for entry in entries]


def activate(
    names: Sequence[str] = (), *, without: Sequence[str] = (), architecture: str | None = None
) -> ActivePlugins:
    """Load the plugins; the named ones take part, and the one that builds the model.

    Arguments:
        names: the words of ``--plugin``.
        without: the words of ``--no-plugin``.
        architecture: of the checkpoint, for its model spec. None if no model is built.

    Raises:
        PluginError: a plugin cannot be loaded, or no plugin, or more than one, has a model spec for the architecture.
    """
    return _completed(_named(load_plugins(names, without=without), names, without), None, architecture)


def activate_line(line: Peek, *, loaded: Registry | None = None, architecture: str | None = None) -> ActivePlugins:
    """Decide which plugins take part in the run of a command line.

    Arguments:
        loaded: all plugins. Loaded if None.
        architecture: as for :func:`activate`.

    Raises:
        PluginError: as :func:`activate`, or no plugin, or more than one, offers a component that the settings choose.
    """
    loaded = loaded or load_plugins(line.plugins, without=line.no_plugins, in_file=line.in_file)
    return _completed(_named(loaded, line.plugins, line.no_plugins), line, architecture)


def _named(loaded: Registry, names: Sequence[str], without: Sequence[str]) -> ActivePlugins:
    excluded = tuple(map(short_name, without))
    named = tuple(name for name in dict.fromkeys(map(short_name, names)) if name not in excluded)
    return ActivePlugins(loaded, named, excluded)


def _completed(active: ActivePlugins, line: Peek | None, architecture: str | None) -> ActivePlugins:
    """Add the plugins that the settings and the model use, until these name no further plugin."""
    implementation = line.model_impl if line else "auto"
    while True:
        uses = line.uses(**active.for_load) if line else None
        owners = {*_builder(active, architecture, implementation), *(_owners(active.loaded, uses) if uses else ())}
        if line and line.device in active.loaded.loaded:  # the plugin of a device has its name
            owners.add(line.device)
        if owners <= set(active.takes_part):
            return replace(active, uses=uses)
        active = replace(active, used=(*active.used, *sorted(owners - set(active.takes_part))))


def _owners(loaded: Registry, uses: Uses) -> list[str]:
    """Return the plugins whose options are set, and those of the chosen components and of the policy loss that the
    advantage estimator is used with."""
    owners = list(uses.plugins)
    for choice in uses.components:
        kind = Kind(choice.kind)
        plugin, component = loaded.find(kind, choice.name, setting=choice.where)
        owners.append(plugin.name)
        if kind is Kind.ADVANTAGE_ESTIMATOR and not any(entry.kind == Kind.POLICY_LOSS for entry in uses.components):
            loss = loaded.meant(Kind.POLICY_LOSS, component.traits.policy_loss, plugin.name)
            owners.append(loaded.owner(Kind.POLICY_LOSS, loss).name)
    return owners


def _builder(active: ActivePlugins, architecture: str | None, implementation: str) -> list[str]:
    """Return the plugin with the model spec for ``architecture``."""
    if architecture is None:
        return []
    spec = active.loaded.model_spec(architecture, implementation=implementation, prefer=active.named)
    if spec is None:
        layers = "" if implementation == "auto" else f" with layers of {implementation} (--model-impl)"
        traits = [entry.traits for _, entry in active.loaded.specs()]
        offers = sorted({f"{name} ({of.implementation})" for of in traits for name in of.architectures})
        step = "Write a plugin with a model spec (docs/models.md) and name it."
        if active.without:
            step = f"--no-plugin leaves {', '.join(active.without)} out; a plugin with a model spec has to stay."
        raise PluginError(
            f"no plugin of the run has a model spec for architecture {architecture}{layers}. Its plugins build: "
            f"{', '.join(offers).replace(ANY_ARCHITECTURE, 'all') or 'none'}.\n{step}"
        )
    return [spec[0].name]
