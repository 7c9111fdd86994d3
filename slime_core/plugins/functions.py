"""A function or class that a run names by its path, in place of a component: where its code is, and how to import it.

Forms: ``package.module.function`` and ``package.module:function``; ``file.py:function``; and ``file.py`` or
``package.module:`` for a module in which only one thing fits. A file travels as bytes, like a single-file plugin.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins.boundary import boundary
from slime_core.plugins.discovery import PluginIdentity, PluginSource, Source, local_file, read_code
from slime_core.plugins.loading import load_plugin

__all__ = ["FunctionSource", "find_function", "load_function", "own_definitions"]

FORMS = "package.module.function, package.module:function, file.py:function, or file.py with one function that fits"


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """Where a function is; made on the driver, loaded where it runs.

    Example: ``--custom-rm-path mine.py:reward`` is ``FunctionSource("custom_rm_path", "mine.py:reward", <the bytes of
    mine.py>, "reward")``.

    Arguments:
        setting: which setting names it.
        path: as it was written.
        code: the module or the bytes of the file; its ``plugin.name`` is ``setting``.
        attribute: the function's name; None: whatever in the module fits.
    """

    setting: str
    path: str
    code: PluginSource
    attribute: str | None = None

    @property
    def content(self) -> bytes | None:
        """The bytes of the file that the function is in; None: it is in an importable module."""
        return self.code.content if self.code.source is Source.FILE else None

    def __str__(self) -> str:
        return f"--{self.setting.replace('_', '-')} {self.path}"


def find_function(path: str, *, setting: str) -> FunctionSource:
    """Where ``path`` leads; imports nothing.

    Raises:
        PluginError: the file or the package does not exist, or ``path`` has no known form.
    """
    flag = f"--{setting.replace('_', '-')} {path}"
    module, colon, attribute = path.partition(":")
    if module.endswith(".py"):
        return FunctionSource(setting, path, _file(Path(module), setting, flag), attribute or None)
    if not colon:
        module, _, attribute = path.rpartition(".")
    names = [*module.split("."), *([attribute] if attribute else [])]
    if not module or not all(name.isidentifier() for name in names):
        raise PluginError(f"{flag}: this is no path of a function; accepted are {FORMS}.")
    if not _is_importable(module.partition(".")[0]):
        raise PluginError(
            f"{flag}: there is no package {module.partition('.')[0]!r} here. Install it, or give the file: {FORMS}."
        )
    identity = PluginIdentity(setting, f"module {module}", "(local)", module)
    return FunctionSource(setting, path, PluginSource(identity, Source.MODULE), attribute or None)


def load_function(source: FunctionSource, *, fits: Callable[[object], bool] = callable) -> object:
    """Import the module and return what ``source`` names.

    Arguments:
        fits: where the path names no attribute: which of the functions and classes that the module itself defines.

    Raises:
        PluginError: the import failed, the name is not there, or not exactly one thing fits.
    """
    module = load_plugin(source.code)
    if source.attribute is not None:
        with boundary(source, f"looking up {source.attribute!r}", next_step=f"Accepted are {FORMS}."):
            found: object = getattr(module, source.attribute)
            return found
    fitting = {name: value for name, value in own_definitions(source).items() if fits(value)}
    if len(fitting) != 1:
        names = ", ".join(sorted(fitting)) or "none"
        raise PluginError(f"{source}: exactly one function there has to fit; found {names}. Write {source.path}:NAME.")
    return next(iter(fitting.values()))


def own_definitions(source: FunctionSource) -> dict[str, object]:
    """The public functions and classes that the module of ``source`` itself defines, by name; imports it.

    Raises:
        PluginError: the import failed.
    """
    module = load_plugin(source.code)
    return {name: value for name, value in vars(module).items() if _is_own(name, value, module)}


def _is_own(name: str, value: Any, module: Any) -> bool:
    defined = inspect.isfunction(value) or inspect.isclass(value)
    return defined and not name.startswith("_") and value.__module__ == module.__name__


def _is_importable(package: str) -> bool:
    # The program that runs is a package of its own here, found or not as it was started; no other process imports it.
    return package != "__main__" and importlib.util.find_spec(package) is not None


def _file(path: Path, setting: str, flag: str) -> PluginSource:
    source = local_file(read_code(path, flag=flag), path=str(path))
    identity = PluginIdentity(setting, str(path), source.plugin.version, source.plugin.entry_point)
    return PluginSource(identity, Source.FILE, source.content)
