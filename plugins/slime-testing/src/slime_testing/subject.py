"""Finds the component under test as a run would: by the plugin's name, file or module, through registration."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import Component, Kind, RunView
from slime_core.errors import PluginError
from slime_core.harness import (
    PLUGIN_GROUP,
    ActivePlugin,
    PluginIdentity,
    PluginSource,
    activate,
    default_run_view,
    find_plugin,
    installed,
)

__all__ = ["Subject", "default_run", "find", "find_component", "own_plugin", "plugin_source"]


@dataclass(frozen=True, slots=True)
class Subject:
    """A component, its plugin, and the options with which it is created.

    Arguments:
        active: the activated plugin.
        component: the component, with complete traits.
        target: the object that the component's ``target`` names.
        options: an instance of the plugin's options class; None: the plugin has none.
    """

    active: ActivePlugin
    component: Component
    target: Any
    options: Any

    @property
    def plugin(self) -> PluginIdentity:
        """Identity of the plugin."""
        return self.active.identity


def default_run(subject: Subject) -> RunView:
    """Return the run view of a run of the built-in model with every setting at its default."""
    return default_run_view({} if subject.options is None else {subject.plugin.name: subject.options})


def find(kind: Kind, component: str, *, plugin: str | None, options: Any, near: Path) -> Subject:
    """Find the component of this kind and name.

    Arguments:
        plugin: value of ``--plugin`` for its plugin; None: the plugin of the project around ``near`` that offers the
            component, or else the only installed plugin that does.
        options: the options object; None: the plugin's options with their defaults.
        near: the file of the test; relative paths and the project are found from it.

    Raises:
        PluginError: there is no such plugin or component, several plugins offer it, or the plugin is broken.
    """
    source = _offering(kind, component, near) if plugin is None else plugin_source(plugin, near=near)
    active = activate(source)
    if options is None:
        options = active.default_options()
    return Subject(active, active.component(kind, component), active.load(kind, component), options)


def find_component(kind: Kind, component: str, *, plugin: str) -> tuple[PluginIdentity, Any]:
    """Return the component's plugin and traits, without importing its code.

    Raises:
        PluginError: there is no such plugin or component, or the plugin is broken.
    """
    active = activate(plugin)
    return active.identity, active.component(kind, component).traits


def plugin_source(plugin: str, *, near: Path) -> PluginSource:
    """Find the plugin that ``--plugin`` would; a relative path may also start at the folder of ``near``.

    Raises:
        PluginError: there is no such plugin or file.
    """
    neighbour = near.parent / plugin
    return find_plugin(str(neighbour) if plugin.endswith(".py") and neighbour.is_file() else plugin)


def own_plugin(near: Path) -> PluginSource:
    """Return the only plugin of the project around ``near``.

    Raises:
        PluginError: the project declares none or several, or the plugin is not installed.
    """
    found = _project_plugins(near)
    if len(found) != 1:
        names = ", ".join(found) or "none that is installed"
        raise PluginError(f"the project around {near} declares these plugins: {names}.\nName one: plugin = 'NAME'.")
    return find_plugin(found[0])


def _offering(kind: Kind, component: str, near: Path) -> PluginSource:
    """Return the plugin that offers the component, from the project around ``near``, else from all installed."""
    own = _project_plugins(near)
    for among in (own, [plugin.name for plugin in installed() if plugin.name not in own]):
        found = [source for source in map(find_plugin, dict.fromkeys(among)) if _offers(source, kind, component)]
        if len(found) > 1:
            both = " and ".join(str(source.plugin) for source in found)
            raise PluginError(
                f"the {kind.words} {component!r} is offered by {both}.\nName one: plugin = {found[0].plugin.name!r}."
            )
        if found:
            return found[0]
    raise PluginError(
        f"no installed plugin offers a {kind.words} called {component!r}.\nInstall the package under test (pip install "
        "-e .), or say where the plugin is: plugin = 'NAME', './FILE.py' or 'PACKAGE.MODULE'."
    )


def _offers(source: PluginSource, kind: Kind, component: str) -> bool:
    try:
        return (kind, component) in activate(source).offers
    except PluginError:
        return False


def _project_plugins(near: Path) -> list[str]:
    """Return the installed plugins that the nearest ``pyproject.toml`` above ``near`` declares."""
    known = {plugin.name for plugin in installed()}
    for folder in _folders(near):
        if (folder / "pyproject.toml").is_file():
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
            return [name for name in project.get("entry-points", {}).get(PLUGIN_GROUP, {}) if name in known]
    return []


def _folders(near: Path) -> Iterator[Path]:
    yield from near.resolve().parents
