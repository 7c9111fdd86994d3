"""Refuses mistakes in a plugin's hooks that pluggy accepts silently, and return values that the core cannot use.

Ten mistakes in hooks: a class registered in place of an instance, an attribute that is no function, a forgotten
``@hookimpl``, another project's marker, a misspelt hook, ``async def`` where the hook is not awaited and plain ``def``
where it is, a lifecycle hook with ``yield``, parameters that are never passed (positional-only, keyword-only,
``*args``, ``**kwargs``), and parameters with defaults.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.settings import Setting, Unacceptable
from slime_core.errors import PluginError
from slime_core.plugins import hooks
from slime_core.plugins.boundary import boundary
from slime_core.plugins.component import Component, Kind
from slime_core.plugins.discovery import PluginIdentity, similar

__all__ = [
    "check_hooks",
    "checked_components",
    "checked_options",
    "checked_presets",
]


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
        return f"implements no hook of slime{similar(hook, _HOOKS)}.\nHooks are: {', '.join(sorted(_HOOKS))}."
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
            takes = f"passes {', '.join(known)}{similar(parameter.name, known)}" if known else "takes none"
            return f"has the parameter {parameter.name!r}; this hook {takes}.\nRemove it."
    return None


_CHOOSES_CODE: Final = frozenset(
    {"plugins", "no_plugins", "locked", "lock_file", "allow_plugin_change", "load", "hf_checkpoint"}
)
"""Settings that say which code and weights a run loads, and are read before plugins are or instead of them."""

_PLAIN: Final = (bool, int, float, str, Path)
_HELD: Final = "true or false, numbers, text, paths, choices of these, and tuples, lists and tables of these"


def checked_components(kind: Kind, found: Any) -> list[Component]:
    """What a registration hook of ``kind`` returned or yielded, traits filled in.

    Raises:
        TypeError: it is no series of components whose traits fit ``kind``.
    """
    if isinstance(found, Component):
        raise TypeError("it returned one Component; yield it, or return a list")
    if found is None:
        raise TypeError("it returned None; yield Components")
    return [_checked_component(kind, component) for component in found]


def checked_presets(presets: Any) -> Mapping[str, object]:
    """What ``slime_presets`` returned.

    Raises:
        TypeError, ValueError: it is no mapping from names of settings, or one of them chooses what code runs.
    """
    if not isinstance(presets, Mapping):
        raise TypeError(f"it returned {presets!r}; return a dict from flag names to values")
    wrong = [key for key in presets if not (isinstance(key, str) and key.isidentifier())]
    if wrong:
        raise ValueError(f"the keys {wrong} are no flag names; write them with underscores: 'advantage_estimator'")
    refused = sorted(_CHOOSES_CODE & presets.keys())
    if refused:
        raise ValueError(
            f"{', '.join(refused)} cannot be preset: which code and weights a run loads, only the run says"
        )
    return presets


def checked_options(options: Any) -> type[BaseModel]:
    """What ``slime_options`` returned.

    Raises:
        TypeError, ValueError: it is no frozen model, or a field of it lacks a default or help, has an alias, or cannot
            be written to a run's file of settings and read from there.
    """
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise TypeError(f"it returned {options!r}; return a subclass of slime_core.PluginOptions")
    if not options.model_config.get("frozen"):
        raise ValueError(f"{options.__name__} is not frozen; give it model_config = ConfigDict(frozen=True)")
    for name, info in options.model_fields.items():
        _check_field(f"{options.__name__}.{name}", name, info)
    return options


def _checked_component(kind: Kind, component: Any) -> Component:
    if not isinstance(component, Component):
        raise TypeError(f"it yielded {component!r}; yield Component(name, target=...)")
    traits = kind.traits() if component.traits is None else component.traits
    if not isinstance(traits, kind.traits):
        found = f"component {component.name!r} carries {type(traits).__name__}"
        raise TypeError(f"{found}; a {kind.words} carries {kind.traits.__name__}")
    return replace(component, traits=traits)


def _check_field(field: str, name: str, info: FieldInfo) -> None:
    if info.is_required() or not info.description:
        raise ValueError(f"{field} needs a default and help: Field(0.1, description='...')")
    if any((info.alias, info.validation_alias, info.serialization_alias)) or not name.isascii():
        raise ValueError(
            f"{field} has an alias or letters beyond a to z; a setting has the one name that files can hold"
        )
    kinds = _alternatives(info.annotation)
    refused = [kind for kind in kinds if kind is not NoneType and not _is_held(kind)]
    if refused:
        raise ValueError(f"{field} is of type {_called(refused[0])}, which config.toml cannot hold; accepted: {_HELD}")
    if info.get_default(call_default_factory=True) is not None:
        _check_default(field, Setting("plugin", name, info, owner="plugin"))


def _check_default(field: str, setting: Setting) -> None:
    try:
        written = json.loads(json.dumps(setting.default, default=_path_text))
        setting.read_toml(written, base=Path())
    except (TypeError, Unacceptable) as mistake:
        raise ValueError(
            f"{field} has the default {setting.default!r}, which config.toml cannot hold: {mistake}"
        ) from None


def _path_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"found {type(value).__name__}; accepted: {_HELD}")


def _alternatives(annotation: Any) -> Iterable[Any]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_held(annotation: Any) -> bool:
    """Whether TOML can hold every value of the annotation; None, which it has no word for, stands outermost only."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return all(type(value) in (bool, int, str) for value in arguments)
    if origin is Annotated:
        return _is_held(arguments[0])
    if origin in (Union, UnionType, tuple, list, dict):
        return all(entry is Ellipsis or _is_held(entry) for entry in arguments)
    return annotation in _PLAIN or (isinstance(annotation, type) and issubclass(annotation, StrEnum))


def _called(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
