"""Finds and imports functions that options name by path.

Forms of a path: ``package.module.function``, ``package.module:function``, ``file.py:function``, and ``file.py`` or
``package.module:`` if one function of the module fits. A file is sent to other processes as bytes, with the modules of
its folder that it imports.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.activation import ActivePlugins
from slime_core.plugins.discovery import Plugin, Source, local_file, read_code
from slime_core.plugins.loading import import_plugin
from slime_core.user_code.failures import boundary
from slime_core.user_code.neighbours import find_neighbours

Code = Mapping[str, Mapping[str, Sequence["FunctionSource"]]]
"""Plugin -> option -> the functions that the option names by path."""

FORMS = "package.module.function, package.module:function, file.py:function, or file.py with one function that fits"


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """The place of a function. The driver makes it, and the process that runs the function loads it.

    Example: ``--custom-rm-path mine.py:reward`` is ``FunctionSource("custom_rm_path", "mine.py:reward", <the bytes of
    mine.py>, "reward")``.

    Arguments:
        setting: which setting names it.
        path: the path as the user wrote it.
        code: the module or the file, under the name of the setting.
        attribute: the function's name. None means the only function of the module that fits.
    """

    setting: str
    path: str
    code: Plugin
    attribute: str | None = None

    @property
    def content(self) -> bytes | None:
        """The bytes of the function's file. None if the function is in an importable module."""
        return self.code.content if self.code.source is Source.FILE else None

    @property
    def neighbours(self) -> dict[str, Plugin]:
        """The modules that the file imports from its folder, by dotted name."""
        files = self.code.neighbours
        return {name: local_file(content, path=path, name=self.setting) for name, path, content in files}

    @property
    def modules(self) -> tuple[Plugin, ...]:
        """The module of the function, and the modules next to it that it imports."""
        return (self.code, *self.neighbours.values())

    def __str__(self) -> str:
        return f"--{self.setting.replace('_', '-')} {self.path}"


def find_function(path: str, *, setting: str) -> FunctionSource:
    """Find the function at ``path``; imports nothing.

    Raises:
        PluginError: the file or the package does not exist, or ``path`` has no known form.
    """
    flag = f"--{setting.replace('_', '-')} {path}"
    module, colon, attribute = path.partition(":")
    if module.endswith(".py"):
        file = str(Path(module))
        code = local_file(read_code(Path(file), flag=flag), path=file, name=setting)
        with boundary(flag, "reading the modules next to it", next_step="Make them readable."):
            neighbours = find_neighbours(Path(file), code.content)
        code = replace(code, neighbours=tuple((name, *neighbours[name]) for name in sorted(neighbours)))
        return FunctionSource(setting, path, code, attribute or None)
    if not colon:
        module, _, attribute = path.rpartition(".")
    names = [*module.split("."), *([attribute] if attribute else [])]
    if not module or not all(name.isidentifier() for name in names):
        raise PluginError(f"{flag}: this is not a path of a function; accepted: {FORMS}.")
    package = module.partition(".")[0]
    # Only this process can import __main__.
    if package == "__main__" or importlib.util.find_spec(package) is None:
        raise PluginError(f"{flag}: there is no package {package!r} here. Install it, or give the file: {FORMS}.")
    code = Plugin(setting, f"module {module}", "(local)", module, Source.MODULE)
    return FunctionSource(setting, path, code, attribute or None)


def with_functions(active: ActivePlugins) -> ActivePlugins:
    """Return the plugins with the functions that options name by path; raises as :func:`find_function`."""
    sources: dict[str, dict[str, list[FunctionSource]]] = {}
    for code in active.uses.code if active.uses else ():
        source = find_function(code.path, setting=code.flag.removeprefix("--").replace("-", "_"))
        sources.setdefault(code.plugin, {}).setdefault(code.option, []).append(source)
    return replace(active, functions=sources)


def load_function(source: FunctionSource, *, fits: Callable[[object], bool] = callable) -> object:
    """Import the module and return what ``source`` names.

    Arguments:
        fits: selects among the functions and classes that the module defines, if the path names no attribute.

    Raises:
        PluginError: the import failed, the name is not there, or not exactly one thing fits.
    """
    module = import_plugin(source.code)
    if source.attribute is not None:
        with boundary(source, f"looking up {source.attribute!r}", next_step=f"Accepted are {FORMS}."):
            return getattr(module, source.attribute)
    fitting = {name: value for name, value in own_definitions(source).items() if fits(value)}
    if len(fitting) != 1:
        names = ", ".join(sorted(fitting)) or "none"
        raise PluginError(f"{source}: exactly one function must fit; these do: {names}. Write {source.path}:NAME.")
    return next(iter(fitting.values()))


def own_definitions(source: FunctionSource) -> dict[str, object]:
    """Import the module of ``source``; return the public functions and classes that it defines, by name.

    Raises:
        PluginError: the import failed.
    """
    module: Any = import_plugin(source.code)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in public.items()
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__
    }
