"""Whether every setting that a run gives takes effect, and what its plugins say of the settings together.

The annotation of a plugin's setting may name others (:mod:`slime_core.config.check`) and the components that read
it. What no annotation can say, such as an order between two numbers, a plugin says in ``slime_check``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.config.check import called
from slime_core.config.load import Resolved
from slime_core.config.options import UsedBy
from slime_core.config.settings import Setting, as_words
from slime_core.errors import Mistake, PluginError, SlimeError, config_error
from slime_core.plugins import hooks
from slime_core.plugins.component import Kind
from slime_core.plugins.construction import Code, run_plan
from slime_core.plugins.discovery import CORE
from slime_core.plugins.loading import boundary
from slime_core.plugins.registry import Registry
from slime_core.plugins.selection import SELECTED_BY, selected


def check_settings(
    resolved: Resolved,
    registry: Registry,
    *,
    architecture: str | None = None,
    code: Code | None = None,
    trains: bool = True,
) -> None:
    """Returns if every setting that a training run gives takes effect, and no plugin finds fault with them.

    Arguments:
        architecture: of the start weights; None: not known, so that no model spec counts as used.
        code: the functions that options name by path.
        trains: False: an evaluation, which may be given the settings of a run; only plugins judge those.

    Raises:
        ConfigError: lists what has no effect, what excludes each other, and what plugins say.
        PluginError: a plugin's ``slime_check`` failed, or an annotation names what is not there.
    """
    unused = _Settings.of(resolved, registry, architecture).mistakes() if trains else ()
    found = [*unused, *_plugin_mistakes(resolved, registry, code or {}, trains=trains)]
    if found:
        raise config_error([Mistake(message) for message in found])


@dataclass(frozen=True, slots=True)
class _Settings:
    """Every setting with its value, and the components that the run uses."""

    values: Mapping[str, tuple[Setting, Any]]
    registry: Registry
    used: frozenset[tuple[Kind, str]]
    named: frozenset[str]
    """Plugins that the run names, of which rows may choose reward models."""
    runs_functions: bool

    @classmethod
    def of(cls, resolved: Resolved, registry: Registry, architecture: str | None) -> _Settings:
        values = resolved.values()
        chosen = selected(resolved.config, registry, trains=True, architecture=architecture)
        return cls(
            values,
            registry,
            frozenset((one.kind, one.component.name) for one in chosen),
            frozenset(name.rpartition(":")[2] for name in resolved.config.run.plugins),
            bool(resolved.config.of_plugins.code),
        )

    def mistakes(self) -> Iterator[str]:
        given = [(setting, value) for setting, value in self.values.values() if value != setting.default]
        for setting, value in given:
            # A function that is named by path reads every setting.
            for condition in () if self.runs_functions else setting.notes(UsedBy):
                yield from self._unused(setting, value, condition)
        for setting, value in given:
            if setting.of_plugin and not setting.notes(UsedBy) and self._is_idle(setting.section):
                yield (
                    f"{called(setting)} = {as_words(value)} has no effect: the run uses no component of plugin "
                    f"{setting.section!r}. Leave {setting.flag} out, or name one: {self._offered(setting.section)}"
                )

    def _unused(self, setting: Setting, value: Any, condition: UsedBy) -> Iterator[str]:
        possible = list(Kind) if condition.kind is None else [kind for kind in Kind if kind == condition.kind]
        kinds = [kind for kind in possible if set(condition.components) & set(self.registry.names(kind))]
        if not kinds:
            names = f"{condition.kind or ''} {', '.join(condition.components)}".strip()
            raise PluginError(f"setting {setting.key}: UsedBy names {names}, which no active plugin offers.")
        if any((kind, name) in self.used for kind in kinds for name in condition.components):
            return
        if setting.section in self.named and Kind.REWARD_MODEL in kinds:
            return
        yield (
            f"{called(setting)} = {as_words(value)} has no effect: {self._chosen(kinds[0])} reads it. Leave "
            f"{setting.flag} out, or name {kinds[0].one} that reads it: {', '.join(condition.components)}"
        )

    def _chosen(self, kind: Kind) -> str:
        """``none of corrections = icepop``; where the run names none, ``no correction``."""
        by = next((setting for setting, named in SELECTED_BY.items() if named is kind), kind.value)
        names = [name for used, name in sorted(self.used) if used is kind]
        return f"none of {by} = {' '.join(names)}" if names else f"{by} names no {kind.words}, and none"

    def _is_idle(self, plugin: str) -> bool:
        """Whether the plugin takes part in the run by components alone, and the run uses none of them."""
        offered = [
            (kind, name) for kind in Kind for name in self.registry.names(kind) if self._owns(plugin, kind, name)
        ]
        hooked = any(one.plugin.name == plugin for found in self.registry.lifecycle.values() for one in found)
        return bool(offered) and not hooked and not self.runs_functions and self.used.isdisjoint(offered)

    def _offered(self, plugin: str) -> str:
        names = (name for kind in Kind for name in self.registry.names(kind) if self._owns(plugin, kind, name))
        return ", ".join(dict.fromkeys(names))

    def _owns(self, plugin: str, kind: Kind, name: str) -> bool:
        return self.registry.owner(kind, name).name == plugin


def _plugin_mistakes(resolved: Resolved, registry: Registry, code: Code, *, trains: bool) -> Iterator[str]:
    plan = run_plan(resolved.config, resolved.plugin_options)
    for one in registry.declarations.get(hooks.CHECK, ()):
        name = one.plugin.name
        options = resolved.plugin_options.get(name)
        given = {"plan": plan, "options": options, "trains": trains, "code": code.get(name, {})}
        with boundary(one.plugin, f"calling {hooks.CHECK}", locate=True, passes=(SlimeError,)):
            messages = list(_messages(one(given)))
        yield from (message if one.plugin == CORE else f"{message} (plugin {one.plugin.name})" for message in messages)


def _messages(found: object) -> Sequence[str]:
    if found is None:
        return ()
    if isinstance(found, str) or not hasattr(found, "__iter__"):
        raise TypeError(f"it returned {found!r:.80}; yield messages, or return None")
    messages = list(found)
    if wrong := [message for message in messages if not isinstance(message, str) or not message]:
        raise TypeError(f"it yielded {wrong[0]!r:.80}; yield messages")
    return messages
