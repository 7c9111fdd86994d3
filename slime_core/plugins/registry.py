"""Collects what imported plugins declare into one registry; what two plugins both claim is an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from slime_core.plugins.claims import claimed_names, how_to_get
from slime_core.plugins.component import Component, Kind, ModelSpecTraits
from slime_core.plugins.discovery import PluginIdentity, PluginSource, Source, installed, similar
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
        _declared: what a plain name means.
        _offered: what ``plugin:component`` means.
        lifecycle: lifecycle hook -> who implements it, in the order of ``plugins``.
        declarations: hook that is called once, at start -> who implements it, in the order of ``plugins``.
    """

    plugins: tuple[PluginIdentity, ...]
    presets: Mapping[str, tuple[object, str]]
    options: Mapping[str, type[BaseModel]]
    _declared: Mapping[tuple[Kind, str], _Declared]
    lifecycle: Mapping[str, tuple[Implementation, ...]]
    declarations: Mapping[str, tuple[Implementation, ...]] = field(default_factory=dict)
    _offered: Mapping[tuple[Kind, str], _Declared] = field(default_factory=dict)

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
        """Whether an active plugin offers the component; ``name`` may be ``plugin:component``."""
        return (kind, name) in self._declared or (kind, name) in self._offered

    def find(self, kind: Kind, name: str) -> Component:
        """The component of that kind and name, its traits filled in.

        Arguments:
            name: of the component, or ``plugin:component``.

        Raises:
            PluginError: no active plugin offers it; says what they offer and which installed plugins were not named.
        """
        return self._find(kind, name).component

    def traits(self, kind: Kind, name: str) -> Any:
        """The traits of the component, of the class that its kind has; raises like :meth:`find`."""
        return self._find(kind, name).component.traits

    def owner(self, kind: Kind, name: str) -> PluginIdentity:
        """The plugin that offers the component; raises like :meth:`find`."""
        return self._find(kind, name).plugin

    def options_of(self, plugin: str, options: Mapping[str, object] | None) -> Any:
        """The options object of a plugin: the one in ``options``, by name, else its defaults; None: it has none."""
        own = (options or {}).get(plugin)
        return self.options[plugin]() if own is None and plugin in self.options else own

    def only_tracking(self) -> tuple[str, ...]:
        """The plugins that offer trackers and nothing else, by name."""
        hooked = {one.plugin for found in self.lifecycle.values() for one in found}
        offers = {plugin: {kind for kind, _ in self.components(plugin)} for plugin in self.plugins}
        return tuple(
            plugin.name for plugin, kinds in offers.items() if kinds == {Kind.TRACKER} and plugin not in hooked
        )

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The names of the components of that kind, sorted."""
        return tuple(sorted(name for found, name in self._declared if found is kind))

    def components(self, plugin: PluginIdentity) -> Iterator[tuple[Kind, Component]]:
        """The components of one plugin."""
        for (kind, _), entry in self._offered.items():
            if entry.plugin == plugin:
                yield kind, entry.component

    def load(self, kind: Kind, name: str) -> Any:
        """The object at the component's target, imported in this process and checked against the contract of its kind.

        Raises:
            PluginError: like :meth:`find`; or the import failed, or the target does not fit its contract, naming
                distribution, version and entry point.
        """
        declared = self._find(kind, name)
        target = load_target(declared.component, declared.plugin)
        check_fit(kind, declared.component, declared.plugin, target)
        return target

    def model_spec(self, architecture: str) -> Component | None:
        """The model spec whose traits hold ``architecture``, or None.

        Raises:
            PluginError: two active plugins offer one.
        """
        found = [entry for entry in self._declared.values() if _fits(entry.component, architecture)]
        if len(found) > 1:
            both = " and ".join(f"{entry.component.name!r} of {entry.plugin}" for entry in found)
            raise PluginError(f"two model specs fit {architecture}: {both}.\nName one of these plugins only.")
        return found[0].component if found else None

    def _find(self, kind: Kind, name: str) -> _Declared:
        found = self._declared.get((kind, name)) or self._offered.get((kind, name))
        if found is None:
            raise PluginError(self._unknown(kind, name))
        return found

    def _unknown(self, kind: Kind, name: str) -> str:
        offered = self.names(kind)
        active = [plugin.name for plugin in self.plugins]
        return (
            f"no active plugin offers {kind.one} called {name!r}{similar(name, offered)}. "
            f"The active plugins ({', '.join(active)}) offer: {', '.join(offered) or 'none'}.\n"
            f"{self._next_step(kind, name, active)}"
        )

    def _next_step(self, kind: Kind, name: str, active: Sequence[str]) -> str:
        known = how_to_get(kind, name)
        if known is not None:
            return f"{known[0].upper()}{known[1:]}."
        claimed = claimed_names(kind)
        near = similar(name, claimed)
        listed = f"Installed plugins claim: {', '.join(claimed)}{near}. " if claimed else ""
        others = sorted({plugin.name for plugin in installed()} - set(active))
        step = f"Installed, but not active: {', '.join(others)}." if others else "No other plugin is installed."
        return (
            f"{listed}{step} Name the plugin that has it with --plugin NAME; slime plugins show NAME says what one "
            "offers."
        )


def register(sources: Sequence[PluginSource], *, claimed: Collection[str] = ()) -> Registry:
    """Import the plugins, check their hooks, call each hook once, and collect what they declare.

    Arguments:
        claimed: the plugins that are active for a name that they claim. Their presets and trackers are left out, and
            where another plugin offers a component of the same name, the plain name means that one.

    Raises:
        PluginError: a plugin is broken or misuses a hook, or two claim the same plugin name or component.
    """
    for source in sources:
        _check_name(source)
    identities = _by_name(source.plugin for source in sources)
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    for source in sources:
        _add(manager, source, identities)
    components = _components(manager, identities, claimed)
    return Registry(
        plugins=tuple(source.plugin for source in sources),
        presets=_presets(manager, identities, claimed),
        options=_options(manager, identities),
        _declared=_by_plain_name(components, claimed),
        _offered={(kind, f"{one.plugin.name}:{one.component.name}"): one for kind, one in components},
        lifecycle=_lifecycle(manager, identities),
        declarations={hook: tuple(_implementations(manager, hook, identities)) for hook in hooks.DECLARATIONS},
    )


def _check_name(source: PluginSource) -> None:
    """Returns if the plugin's options can have a section of its name in a file of settings."""
    name = source.plugin.name
    if name in RunConfig.model_fields:
        why = f"its options would stand in [{name}], which holds settings of the core"
    elif _NAME.fullmatch(name) is None:
        why = f"[{name}] is no section of a TOML file; accepted are the letters a to z, digits, - and _"
    else:
        return
    thing = {Source.FILE: "file", Source.MODULE: "module"}.get(source.source)
    step = f"Rename the {thing}." if thing else f"Report it to the author of {source.plugin.distribution}."
    raise PluginError(f"{source.plugin}: no plugin can have this name: {why}.\n{step}")


