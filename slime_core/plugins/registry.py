"""Collects what imported plugins declare into one registry; what two plugins both claim is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import pluggy
from pydantic import BaseModel

from slime_core.config.options import DerivedSetting
from slime_core.config.schema import RunConfig
from slime_core.config.settings import Contested, core_settings, plugin_settings
from slime_core.config.sources import CONFIG_FLAG
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins import hooks
from slime_core.plugins.component import Component, Kind
from slime_core.plugins.discovery import (
    PluginIdentity,
    PluginSource,
    how_to_get,
    similar,
)
from slime_core.plugins.loading import boundary, load_plugin, load_target
from slime_core.plugins.validation import check_fit, check_hooks, checked_components, checked_options, checked_presets
from slime_core.types import JsonValue

_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class _Declared:
    plugin: PluginIdentity
    component: Component


@dataclass(frozen=True, slots=True)
class Implementation:
    """One plugin's function for one hook.

    Arguments:
        plugin: whose it is.
        function: a function of a module, or a bound method of an object.
        wants: the names of its parameters; it is called with these and no others.
        observes: its exception does not end the run; see :func:`slime_core.observer`.
    """

    plugin: PluginIdentity
    function: Callable[..., Any]
    wants: tuple[str, ...] = ()
    observes: bool = False

    def __call__(self, given: Mapping[str, object]) -> Any:
        """Call the function with those of ``given`` that it takes."""
        return self.function(**{name: given[name] for name in self.wants})


@dataclass(frozen=True, slots=True)
class Registry:
    """The components, presets, options and hooks of exactly the plugins that a run activated.

    Arguments:
        plugins: who is active, ``core`` first, then in the order in which they were named.
        presets: flag name -> (value, plugin that sets it); where several set it, :class:`Contested`.
        options: plugin -> its options class.
        _components: what a plain name means, and what ``plugin:component`` means.
        lifecycle: lifecycle hook -> who implements it, in the order of ``plugins``.
        declarations: hook that is called once, at start -> who implements it, in the order of ``plugins``.
    """

    plugins: tuple[PluginIdentity, ...]
    presets: Mapping[str, tuple[object, str]]
    options: Mapping[str, type[BaseModel]]
    _components: Mapping[tuple[Kind, str], _Declared]
    lifecycle: Mapping[str, tuple[Implementation, ...]]
    declarations: Mapping[str, tuple[Implementation, ...]] = field(default_factory=dict)

    def derived(
        self, options: Mapping[str, BaseModel], settings: Mapping[str, JsonValue]
    ) -> list[tuple[str, DerivedSetting]]:
        """The settings of the core that follow from the options of plugins, each with its plugin.

        Arguments:
            options: plugin -> its options object; a plugin without one is skipped.
            settings: of the core, as far as they are given.

        Raises:
            ConfigError: an option cannot be understood.
            PluginError: a plugin's ``slime_settings`` failed, or yielded something else.
        """
        found: list[tuple[str, DerivedSetting]] = []
        for one in self.declarations.get(hooks.SETTINGS, ()):
            name = one.plugin.name
            if name not in options:
                continue
            with boundary(one.plugin, f"calling {hooks.SETTINGS}", locate=True, passes=(ConfigError,)):
                derived = list(one({"options": options[name], "settings": settings}) or ())
                if wrong := [entry for entry in derived if not isinstance(entry, DerivedSetting)]:
                    raise TypeError(f"it yielded {wrong[0]!r:.80}; yield DerivedSetting")
            found += [(name, entry) for entry in derived]
        return found

    def offers(self, kind: Kind, name: str) -> bool:
        """Return whether an active plugin offers the component; ``name`` may be ``plugin:component``."""
        return (kind, name) in self._components

    def find(self, kind: Kind, name: str) -> Component:
        """Return the component of that kind and name, its traits filled in.

        Arguments:
            name: of the component, or ``plugin:component``.

        Raises:
            PluginError: no active plugin offers it; says what they offer and which installed plugins were not named.
        """
        return self._find(kind, name).component

    def traits(self, kind: Kind, name: str) -> Any:
        """Return the traits of the component, an instance of its kind's traits class; raises like :meth:`find`."""
        return self._find(kind, name).component.traits

    def owner(self, kind: Kind, name: str) -> PluginIdentity:
        """Return the plugin that offers the component; raises like :meth:`find`."""
        return self._find(kind, name).plugin

    def options_of(self, plugin: str, options: Mapping[str, object] | None) -> Any:
        """Return the options object of a plugin: that in ``options``, or its defaults; None if it has no options."""
        own = (options or {}).get(plugin)
        return self.options[plugin]() if own is None and plugin in self.options else own

    @property
    def hooked(self) -> AbstractSet[PluginIdentity]:
        """The plugins that implement lifecycle hooks."""
        return {one.plugin for found in self.lifecycle.values() for one in found}

    def only_tracking(self) -> tuple[str, ...]:
        """The plugins that offer trackers and nothing else, by name."""
        offers = {plugin: {kind for kind, _ in self.components(plugin)} for plugin in self.plugins}
        return tuple(
            plugin.name for plugin, kinds in offers.items() if kinds == {Kind.TRACKER} and plugin not in self.hooked
        )

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The names of the components of that kind, sorted."""
        return tuple(sorted(name for found, name in self._components if found is kind and ":" not in name))

    def components(self, plugin: PluginIdentity) -> Iterator[tuple[Kind, Component]]:
        """The components of one plugin."""
        for (kind, name), entry in self._components.items():
            if entry.plugin == plugin and ":" in name:
                yield kind, entry.component

    def load(self, kind: Kind, name: str) -> Any:
        """Import the object at the component's target and check it against the contract of its kind.

        Raises:
            PluginError: like :meth:`find`; or the import failed, or the target does not fit its contract, naming
                distribution, version and entry point.
        """
        declared = self._find(kind, name)
        target = load_target(declared.component, declared.plugin)
        check_fit(kind, declared.component, declared.plugin, target)
        return target

    def model_spec(self, architecture: str) -> Component | None:
        """Return the model spec whose traits hold ``architecture``, or None.

        Raises:
            PluginError: two active plugins offer one.
        """
        specs = [self._find(Kind.MODEL_SPEC, name) for name in self.names(Kind.MODEL_SPEC)]
        found = [one for one in specs if architecture in self.traits(Kind.MODEL_SPEC, one.component.name).architectures]
        if len(found) > 1:
            both = " and ".join(f"{one.component.name!r} of {one.plugin}" for one in found)
            raise PluginError(f"two model specs fit {architecture}: {both}.\nName one of these plugins only.")
        return found[0].component if found else None

    def _find(self, kind: Kind, name: str) -> _Declared:
        if (kind, name) in self._components:
            return self._components[kind, name]
        step = how_to_get(kind, name) or (
            "Name the plugin that has it with --plugin NAME; slime plugins list says what is installed"
        )
        raise PluginError(
            f"no active plugin offers {kind.one} called {name!r}{similar(name, self.names(kind))}. The active plugins "
            f"({', '.join(plugin.name for plugin in self.plugins)}) offer: {', '.join(self.names(kind)) or 'none'}.\n"
            f"{step}."
        )


def register(
    sources: Sequence[PluginSource], *, claimed: Collection[str] = (), tracking: Collection[str] = ()
) -> Registry:
    """Import the plugins, check their hooks, call each hook once, and collect what they declare.

    Arguments:
        claimed: the plugins that are active for a name that they claim. Their presets and trackers are left out, and
            where another plugin offers a component of the same name, the plain name means that one.
        tracking: of these, the plugins whose trackers are wanted. Only the driver has trackers, so the manifest does
            not hold this.

    Raises:
        PluginError: a plugin is broken or misuses a hook, or two claim the same plugin name or component.
    """
    for source in sources:
        _check_name(source)
    who = _by_name(source.plugin for source in sources)
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    for source in sources:
        _add(manager, source, who)
    implemented = {hook: _implementations(manager, hook, who) for hook in hooks.HOOKS}
    restores = {one.plugin for one in implemented[hooks.RESTORE]}
    for one in implemented[hooks.STATE]:
        if one.plugin not in restores:
            raise PluginError(
                f"{one.plugin}: it implements {hooks.STATE} and not {hooks.RESTORE}, so what it saves would be "
                "lost on a resume.\nImplement both, or neither."
            )
    return Registry(
        plugins=tuple(source.plugin for source in sources),
        presets=_presets(implemented["slime_presets"], claimed),
        options=_options(implemented["slime_options"], who),
        _components=_components(implemented, claimed, tracking),
        lifecycle={hook: implemented[hook] for hook in hooks.LIFECYCLE_HOOKS},
        declarations={hook: implemented[hook] for hook in hooks.DECLARATIONS},
    )


def _check_name(source: PluginSource) -> None:
    """Raise PluginError if no section of a settings file can have the plugin's name."""
    name = source.plugin.name
    if name in RunConfig.model_fields or _NAME.fullmatch(name) is None:
        raise PluginError(
            f"{source.plugin}: no plugin can have this name: its options would stand in [{name}], which holds settings "
            "of the core or is not a section of a TOML file; accepted: the letters a to z, digits, - and _.\n"
            f"Rename it, or report this to the author of {source.plugin.distribution}."
        )


