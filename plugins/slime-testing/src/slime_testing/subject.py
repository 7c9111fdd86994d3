"""Finds the plugin under test as a run does: by the name of the plugin, file or module, or by the component."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core import RunView
from slime_core.errors import PluginError
from slime_testing.harness import (
    GROUP,
    ActivePlugin,
    Component,
    Kind,
    Plugin,
    activate,
    default_run_view,
    find_plugin,
    installed_plugins,
    owner_of,
)

__all__ = ["Subject", "default_run", "find", "named_plugin", "plugin_of_project"]


@dataclass(frozen=True, slots=True)
class Subject:
    """The component under test.

    Arguments:
        active: its plugin, loaded.
        component: the component.
        options: an instance of the plugin's options class; None if the plugin has none.
    """

    active: ActivePlugin
    component: Component
    options: Any


def default_run(subject: Subject) -> RunView:
    """Return the view of a run of the built-in model with every setting at its default."""
    return default_run_view({} if subject.options is None else {subject.active.plugin.name: subject.options})


def find(kind: Kind, component: str, *, plugin: str | Plugin | None, options: Any, near: Path) -> Subject:
    """Find the component of this kind and name.

    Arguments:
        plugin: its plugin, or a word of ``--plugin``; None means the installed plugin that offers the component;
            of several, that of the project around ``near``.
        options: the options object; None means the plugin's options with their defaults.
        near: the file of the test; relative paths and the project are found from it.

    Raises:
        PluginError: there is no such plugin or component, several plugins offer it, or the plugin is broken.
    """
    if plugin is None:
        plugin = owner_of(kind, component, prefer=_plugins_of_project(near))
    active = activate(named_plugin(plugin, near=near))
    return Subject(active, active.component(kind, component), options or active.default_options())


def named_plugin(plugin: str | Plugin, *, near: Path) -> Plugin:
    """Return the plugin of ``--plugin``; a relative path may also start at the folder of ``near``.

    Raises:
        PluginError: there is no such plugin or file.
    """
    if isinstance(plugin, Plugin):
        return plugin
    neighbour = near.parent / plugin
    return find_plugin(str(neighbour) if plugin.endswith(".py") and neighbour.is_file() else plugin)


def plugin_of_project(near: Path) -> Plugin:
    """Return the only plugin of the project around ``near``.

    Raises:
        PluginError: the project declares none or several, or the plugin is not installed.
    """
    plugins = _plugins_of_project(near)
    if len(plugins) != 1:
        names = ", ".join(plugins) or "none that is installed"
        raise PluginError(f"the project around {near} declares these plugins: {names}.\nName one: plugin = 'NAME'.")
    return find_plugin(plugins[0])


def _plugins_of_project(near: Path) -> list[str]:
    """Return the installed plugins that the nearest ``pyproject.toml`` above ``near`` declares."""
    names = {plugin.name for plugin in installed_plugins()}
    projects = (folder / "pyproject.toml" for folder in near.resolve().parents)
    project = next((path for path in projects if path.is_file()), None)
    if project is None:
        return []
    declared = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
    return [name for name in declared.get(GROUP, {}) if name in names]