def _by_name(plugins: Iterable[PluginIdentity]) -> dict[str, PluginIdentity]:
    found: dict[str, PluginIdentity] = {}
    for plugin in plugins:
        earlier = found.setdefault(plugin.name, plugin)
        if earlier is not plugin:
            raise PluginError(f"two plugins share one name: {earlier} and {plugin}.\nRename one, or name only one.")
    return found


def _add(manager: pluggy.PluginManager, source: PluginSource, identities: Mapping[str, PluginIdentity]) -> None:
    plugin = source.plugin
    holder = load_plugin(source)
    check_hooks(plugin, holder)
    known = manager.get_name(holder)
    if known is not None:
        raise PluginError(f"{plugin} and {identities[known]} are the same code.\nName it once, as {known}.")
    with boundary(plugin, "registering it"):
        manager.register(holder, plugin.name)
        manager.check_pending()
    if not manager.get_hookcallers(holder):
        raise PluginError(
            f"{plugin} declares no component, preset, option or hook, so a run is the same without it.\n"
            "Name what has them, or mark a function of it with @hookimpl, such as slime_register_reward_models."
        )


def _components(
    manager: pluggy.PluginManager, who: Mapping[str, PluginIdentity], claimed: Collection[str]
) -> list[tuple[Kind, _Declared]]:
    found: list[tuple[Kind, _Declared]] = []
    for hook, kind in hooks.REGISTRATION_HOOKS.items():
        for one in _implementations(manager, hook, who):
            if kind is Kind.TRACKER and one.plugin.name in claimed:
                continue
            with boundary(one.plugin, f"calling {hook}"):
                components = checked_components(kind, one.function())
            found += [(kind, _Declared(one.plugin, component)) for component in components]
    return found


