"""Looks up names that are not settings of the core: flags of Megatron or SGLang, and flags for which an installed
distribution has advice, or which it accepts without effect.

The engines' names become :class:`~slime_core.config.settings.Setting` objects, so that flags and TOML are read, checked
and explained as for the core's own. The tables are read only when a name is looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic.fields import FieldInfo

from slime_core.config.engines import MEGATRON_FLAGS, owned, rows_by_name
from slime_core.config.schema import RunConfig
from slime_core.config.settings import InWords, Setting, core_settings, core_values
from slime_core.config.tables import Row, rows

ENGINES: Mapping[str, str] = {"megatron": "Megatron", "sglang": "SGLang"}
"""Section -> the engine whose names it holds."""

_SGLANG = "sglang_"
_INSTEAD = re.compile(r"\bwrite --[a-z0-9-]+$")
_MULTIPLES = {
    **{"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A name that is known but not accepted, with the reason."""

    message: str

    def given(self, words: Sequence[str]) -> str:
        """Return the message; if it ends with the flag to write instead, append ``words``."""
        return " ".join([self.message, *words]) if _INSTEAD.search(self.message) else self.message


@dataclass(frozen=True, slots=True)
class WithoutEffect:
    """A flag that is accepted but has no effect, provided that it is true of the model.

    Arguments:
        check: called with the words after the flag and the object in the checkpoint's ``config.json``; returns a
            message if the flag is not true of the model, else None.
    """

    check: Callable[[Sequence[str], Mapping[str, Any]], str | None]


def find_flag(flag: str) -> tuple[Setting, bool] | Refusal | WithoutEffect | None:
    """Find the setting of ``--flag``, and whether the flag turns it off (``--no-flag``); None: the name is unknown."""
    if "_" in flag:
        return None
    name = flag.removeprefix("--").replace("-", "_")
    match _find(name, flag):
        case Setting() as setting:
            return setting, False
        case Refusal() | WithoutEffect() as found:
            return found
    off = _find(positive, flag) if (positive := _positive(name)) else None
    return (off, True) if isinstance(off, Setting) and off.is_switch else None


def find_key(section: str, name: str) -> Setting | Refusal | None:
    """Find the setting of ``name`` in the table ``[megatron]`` or ``[sglang]``; None: that engine does not know it."""
    if section == "sglang":
        return _of_sglang(name, name)
    home = core_settings().get(name)
    if home is None and name.startswith("sglang_"):
        return Refusal(f"it belongs to [sglang], as {name.removeprefix('sglang_')}")
    found = Refusal(f"it belongs to [{home.section}]") if home else _find(name, name)
    if isinstance(found, WithoutEffect):
        return Refusal("no setting: a command line may have it, and it changes nothing; leave it out")
    return found


@cache
def engine_settings(section: str) -> Mapping[str, Setting]:
    """All settings that ``[megatron]`` or ``[sglang]`` may hold, by name."""
    names: Iterable[str] = MEGATRON_FLAGS if section == "megatron" else [row.name for row in rows_by_name().values()]
    found = {name: find_key(section, name) for name in names}
    return {name: setting for name, setting in found.items() if isinstance(setting, Setting)}


def values_of(config: RunConfig) -> dict[str, tuple[Setting, Any]]:
    """Return setting key -> (setting, value): the core's in the order of ``schema``, then those given for engines."""
    of_core = core_values(config)
    found = {key: (setting, of_core[key]) for key, setting in core_settings().items()}
    for engine, section in {"megatron": config.megatron, "sglang": config.sglang}.items():
        for name, value in section.given:
            setting = engine_settings(engine)[name]
            found[setting.key] = setting, value
    return found


def known_flags() -> list[str]:
    """Return every flag that :func:`find_flag` knows, to find the nearest to a misspelt one."""
    engines = [*MEGATRON_FLAGS, *(_SGLANG + name for name in rows_by_name())]
    return [*flag_advice(), *("--" + name.replace("_", "-") for name in engines)]


def _find(name: str, shown: str) -> Setting | Refusal | WithoutEffect | None:
    advice = flag_advice().get("--" + name.replace("_", "-"))
    if advice is not None:
        return Refusal(advice) if isinstance(advice, str) else WithoutEffect(advice)
    if name.startswith(_SGLANG):
        return _of_sglang(name.removeprefix(_SGLANG), shown)
    return _of_megatron(name, shown)