def _by_name(plugins: Iterable[PluginIdentity]) -> dict[str, PluginIdentity]:
    found: dict[str, PluginIdentity] = {}
    for plugin in plugins:
        earlier = found.setdefault(plugin.name, plugin)
        if earlier is not plugin:
            raise PluginError(f"two plugins share one name: {earlier} and {plugin}.\nRename one, or name only one.")
    return found


def _add(manager: pluggy.PluginManager, source: PluginSource, who: Mapping[str, PluginIdentity]) -> None:
    plugin = source.plugin
    holder = load_plugin(source)
    check_hooks(plugin, holder)
    known = manager.get_name(holder)
    if known is not None:
        raise PluginError(f"{plugin} and {who[known]} are the same code.\nName it once, as {known}.")
    with boundary(plugin, "registering it"):
        manager.register(holder, plugin.name)
    if not manager.get_hookcallers(holder):
        raise PluginError(
            f"{plugin} declares no component, preset, option or hook, so a run is the same without it.\n"
            "Name what has them, or mark a function of it with @hookimpl, such as slime_register_reward_models."
        )


def _implementations(
    manager: pluggy.PluginManager, hook: str, who: Mapping[str, PluginIdentity]
) -> tuple[Implementation, ...]:
    """Return the implementations of ``hook``, in the order of ``who``; each is called alone: a failure has an owner."""
    found: dict[str, Implementation] = {}
    for impl in manager.subset_hook_caller(hook, ()).get_hookimpls():
        plugin, function = who[impl.plugin_name], impl.function
        observes = bool(getattr(function, hooks.OBSERVES, False))
        new = Implementation(plugin, function, impl.argnames, observes=observes)
        earlier = found.setdefault(plugin.name, new)
        if earlier is not new:
            both = f"{earlier.function.__name__} and {function.__name__}"
            raise PluginError(f"{plugin}: {both} both implement {hook}.\nWrite one function that does both.")
    return tuple(found[name] for name in who if name in found)


