"""Looks up names that are not settings of the core: flags of Megatron or SGLang, and flags that a plugin explains or
accepts without effect.

Flags of engines become :class:`~slime_core.config.settings.Setting` objects, so that they are read, checked and
explained like settings of the core. SGLang's parser checks its flags before a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic.fields import FieldInfo

from slime_core.config.engines import MEGATRON_FLAGS, MegatronFlag, sglang_name
from slime_core.config.schema import RunConfig
from slime_core.config.section import Value
from slime_core.config.settings import InWords, Setting, core_settings, core_values

ENGINES: Mapping[str, str] = {"megatron": "Megatron", "sglang": "SGLang"}
"""Section -> the engine whose names it holds."""

_SGLANG = "sglang_"
_INSTEAD = re.compile(r"\bwrite --[a-z0-9-]+$")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a name is not accepted."""

    message: str

    def given(self, words: Sequence[str]) -> str:
        """Return the message; if it ends with the flag to write instead, append ``words``."""
        return " ".join([self.message, *words]) if _INSTEAD.search(self.message) else self.message


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """A flag that describes the model and has no effect.

    Arguments:
        check: called with the words after the flag and the object in the checkpoint's ``config.json``; returns a
            message if the flag does not describe the model, or None.
    """

    check: Callable[[Sequence[str], Mapping[str, Any]], str | None]


def find_flag(flag: str) -> tuple[Setting, bool] | Refusal | WithoutEffect | None:
    """Return the setting of ``--flag``, and whether the flag turns it off (``--no-flag``); None for unknown names."""
    if "_" in flag:
        return None
    name = flag.removeprefix("--").replace("-", "_")
    match _find(name, flag):
        case Setting() as setting:
            return setting, False
        case Refusal() | WithoutEffect() as result:
            return result
    off = megatron_settings().get(name.removeprefix("no_")) if name.startswith("no_") else None
    return (off, True) if off is not None and off.is_switch else None


def find_key(section: str, name: str) -> Setting | Refusal | None:
    """Return the setting ``name`` of the table ``[megatron]`` or ``[sglang]``; None for unknown names."""
    if section == "sglang":
        return _find_sglang(name, name)
    home = core_settings().get(name)
    if home is None and name.startswith("sglang_"):
        return Refusal(f"it belongs to [sglang], as {name.removeprefix('sglang_')}")
    result = Refusal(f"it belongs to [{home.section}]") if home else _find(name, name)
    if isinstance(result, WithoutEffect):
        return Refusal("it has no effect, and only a command line may have it; leave it out")
    return result


@cache
def megatron_settings() -> Mapping[str, Setting]:
    """Return the settings of ``[megatron]`` by name."""
    return {name: _of_megatron(name, flag) for name, flag in MEGATRON_FLAGS.items()}


def values_of(config: RunConfig) -> dict[str, tuple[Setting, Any]]:
    """Return key -> (setting, value): of the core in the order of ``schema``, then of engines' flags that are set."""
    of_core = core_values(config)
    values = {key: (setting, of_core[key]) for key, setting in core_settings().items()}
    for engine, section in {"megatron": config.megatron, "sglang": config.sglang}.items():
        for name, value in section.given:
            setting = megatron_settings()[name] if engine == "megatron" else _of_sglang(name)
            values[setting.key] = setting, value
    return values


def known_flags() -> list[str]:
    """Return the flags of Megatron and those with advice, to find the nearest to a misspelt one."""
    return [*flag_advice(), *("--" + name.replace("_", "-") for name in MEGATRON_FLAGS)]


def _find(name: str, shown: str) -> Setting | Refusal | WithoutEffect | None:
    advice = flag_advice().get("--" + name.replace("_", "-"))
    if advice is not None:
        return Refusal(advice) if isinstance(advice, str) else WithoutEffect(advice)
    if name.startswith(_SGLANG):
        return _find_sglang(name.removeprefix(_SGLANG), shown)
    return megatron_settings().get(name)


def _find_sglang(name: str, shown: str) -> Setting | Refusal:
    try:
        return _of_sglang(sglang_name(name))
    except ValueError as error:
        return Refusal(f"{shown}: {error}")


def _of_sglang(name: str) -> Setting:
    info = FieldInfo.from_annotation(_PASSED_ON)
    info.description, info.default = "Passed on to every engine; SGLang checks it.", "left to SGLang"
    return Setting("sglang", name, info, owner="engine")


def _of_megatron(name: str, flag: MegatronFlag) -> Setting:
    info = FieldInfo.from_annotation(flag.type)
    info.description, info.default = flag.text, "left to Megatron"
    info.metadata += flag.conditions
    return Setting("megatron", name, info, owner="engine")


_PASSED_ON: Any = Annotated[Value, InWords("what SGLang accepts: python -m sglang.launch_server --help")]


FlagAdvice = str | Callable[[Sequence[str], Mapping[str, Any]], str | None]
"""A message, or the check of a flag without effect."""

_ADVISERS: list[Callable[[], Mapping[str, FlagAdvice]]] = []


def use_advice(advisers: Iterable[Callable[[], Mapping[str, FlagAdvice]]]) -> None:
    """Set the functions of loaded plugins that explain unknown flags."""
    _ADVISERS[:] = advisers
    flag_advice.cache_clear()


@cache
def flag_advice() -> Mapping[str, FlagAdvice]:
    """Return flag -> advice of the loaded plugins; the first plugin's advice counts.

    A flag without effect has a function instead of a message; see :class:`WithoutEffect`. The functions of plugins are
    called only if a command line or a file has an unknown name.
    """
    advice: dict[str, FlagAdvice] = {}
    for adviser in _ADVISERS:
        for flag, message in adviser().items():
            advice.setdefault(flag, message)
    return advice
