"""Imports the code of one plugin, and of one component's target."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import reduce
from importlib.abc import InspectLoader
from types import CodeType, ModuleType
from typing import Any

from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Component
from slime_core.plugins.discovery import PluginIdentity, PluginSource, Source

__all__ = ["load_attribute", "load_plugin", "load_target"]


def load_plugin(source: PluginSource) -> Any:
    """The module or object that holds the plugin's hooks.

    Raises:
        PluginError: importing it failed; chained, naming distribution, version, entry point and the next step.
    """
    with boundary(source.plugin, "importing it", next_step=_next_step(source)):
        if source.source is Source.FILE:
            return _module_of_bytes(source)
        return load_attribute(source.plugin.entry_point)


def load_target(component: Component, plugin: PluginIdentity) -> Any:
    """What the component's ``target`` names.

    Raises:
        PluginError: the module or the attribute cannot be imported; chained, naming the plugin and the component.
    """
    step = f"Reinstall {plugin.distribution}, or report this to its author: the target is declared by the plugin."
    with boundary(plugin, f"importing {component.target} of component {component.name!r}", next_step=step):
        return load_attribute(component.target)


def load_attribute(path: str) -> Any:
    """What ``package.module:attribute`` names, or ``package.module``; whatever the import raises."""
    module, _, attribute = path.partition(":")
    loaded = importlib.import_module(module.strip())
    return reduce(getattr, attribute.strip().split("."), loaded) if attribute.strip() else loaded


def _next_step(source: PluginSource) -> str:
    if source.source is Source.INSTALLED:
        plugin = source.plugin
        return f"Reinstall {plugin.distribution} with what it depends on, or run without --plugin {plugin.name}."
    if source.source is Source.MODULE:
        return f"Correct {source.plugin.entry_point}, or the Python path that should lead to it."
    return f"Correct {source.plugin.distribution}; a single-file plugin imports installed packages, not its neighbours."


class _BytesLoader(InspectLoader):
    """Runs the module from bytes that travelled here; tracebacks show the path that they were read from."""

    def __init__(self, content: bytes, path: str) -> None:
        self._content = content
        self._path = path

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self._content)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._content, self._path, "exec", dont_inherit=True)

    def is_package(self, fullname: str) -> bool:
        return False


def _module_of_bytes(source: PluginSource) -> ModuleType:
    name = source.plugin.entry_point
    if name in sys.modules:  # the name is made from the bytes: same name, same code
        return sys.modules[name]
    spec = importlib.util.spec_from_loader(name, _BytesLoader(source.content, source.plugin.distribution))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