def _components(
    implemented: Mapping[str, Sequence[Implementation]], claimed: Collection[str], tracking: Collection[str]
) -> dict[tuple[Kind, str], _Declared]:
    """Map ``plugin:component`` to the component, and each plain name to the component of the plugin that offers it; if
    several plugins do, to that of the plugin that is not ``claimed``."""
    offered: list[tuple[Kind, _Declared]] = []
    for hook, kind in hooks.REGISTRATION_HOOKS.items():
        for one in implemented[hook]:
            if kind is Kind.TRACKER and one.plugin.name in claimed and one.plugin.name not in tracking:
                continue
            with boundary(one.plugin, f"calling {hook}"):
                components = checked_components(kind, one.function())
            offered += [(kind, _Declared(one.plugin, component)) for component in components]
    plain: dict[tuple[Kind, str], _Declared] = {}
    for kind, new in sorted(offered, key=lambda one: one[1].plugin.name in claimed):
        earlier = plain.setdefault((kind, new.component.name), new)
        yields = new.plugin.name in claimed and earlier.plugin.name not in claimed
        if earlier is not new and not yields:
            raise PluginError(
                f"the {kind.words} {new.component.name!r} is offered twice: by {earlier.plugin} and by {new.plugin}.\n"
                "Name only one of these plugins, or ask an author for another component name."
            )
    return plain | {(kind, f"{one.plugin.name}:{one.component.name}"): one for kind, one in offered}


def _presets(implementations: Sequence[Implementation], claimed: Collection[str]) -> dict[str, tuple[object, str]]:
    presets: dict[str, tuple[object, str]] = {}
    setters: dict[str, list[str]] = {}
    for one in implementations:
        if one.plugin.name in claimed:
            continue
        with boundary(one.plugin, "calling slime_presets"):
            own = checked_presets(one.function())
        for key, value in own.items():
            by = setters.setdefault(key, [])
            by.append(str(one.plugin))
            presets[key] = (value if len(by) == 1 else Contested(tuple(by)), one.plugin.name)
    return presets


def _options(
    implementations: Sequence[Implementation], who: Mapping[str, PluginIdentity]
) -> dict[str, type[BaseModel]]:
    """The options classes; no setting of a plugin may have the flag of another one, of the core or of a plugin."""
    options = {}
    for one in implementations:
        with boundary(one.plugin, "calling slime_options"):
            options[one.plugin.name] = checked_options(one.function())
    owners: dict[str, str] = {CONFIG_FLAG: "the core"}
    owners |= {setting.flag: "the core" for setting in core_settings().values()}
    for setting in plugin_settings(options).values():
        plugin = who[setting.section]
        if (owner := owners.setdefault(setting.flag, str(plugin))) != str(plugin):
            raise PluginError(
                f"{plugin}: its setting {setting.name} has the flag {setting.flag}, which is one of {owner}.\n"
                f"Name only one of these plugins, or report it to the author of {plugin.distribution}."
            )
    return options