def _by_plain_name(
    components: Iterable[tuple[Kind, _Declared]], claimed: Collection[str]
) -> dict[tuple[Kind, str], _Declared]:
    """The component of a name without a plugin: of the plugins that offer it, the one that is not ``claimed``."""
    found: dict[tuple[Kind, str], _Declared] = {}
    for kind, new in sorted(components, key=lambda one: one[1].plugin.name in claimed):
        earlier = found.setdefault((kind, new.component.name), new)
        yields = new.plugin.name in claimed and earlier.plugin.name not in claimed
        if earlier is not new and not (yields and earlier.plugin != new.plugin):
            raise PluginError(
                f"the {kind.words} {new.component.name!r} is offered twice: by {earlier.plugin} and by {new.plugin}.\n"
                "Name only one of these plugins, or ask an author for another component name."
            )
    return found


def _presets(
    manager: pluggy.PluginManager, who: Mapping[str, PluginIdentity], claimed: Collection[str]
) -> dict[str, tuple[object, str]]:
    presets: dict[str, tuple[object, str]] = {}
    setters: dict[str, list[str]] = {}
    for one in _implementations(manager, "slime_presets", who):
        if one.plugin.name in claimed:
            continue
        with boundary(one.plugin, "calling slime_presets"):
            own = checked_presets(one.function())
        for key, value in own.items():
            by = setters.setdefault(key, [])
            by.append(str(one.plugin))
            presets[key] = (value if len(by) == 1 else Contested(tuple(by)), one.plugin.name)
    return presets


def _options(manager: pluggy.PluginManager, who: Mapping[str, PluginIdentity]) -> dict[str, type[BaseModel]]:
    options = {}
    for one in _implementations(manager, "slime_options", who):
        with boundary(one.plugin, "calling slime_options"):
            options[one.plugin.name] = checked_options(one.function())
    _refuse_shared_flags(options, who)
    return options


def _refuse_shared_flags(options: Mapping[str, type[BaseModel]], who: Mapping[str, PluginIdentity]) -> None:
    """Returns if no setting of a plugin has the flag of another setting, of the core or of a plugin."""
    owners: dict[str, str] = {setting.flag: "the core" for setting in core_settings().values()}
    for setting in plugin_settings(options).values():
        plugin = who[setting.section]
        if (owner := owners.setdefault(setting.flag, str(plugin))) != str(plugin) or setting.flag == CONFIG_FLAG:
            raise PluginError(
                f"{plugin}: its setting {setting.name} has the flag {setting.flag}, which is one of {owner}.\n"
                f"Name only one of these plugins, or report it to the author of {plugin.distribution}."
            )


def _lifecycle(
    manager: pluggy.PluginManager, who: Mapping[str, PluginIdentity]
) -> dict[str, tuple[Implementation, ...]]:
    found = {hook: tuple(_implementations(manager, hook, who)) for hook in hooks.LIFECYCLE_HOOKS}
    restores = {one.plugin.name for one in found[hooks.RESTORE]}
    for one in found[hooks.STATE]:
        if one.plugin.name not in restores:
            raise PluginError(
                f"{one.plugin}: it implements {hooks.STATE} and not {hooks.RESTORE}, so what it saves would be "
                "lost on a resume.\nImplement both, or neither."
            )
    return found


def _implementations(
    manager: pluggy.PluginManager, hook: str, who: Mapping[str, PluginIdentity]
) -> list[Implementation]:
    """Who implements ``hook``, in the order of ``who``; called one by one, so that a failure has an owner."""
    found: dict[str, Implementation] = {}
    for impl in manager.subset_hook_caller(hook, ()).get_hookimpls():
        plugin = who[impl.plugin_name]
        earlier = found.setdefault(
            plugin.name, Implementation(plugin, impl.function, impl.argnames, observes=_observes(impl.function))
        )
        if earlier.function is not impl.function:
            both = f"{earlier.function.__name__} and {impl.function.__name__}"
            raise PluginError(f"{plugin}: {both} both implement {hook}.\nWrite one function that does both.")
    return [found[name] for name in who if name in found]


def _observes(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, hooks.OBSERVES, False))


def _fits(component: Component, architecture: str) -> bool:
    return isinstance(component.traits, ModelSpecTraits) and architecture in component.traits.architectures
