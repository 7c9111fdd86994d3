"""Decides which plugins take part in a run: ``core``, named ones, and those whose components or options it uses.

All installed plugins are loaded, so that their components, options and commands exist. Only plugins that take part have
their hooks called and are in the manifest. Rows of data choose only among their components.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_core.config.options import KIND_NAMED_BY
from slime_core.errors import PluginError
from slime_core.plugins.discovery import CORE, short_name
from slime_core.plugins.lifecycle import Hooks
from slime_core.plugins.manifest import Manifest, record
from slime_core.plugins.registration import Kind
from slime_core.plugins.registry import Registry, load_plugins

if TYPE_CHECKING:
    from pydantic import BaseModel

    from slime_core.config.load import Uses
    from slime_core.config.options import DerivedSetting
    from slime_core.types import JsonValue


@dataclass(frozen=True, slots=True)
class Offered:
    """What plugins add to settings.

    Arguments:
        loaded: all plugins.
        named: the plugins whose presets count, in the order of the command line.
        takes_part: the plugins that take part, as far as known.
        without: the plugins that the run leaves out.
    """

    loaded: Registry
    named: tuple[str, ...] = ()
    takes_part: tuple[str, ...] = (CORE.name,)
    without: tuple[str, ...] = ()

    @property
    def for_load(self) -> dict[str, Any]:
        """The arguments of :func:`slime_core.config.load.load` that come from plugins."""
        return {
            "presets": self.presets,
            "plugin_options": self.options,
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
        if isinstance(value, list | tuple):
            return tuple(self._meant(setting, entry, plugin) for entry in value)
        is_name = setting in KIND_NAMED_BY and isinstance(value, str)
        return self.loaded.meant(Kind(KIND_NAMED_BY[setting]), value, plugin) if is_name else value

    @property
    def options(self) -> Mapping[str, type[BaseModel]]:
        """Plugin -> its options class, of all plugins."""
        return self.loaded.options

    def derived(
        self, options: Mapping[str, BaseModel], settings: Mapping[str, JsonValue]
    ) -> list[tuple[str, DerivedSetting]]:
        """Return the settings of the core that ``slime_settings`` derives, each with its plugin."""
        hooks = Hooks(self.loaded.only(self.takes_part), options=options)
        return [entry for entries in hooks.call("slime_settings", settings=settings) for entry in entries]


@dataclass(frozen=True, slots=True)
class ActivePlugins:
    """The plugins of a run.

    Arguments:
        registry: of the plugins that take part.
        manifest: passed to every actor, and stored in every checkpoint.
        offered: what all plugins add to the settings.
        functions: plugin -> option -> the functions that it names by path.
    """

    registry: Registry
    manifest: Manifest
    offered: Offered
    functions: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


def activate(
    names: Sequence[str] = (),
    *,
    without: Sequence[str] = (),
    in_file: Sequence[str] = (),
    architecture: str | None = None,
    device: str = "auto",
    loads: Callable[[Registry], None] | None = None,
    uses: Callable[[Offered], Uses] | None = None,
    functions: Callable[[Uses], Mapping[str, Mapping[str, Sequence[Any]]]] | None = None,
) -> ActivePlugins:
    """Load the plugins and decide which take part.

    Arguments:
        names: the words of ``--plugin``.
        without: the words of ``--no-plugin``.
        in_file: the plugins that the file of the run names; see :func:`load_plugins`.
        architecture: of the checkpoint, for its model spec; None: no model is built.
        device: the setting; a plugin of this name takes part.
        loads: called with all loaded plugins before settings are read.
        uses: returns what the settings use; called again after a plugin is added. None: the run has no settings.
        functions: finds the functions that options name by path; None: there are none.

    Raises:
        PluginError: a plugin cannot be loaded, or no plugin, or more than one, offers what the run uses.
    """
    loaded = load_plugins(names, without=without, in_file=in_file)
    if loads is not None:
        loads(loaded)
    excluded = tuple(map(short_name, without))
    named = tuple(name for name in dict.fromkeys(map(short_name, names)) if name not in excluded)
    takes_part = [CORE.name, *(name for name in loaded.loaded if name == device)]
    while True:
        offered = Offered(loaded, named, (*takes_part, *named), excluded)
        used = uses(offered) if uses else None
        needed = [*_builder(loaded, architecture, named, excluded), *(_owners(loaded, used) if used else ())]
        if not (added := [name for name in needed if name not in offered.takes_part]):
            break
        takes_part += sorted(set(added))
    registry = loaded.only(offered.takes_part)
    found = functions(used) if functions and used else {}
    sources = [source for options in found.values() for entries in options.values() for source in entries]
    code = dict.fromkeys(code for source in sources for code in (source.code, *source.neighbours.values()))
    return ActivePlugins(registry, record(registry.plugins, code), offered, found)


def _owners(loaded: Registry, uses: Uses) -> list[str]:
    """Return the plugins whose options are set, and those of the chosen components and of the policy loss that the
    advantage estimator is used with."""
    owners = list(uses.plugins)
    for choice in uses.components:
        kind = Kind(choice.kind)
        try:
            plugin, component = loaded.find(kind, choice.name)
        except PluginError as problem:
            raise PluginError(f"{choice.where}: {problem}") from None
        owners.append(plugin.name)
        if kind is Kind.ADVANTAGE_ESTIMATOR and not any(entry.kind == Kind.POLICY_LOSS for entry in uses.components):
            loss = loaded.meant(Kind.POLICY_LOSS, component.traits.policy_loss, plugin.name)
            owners.append(loaded.owner(Kind.POLICY_LOSS, loss).name)
    return owners


def _builder(
    loaded: Registry, architecture: str | None, named: tuple[str, ...], excluded: tuple[str, ...]
) -> list[str]:
    """Return the plugin with the model spec for ``architecture``."""
    if architecture is None:
        return []
    spec = loaded.model_spec(architecture, prefer=named)
    if spec is None:
        architectures = sorted({name for _, entry in loaded.specs() for name in entry.traits.architectures})
        step = "Write a plugin with a model spec (docs/models.md) and name it."
        if excluded:
            step = f"--no-plugin leaves {', '.join(excluded)} out; a plugin with a model spec has to stay."
        raise PluginError(
            f"no plugin of the run has a model spec for architecture {architecture}. Its plugins build: "
            f"{', '.join(architectures) or 'none'}.\n{step}"
        )
    return [spec[0].name]
