"""Refuses what pluggy would accept in silence, so that a hook which never runs is an error and not a mystery.

Seven mistakes: a class registered in place of an instance, a forgotten ``@hookimpl``, another project's marker, a
misspelt hook, ``async def``, parameters that are never passed (keyword-only, ``*args``, ``**kwargs``), and parameters
with defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins import hooks
from slime_core.plugins.discovery import PluginIdentity, nearest

__all__ = ["check_hooks"]

_PREFIX = f"{hooks.PROJECT}_"
_MARKER = f"{hooks.PROJECT}_impl"
_HOOKS = frozenset(name for name in hooks.__all__ if name.startswith(_PREFIX))
_NEVER_PASSED = {
    inspect.Parameter.KEYWORD_ONLY: "keyword-only",
    inspect.Parameter.VAR_POSITIONAL: "variadic",
    inspect.Parameter.VAR_KEYWORD: "variadic",
}


def check_hooks(plugin: PluginIdentity, holder: Any) -> None:
    """Every hook that ``holder`` (a module or an instance) means to implement will be called.

    Raises:
        PluginError: one of the seven mistakes above, naming the plugin, the function and the correction.
    """
    if inspect.isclass(holder):
        raise PluginError(
            f"{plugin}: the entry point names the class {holder.__name__}; hooks of a class would be called without an "
            f"instance.\nPoint it at a module, or at an instance: {holder.__name__.lower()} = {holder.__name__}()."
        )
    for name, function in _functions(holder):
        mistake = _mistake(name, function)
        if mistake:
            raise PluginError(f"{plugin}: {name} {mistake}")


def _functions(holder: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions and methods of ``holder``, read without running properties."""
    for name in dir(holder):
        found = inspect.getattr_static(holder, name)
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        if inspect.isfunction(found) or inspect.ismethod(found):
            yield name, found


def _mistake(name: str, function: Callable[..., Any]) -> str | None:
    markers = _markers(function)
    if _MARKER not in markers:
        return _unmarked(name, markers)
    options = markers[_MARKER]
    hook = options["specname"] or name
    if hook not in _HOOKS:
        return f"implements no hook of slime{nearest(hook, _HOOKS)}.\nHooks are: {', '.join(sorted(_HOOKS))}."
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        when = "without await" if hook in hooks.LIFECYCLE_HOOKS else "once, at start"
        return f"is async; hooks are called {when}.\nWrite it with plain def; targets may be async."
    if options["wrapper"] or options["hookwrapper"]:
        return "is a hook wrapper; a plugin speaks for itself and sees nobody else's calls.\nUse plain @hookimpl."
    return _wrong_parameter(function, known=_parameters(hook))


def _unmarked(name: str, markers: dict[str, Any]) -> str | None:
    if not name.startswith(_PREFIX):
        return None
    if markers:
        return (
            f"carries the marker of another project ({', '.join(sorted(markers))}), so slime would never call it.\n"
            "Use the one from slime: from slime_core import hookimpl."
        )
    return "is not marked as a hook, so slime would never call it.\nPut @hookimpl above it, or rename it."


def _markers(function: Callable[..., Any]) -> dict[str, Any]:
    """The pluggy options that markers left on the function, by attribute name, such as ``pytest_impl``."""
    # pluggy keeps a marker's options in an attribute of the function itself, named after the marker's project.
    return {key: value for key, value in vars(function).items() if key.endswith("_impl") and isinstance(value, dict)}


def _parameters(hook: str) -> tuple[str, ...]:
    """What the hook passes; a declaration takes nothing."""
    return tuple(inspect.signature(vars(hooks)[hook]).parameters)


def _wrong_parameter(function: Callable[..., Any], *, known: tuple[str, ...]) -> str | None:
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    for parameter in parameters:
        if parameter.kind in _NEVER_PASSED:
            kind = _NEVER_PASSED[parameter.kind]
            return f"has the {kind} parameter {parameter.name!r}, which is never passed.\nRemove it."
        if parameter.default is not inspect.Parameter.empty:
            return f"gives parameter {parameter.name!r} a default, which hides whether it was passed.\nRemove it."
        if parameter.name not in known:
            takes = f"passes {', '.join(known)}{nearest(parameter.name, known)}" if known else "takes none"
            return f"has the parameter {parameter.name!r}; this hook {takes}.\nRemove it."
    return None
