"""Refuses what pluggy would accept in silence, so that a hook which never runs is an error and not a mystery.

Ten mistakes: a class registered in place of an instance, something else than a function where a hook should be, a
forgotten ``@hookimpl``, another project's marker, a misspelt hook, ``async def`` where a hook is not awaited and plain
``def`` where it is, a lifecycle hook with ``yield``,
parameters that are never passed (positional-only, keyword-only, ``*args``, ``**kwargs``), and parameters with defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from slime_core.errors import PluginError
from slime_core.plugins import hooks
from slime_core.plugins.boundary import boundary
from slime_core.plugins.discovery import PluginIdentity, nearest

__all__ = ["check_hooks"]

_PREFIX = f"{hooks.PROJECT}_"
_MARKER = f"{hooks.PROJECT}_impl"
_HOOKS = frozenset(name for name in hooks.__all__ if name.startswith(_PREFIX))
_NEVER_PASSED = {
    inspect.Parameter.POSITIONAL_ONLY: "positional-only",
    inspect.Parameter.KEYWORD_ONLY: "keyword-only",
    inspect.Parameter.VAR_POSITIONAL: "variadic",
    inspect.Parameter.VAR_KEYWORD: "variadic",
}


def check_hooks(plugin: PluginIdentity, holder: Any) -> None:
    """Every hook that ``holder`` (a module or an instance) means to implement will be called.

    Raises:
        PluginError: one of the ten mistakes above, naming the plugin, the function and the correction; or looking at
            ``holder`` raised.
    """
    with boundary(plugin, "looking for its hooks"):
        mistake = next(_mistakes(holder), None)
    if mistake is not None:
        raise PluginError(f"{plugin}: {mistake}")


def _mistakes(holder: Any) -> Iterator[str]:
    if inspect.isclass(holder):
        yield (
            f"the entry point names the class {holder.__name__}; hooks of a class would be called without an "
            f"instance.\nPoint it at a module, or at an instance: {holder.__name__.lower()} = {holder.__name__}()."
        )
    for name in dir(holder):
        found = _unwrapped(inspect.getattr_static(holder, name, None))
        is_function = inspect.isfunction(found) or inspect.ismethod(found)
        mistake = _mistake(name, found) if is_function else _no_function(name, found)
        if mistake:
            yield f"{name} {mistake}"


def _unwrapped(found: Any) -> Any:
    """The function in a static or class method, read without running properties."""
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _no_function(name: str, found: Any) -> str | None:
    """What is wrong with an attribute that is no function: nothing, unless it looks like a hook."""
    is_marked = isinstance(inspect.getattr_static(found, _MARKER, None), dict)
    is_named = name.startswith(_PREFIX) and not inspect.ismodule(found)
    if not (is_marked or is_named):
        return None
    return (
        f"is of type {type(found).__name__}, not a function, so slime would never call it.\n"
        "Write a plain function with @hookimpl above it, without a decorator that makes an object of it, or rename it."
    )


def _mistake(name: str, function: Callable[..., Any]) -> str | None:
    markers = _markers(function)
    if _MARKER not in markers:
        return _unmarked(name, markers)
    options = markers[_MARKER]
    hook = options["specname"] or name
    if hook not in _HOOKS:
        return f"implements no hook of slime{nearest(hook, _HOOKS)}.\nHooks are: {', '.join(sorted(_HOOKS))}."
    lifecycle = hooks.LIFECYCLE_HOOKS.get(hook)
    if lifecycle is not None and lifecycle.is_async and not inspect.iscoroutinefunction(function):
        return "is not async; this hook is awaited.\nWrite it with async def, and return."
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    if is_async and not (lifecycle is not None and lifecycle.is_async):
        when = "without await" if lifecycle is not None else "once, at start"
        return f"is async; hooks are called {when}.\nWrite it with plain def; targets may be async."
    if options["wrapper"] or options["hookwrapper"]:
        return "is a hook wrapper; a plugin speaks for itself and sees nobody else's calls.\nUse plain @hookimpl."
    if hook in hooks.LIFECYCLE_HOOKS and inspect.isgeneratorfunction(function):
        return "has a yield, so calling it would run none of it.\nWrite it without yield."
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
            step = "Remove the slash after it" if kind == "positional-only" else "Remove it"
            return f"has the {kind} parameter {parameter.name!r}, which is never passed.\n{step}."
        if parameter.default is not inspect.Parameter.empty:
            return f"gives parameter {parameter.name!r} a default, which hides whether it was passed.\nRemove it."
        if parameter.name not in known:
            takes = f"passes {', '.join(known)}{nearest(parameter.name, known)}" if known else "takes none"
            return f"has the parameter {parameter.name!r}; this hook {takes}.\nRemove it."
    return None
