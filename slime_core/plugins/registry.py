"""Loaded plugins, with their components, presets, options and commands."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pluggy

from slime_core.errors import PluginError, nearest
from slime_core.plugins import hooks
from slime_core.plugins.discovery import CORE, Plugin, installed, is_path, resolve, short_name, unknown_plugin
from slime_core.plugins.loading import import_plugin, load_attribute, next_step
from slime_core.plugins.registration import ANY_ARCHITECTURE, Component, Kind, Registration
from slime_core.user_code.failures import boundary
from slime_core.user_code.limits import time_limit

if TYPE_CHECKING:
    from pydantic import BaseModel


LIMIT_S = 30.0
"""Time limit for loading a plugin that the command does not name."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plugin that has been imported.

    Arguments:
        holder: the module or object with its hooks.
        added: the calls of its ``slime_register``.
        options: its options class. None if it has no options, or they were not loaded.
    """

    plugin: Plugin
    holder: object
    added: Registration
    options: type[BaseModel] | None = None


class Registry:
    """The components, presets and options of loaded plugins.

    Arguments:
        loaded: in the order in which their hooks are registered.
        broken: plugin name -> why an installed plugin could not be loaded.
    """

    def __init__(self, loaded: Iterable[Loaded], broken: Mapping[str, PluginError] | None = None) -> None:
        self.loaded = {entry.plugin.name: entry for entry in loaded}
        self.broken = dict(broken or {})
        self._components: dict[tuple[Kind, str], list[tuple[Plugin, Component]]] = {}
        for entry in self.loaded.values():
            for component in entry.added.components:
                offers = self._components.setdefault((component.kind, component.name), [])
                offers.append((entry.plugin, component))

    def only(self, names: Iterable[str]) -> Registry:
        """Return a registry of these plugins, in this order."""
        return Registry(self.loaded[name] for name in dict.fromkeys(names))

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        return tuple(entry.plugin for entry in self.loaded.values())

    @cached_property
    def options(self) -> dict[str, type[BaseModel]]:
        """Plugin -> its options class."""
        return {name: entry.options for name, entry in self.loaded.items() if entry.options is not None}

    def options_of(self, plugin: str, options: Mapping[str, object] | None = None) -> Any:
        """Return the plugin's options object in ``options``, or its defaults; None if it has no options."""
        values = (options or {}).get(plugin)
        return self.options[plugin]() if values is None and plugin in self.options else values

    def offers(self, kind: Kind, name: str) -> list[tuple[Plugin, Component]]:
        """Return the components of that name, each with its plugin.

        Arguments:
            name: of the component, or ``plugin:component``.
        """
        plugin, _, component = name.rpartition(":")
        offers = self._components.get((kind, component), [])
        return [(owner, entry) for owner, entry in offers if plugin in ("", owner.name)]

    def find(self, kind: Kind, name: str, *, setting: str = "") -> tuple[Plugin, Component]:
        """Return the component of that name, and its plugin.

        Arguments:
            name: of the component, or ``plugin:component``.
            setting: the setting that names it, for messages.

        Raises:
            PluginError: no plugin offers it, or several do.
        """
        offers, named_by = self.offers(kind, name), f"{setting}: " if setting else ""
        if len(offers) == 1:
            return offers[0]
        if offers:
            choices = " or ".join(f"{plugin.name}:{name}" for plugin, _ in offers)
            choices += f"; in a sum {offers[0][0].name}:{name}:" if kind is Kind.REWARD_MODEL else ""
            owners = " and ".join(str(plugin) for plugin, _ in offers)
            raise PluginError(f"{named_by}{owners} both offer the {kind.words} {name!r}.\nWrite {choices}.")
        names = self.names(kind)
        broken = "".join(f"Not loaded: {problem}\n" for problem in self.broken.values())
        raise PluginError(
            f"{named_by}no installed plugin offers the {kind.words} {name!r}{nearest(name, names)}\n"
            f"Installed plugins offer: {', '.join(names) or 'none'}.\n{broken}"
            "slime plugins list shows what is installed."
        )

    def meant(self, kind: Kind, name: str, plugin: str) -> str:
        """Return the name of the component that ``plugin`` means: ``plugin:name`` if several plugins offer the name and
        it is one of them."""
        owners = [owner.name for owner, _ in self.offers(kind, name)]
        return f"{plugin}:{name}" if len(owners) > 1 and plugin in owners else name

    def traits(self, kind: Kind, name: str) -> Any:
        """Return the traits of the component; raises as :meth:`find`."""
        return self.find(kind, name)[1].traits

    def owner(self, kind: Kind, name: str) -> Plugin:
        """Return the plugin that offers the component; raises as :meth:`find`."""
        return self.find(kind, name)[0]

    def names(self, kind: Kind) -> tuple[str, ...]:
        """Return the names of the components of that kind, sorted; ``plugin:name`` if several plugins offer it."""
        entries = [
            (name, plugin.name) for (of, name), offers in self._components.items() for plugin, _ in offers if of is kind
        ]
        return tuple(sorted(self.meant(kind, name, plugin) for name, plugin in entries))

    def specs(self) -> list[tuple[Plugin, Component]]:
        """Return all model specs, each with its plugin."""
        return [offer for name in self.names(Kind.MODEL_SPEC) for offer in self.offers(Kind.MODEL_SPEC, name)]

    def model_spec(
        self, architecture: str, *, implementation: str = "auto", prefer: Iterable[str] = ()
    ) -> tuple[Plugin, Component] | None:
        """Return the model spec for ``architecture`` and its plugin; None if no plugin offers one.

        Arguments:
            implementation: whose layers it builds; ``auto``: a spec for all architectures is used if no other fits.
            prefer: plugins whose spec is meant if several plugins offer one.

        Raises:
            PluginError: several plugins offer one.
        """
        offers = [spec for spec in self.specs() if implementation in ("auto", spec[1].traits.implementation)]
        specs = [spec for spec in offers if architecture in spec[1].traits.architectures]
        specs = specs or [spec for spec in offers if ANY_ARCHITECTURE in spec[1].traits.architectures]
        specs = [spec for spec in specs if spec[0].name in prefer] or specs
        if len(specs) > 1:
            owners = " and ".join(f"{component.name!r} of {plugin}" for plugin, component in specs)
            raise PluginError(f"two model specs fit {architecture}: {owners}.\nLeave one out with --no-plugin NAME.")
        return specs[0] if specs else None