def _positive(name: str) -> str | None:
    """The switch that ``--no-NAME`` or ``--sglang-no-NAME`` turns off."""
    for off in ("no_", f"{_SGLANG}no_"):
        if name.startswith(off):
            return off.removesuffix("no_") + name.removeprefix(off)
    return None


def _of_sglang(name: str, shown: str) -> Setting | Refusal | None:
    if name in owned():
        return Refusal(f"{shown}: not passed on to SGLang: {owned()[name]}")
    row = rows_by_name().get(name)
    if row is None:
        return None
    default = f"left to SGLang, whose own is {row.default}" if row.default else "left to SGLang"
    info = _info(row.type, row.choices, "Passed on to every engine as it is.", default)
    return Setting("sglang", row.name, info, owner="engine")


def _of_megatron(name: str, shown: str) -> Setting | Refusal | None:
    flag, fields = MEGATRON_FLAGS.get(name), {row.name: row for row in rows("megatron-core")}
    if flag is None:
        return Refusal(f"{shown}: not passed on to Megatron: {_UNTRIED}") if name in fields else None
    row = fields.get(name, SWITCH)
    info = _info(row.type, row.choices if flag.choices is None else flag.choices, flag.text, "left to Megatron")
    info.metadata += flag.conditions
    return Setting("megatron", name, info, owner="engine")


SWITCH = Row("", "bool")
"""A flag of Megatron's scripts whose name is not a field of a config."""

_UNTRIED = "the checkpoint or slime decides it, or no test shows that it takes effect with the layers built here"


def _info(kind: str, choices: tuple[str, ...], text: str, default: str) -> FieldInfo:
    one = _annotation(kind.rstrip("*"), choices)
    many: Any = tuple
    annotation = many[one, ...] if kind.endswith("*") else one
    info = FieldInfo.from_annotation(annotation)
    info.description, info.default = text, default
    return info


def _annotation(kind: str, choices: tuple[str, ...]) -> Any:
    literal: Any = Literal
    if choices and kind == "int":
        return Annotated[int, AfterValidator(partial(_chosen, choices)), InWords(f"one of {', '.join(choices)}")]
    if choices:
        return literal[choices]
    return {"bool": bool, "int": int, "float": float, "str": str, "size": _SIZE, "json": _JSON}[kind]


def _chosen(choices: tuple[str, ...], value: int) -> int:
    if str(value) not in choices:
        raise ValueError(f"{value} is none of {choices}")
    return value


def _whole_number(value: object) -> object:
    """25600 for ``"25.6k"``, as SGLang reads it; anything else unchanged."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT])|(\d+)([KMGT]i)", value) if isinstance(value, str) else None
    if found is None:
        return value
    digits, multiple = (part for part in found.groups() if part)
    return int(Decimal(digits) * _MULTIPLES[multiple])


def _json_text(value: str) -> str:
    json.loads(value)
    return value


_SIZE = Annotated[int, BeforeValidator(_whole_number), InWords("a whole number, or one like 32k or 25.6k")]
_JSON = Annotated[str, AfterValidator(_json_text), InWords("JSON")]


FlagAdvice = str | Callable[[Sequence[str], Mapping[str, Any]], str | None]
"""A message, or the check of a flag without effect."""

_ADVISERS: list[Callable[[], Mapping[str, FlagAdvice]]] = []


def use_advice(advisers: Iterable[Callable[[], Mapping[str, FlagAdvice]]]) -> None:
    """Set the functions of loaded plugins that explain unknown flags."""
    _ADVISERS[:] = advisers
    flag_advice.cache_clear()


@cache
def flag_advice() -> Mapping[str, FlagAdvice]:
    """Return flag -> the message for a user who writes it, of all loaded plugins. The first plugin's message counts.

    A flag that is accepted but has no effect maps to a function instead; see :class:`WithoutEffect`. The functions of
    plugins are called only if a command line or a file has an unknown name.
    """
    advice: dict[str, FlagAdvice] = {}
    for adviser in _ADVISERS:
        for flag, message in adviser().items():
            advice.setdefault(flag, message)
    return advice
