"""Imports the module of a plugin, and the target of a component."""

from __future__ import annotations

import pkgutil
from typing import Any

from slime_core.plugins.discovery import Plugin, Source
from slime_core.plugins.registration import Component
from slime_core.user_code.failures import boundary
from slime_core.user_code.neighbours import module_of_bytes


def import_plugin(plugin: Plugin) -> object:
    """Import and return the module or object that holds the plugin's hooks.

    Raises:
        PluginError: the import failed; chained, naming the plugin and the next step.
    """
    with boundary(plugin, f"importing {plugin.module}", next_step=next_step(plugin), locate=True):
        if plugin.source is not Source.FILE:
            return load_attribute(plugin.module)
        neighbours = {name: (path, content) for name, path, content in plugin.neighbours}
        return module_of_bytes(plugin.module, plugin.content, path=plugin.distribution, neighbours=neighbours)


def load_target(component: Component, plugin: Plugin) -> Any:
    """Return the target of the component; imports it if it is a path.

    Raises:
        PluginError: the import failed; chained, naming the plugin and the component.
    """
    action = f"importing {component.place} of component {component.name!r}"
    with boundary(plugin, action, next_step=next_step(plugin), locate=True):
        return load_attribute(component.target) if isinstance(component.target, str) else component.target


def load_attribute(path: str) -> Any:
    """Import and return the object at ``package.module:attribute``, or the module ``package.module``."""
    return pkgutil.resolve_name(path if ":" in path else f"{path}:")


def next_step(plugin: Plugin) -> str:
    """Return the advice for code that cannot be imported."""
    if plugin.source is Source.FILE:
        return f"Correct {plugin.distribution}."
    if plugin.source is Source.MODULE:
        return f"Correct {plugin.module}, or the Python path."
    return (
        f"Reinstall {plugin.distribution} with its dependencies, or correct its entry point {plugin.name} = "
        f"{plugin.module!r}. --no-plugin {plugin.name} runs without it."
    )