def load_plugins(
    names: Sequence[str] = (), *, without: Sequence[str] = (), in_file: Sequence[str] = (), options: bool = True
) -> Registry:
    """Load all installed plugins, and the files and modules in ``names``.

    Arguments:
        names: the words of ``--plugin``, or those of the file.
        without: the words of ``--no-plugin``: plugins that are installed, or that ``names`` or ``in_file`` name.
        in_file: the plugins that the file of the run names, in whatever way; they need not be installed.
        options: load their options classes, which takes pydantic.

    Raises:
        PluginError: a named plugin is not installed or cannot be loaded. Others that cannot be loaded are in the
            ``broken`` of the result.
    """
    available, unreadable = installed()
    accepted = [plugin.name for plugin in available]
    excluded = set(map(short_name, without)) - {CORE.name}
    included = [name for name in names if short_name(name) not in excluded]
    removable = [*accepted, *map(short_name, [*names, *in_file])]
    for flag, words, choices in (("--plugin", included, accepted), ("--no-plugin", without, removable)):
        if unknown := [name for name in words if not is_path(name) and name not in choices]:
            raise unknown_plugin(unknown[0], accepted, flag=flag)
    local = {short_name(name): resolve(name) for name in included if is_path(name)}
    plugins = [plugin for plugin in available if plugin.name not in excluded | local.keys()]
    required = {CORE.name, *map(short_name, included)}
    registry = register([*plugins, *local.values()], required=required, options=options)
    registry.broken.update({place: PluginError(f"the metadata in {place} cannot be read") for place in unreadable})
    return registry


