"""Whether what a hook returned is what the core can use; every mistake here is raised inside the plugin's boundary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slime_core.config.settings import Setting, Unacceptable
from slime_core.plugins.component import Component, Kind

__all__ = ["checked_components", "checked_options", "checked_presets"]

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
    return [_checked(kind, component) for component in found]


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


def _checked(kind: Kind, component: Any) -> Component:
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