def register(plugins: Iterable[Plugin], *, required: Container[str] | None = None, options: bool = True) -> Registry:
    """Import the plugins and collect what they add.

    Arguments:
        required: names of plugins, by default all. Another plugin that fails, or takes longer than :data:`LIMIT_S`, is
            in ``broken``.
        options: load their options classes, which takes pydantic.

    Raises:
        PluginError: a required plugin fails while it is imported or registered, or clashes with another plugin.
    """
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    loaded: dict[str, Loaded] = {}
    broken: dict[str, PluginError] = {}
    flags: dict[str, str] = {}
    for plugin in plugins:
        is_required = required is None or plugin.name in required
        try:
            with time_limit(None if is_required else LIMIT_S):
                entry = _load(plugin, manager, loaded)
                loaded[plugin.name] = replace(entry, options=_load_options(entry, flags)) if options else entry
        except PluginError as problem:
            if is_required:
                raise
            broken[plugin.name] = problem
    return Registry(loaded.values(), broken)


def _load(plugin: Plugin, manager: pluggy.PluginManager, loaded: Mapping[str, Loaded]) -> Loaded:
    """Import the plugin, let pluggy check its hooks, and call its ``slime_register``."""
    if plugin.name in loaded:
        raise PluginError(f"{loaded[plugin.name].plugin} and {plugin} have one name.\nUninstall or rename one.")
    holder = import_plugin(plugin)
    if same := next((entry.plugin for entry in loaded.values() if entry.holder is holder), None):
        raise PluginError(f"{same} and {plugin} are the same code.\nName {same.name}.")
    added = Registration()
    try:
        with boundary(plugin, "registering it", next_step=next_step(plugin)):
            _check_hooks(plugin, holder, manager)
        with boundary(plugin, "calling slime_register", next_step=next_step(plugin), locate=True):
            manager.hook.slime_register(add=added)
    finally:
        manager.unregister(name=plugin.name)
    return Loaded(plugin, holder, added)


def _check_hooks(plugin: Plugin, holder: object, manager: pluggy.PluginManager) -> None:
    try:
        manager.register(holder, plugin.name)
        manager.check_pending()
    except pluggy.PluginValidationError as mistake:
        marked = [name for name in dir(holder) if hasattr(getattr(holder, name, None), f"{hooks.PROJECT}_impl")]
        hint = "".join(nearest(name, hooks.HOOKS) for name in marked if name not in hooks.HOOKS)
        raise ValueError(f"{mistake}{hint}") from None
    callers = manager.get_hookcallers(holder) or []
    for name, entry in ((caller.name, entry) for caller in callers for entry in caller.get_hookimpls()):
        function, expects_async = inspect.unwrap(entry.function), inspect.iscoroutinefunction(getattr(hooks, name))
        if not entry.wrapper and inspect.iscoroutinefunction(function) != expects_async:
            raise ValueError(f"{name} is written with {'async' if expects_async else 'plain'} def")
        if not entry.wrapper and inspect.isgeneratorfunction(function) and not hooks.HOOKS[name].yields:
            raise ValueError(f"{name} has a yield; write it with return")
    implemented = {caller.name for caller in callers}
    if not implemented:
        raise ValueError("it has no hook; write @hookimpl above a function, such as slime_register")
    if "slime_checkpoint_state" in implemented and "slime_checkpoint_restore" not in implemented:
        raise ValueError("it implements slime_checkpoint_state and not slime_checkpoint_restore; write both")


def _load_options(entry: Loaded, flags: dict[str, str]) -> type[BaseModel] | None:
    """Return the options class of a plugin, checked; adds its flags to ``flags``."""
    plugin, target = entry.plugin, entry.added.options_target
    if target is None:
        return None
    from slime_core.config.settings import check_options

    with boundary(plugin, f"loading its options {target}", next_step=next_step(plugin), locate=True):
        options: type[BaseModel] = load_attribute(target) if isinstance(target, str) else target
        check_options(plugin.name, options, flags, owner=str(plugin))
    return options
