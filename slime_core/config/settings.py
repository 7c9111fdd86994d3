"""One setting: its names, what it accepts, and how a value is read from a flag or from TOML.

The settings of the core come from ``schema``; those of a plugin from its options class, as ``--grpo.std-normalization``
and ``[grpo] std_normalization``, or with a flag of their own. Both are read by the same code.

What a setting accepts, and what its value is, is also put into words and into TOML here: for messages, help and files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from slime_core.config.options import Flag, NamesCode, NamesPrompts, Part, Provides
from slime_core.config.schema import RunConfig
from slime_core.config.secrets import without_secret
from slime_core.config.section import REJECTED, EngineSection, Value
from slime_core.errors import PluginError
from slime_core.untrusted import parse_json, parse_toml

T = TypeVar("T")

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}
_BOUNDS = {Ge: "of at least", Gt: "greater than", Le: "at most", Lt: "less than"}


@dataclass(frozen=True, slots=True)
class InWords:
    """Says what a type of our own accepts; stands in the metadata of its annotation."""

    text: str


def accepted_words(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """The annotation in words; empty for types that have none here."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if in_words := [entry.text for entry in metadata if isinstance(entry, InWords)]:
        return in_words[0]
    if origin is Annotated:
        return accepted_words(arguments[0], _flat(arguments[1:]))
    if origin in (Union, UnionType):
        return " or ".join(["none" if kind is NoneType else accepted_words(kind, metadata) for kind in arguments])
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple and get_origin(arguments[0]) is tuple:
        pair = [accepted_words(kind).replace("text", "a name") for kind in get_args(arguments[0])]
        return f"pairs of {' and '.join(pair)}, or none"
    if origin is tuple and is_table(arguments[0]):
        return f"tables with {', '.join(arguments[0].model_fields)}; as a flag each a table of TOML or JSON"
    if origin is tuple:
        return f"any number of values, each {accepted_words(arguments[0])}"
    match _flat(metadata):
        case [Ge(ge=int(low)), Le(le=int(high))] if low == high:
            return str(low)
    return " ".join(filter(None, [_WORDS.get(annotation, ""), _bounds(metadata)]))


def placeholder_of(annotation: Any) -> str:
    """The placeholder of a value in help, such as ``N`` for a number; empty for a switch."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return placeholder_of(arguments[0])
    if origin in (Union, UnionType):
        return placeholder_of(next(kind for kind in arguments if kind is not NoneType))
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        if is_table(arguments[0]):
            return "TABLE ..."
        pair = get_args(arguments[0]) if get_origin(arguments[0]) is tuple else ()
        return " ".join([*map(placeholder_of, pair or arguments[:1]), "..."]).replace("NAME PATH", "NAME FILE")
    return {bool: "", int: "N", float: "X", Path: "PATH"}.get(annotation, "NAME")


def is_table(annotation: Any) -> bool:
    """Whether a value of it is written as a table."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bounds(metadata: Sequence[object]) -> str:
    found = []
    for entry in _flat(metadata):
        match entry:
            case Ge(ge=limit) | Gt(gt=limit) | Le(le=limit) | Lt(lt=limit):
                found.append(f"{_BOUNDS[type(entry)]} {limit}")
    return " and ".join(found)


def _flat(metadata: Sequence[object]) -> list[object]:
    return [entry for item in metadata for entry in (item.metadata if isinstance(item, FieldInfo) else [item])]


def as_toml(value: object) -> str:
    """A value as TOML writes it; tables without what is at its default.

    Raises:
        PluginError: TOML has no such value; the core's own settings can all be written.
    """
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            # TOML's basic strings are JSON's, but for one control character.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(as_toml, value))}]"
        case BaseModel():
            return as_toml({name: entry for name, entry in value if entry != type(value).model_fields[name].default})
        case dict():
            return f"{{ {', '.join(f'{as_toml(key)} = {as_toml(entry)}' for key, entry in value.items())} }}"
    raise PluginError(
        f"a setting of type {type(value).__name__} cannot be written to config.toml. Report it to the plugin's author; "
        "accepted: numbers, text, paths, switches, lists and tables of them."
    )


def as_words(value: Any) -> str:
    """The value as one would write it after its flag; of an address with a secret in it, what may be shown."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case tuple():
            return " ".join(map(as_words, value)) or "(empty)"
        case float():
            short = f"{value:g}"
            return short if float(short) == value else repr(value)
        case BaseModel():
            return as_toml(value)
        case str():
            return without_secret(value)
    return str(value)


_PLUGINS = "plugins"
_OWN_FLAGS = {_PLUGINS: "--plugin", "no_plugins": "--no-plugin"}
"""Flags that name one at a time, of settings that hold several."""

_NO_NAMES = {
    "apply_chat_template_kwargs": "JSON",
    "freeze_params_name_list": "REGEX ...",
    "multimodal_keys": "JSON",
    "only_train_params_name_list": "REGEX ...",
    "ray_address": "ADDRESS",
    "rollout_external_engine_addrs": "HOST:PORT ...",
    "rollout_stop": "TEXT ...",
    "sglang_router_ip": "HOST",
}
"""The placeholder in help of text that names no component, field or file."""


MOST_OF_NAME, MOST_OF_PATH = 255, 4000
"""Bytes of a file's name, as file systems have it, and of a path: Linux has 4096, and names of files are appended."""

SHOWN = 60
"""Characters of such a value that a message shows."""


class Unacceptable(ValueError):
    """A value is not one that the setting accepts; the message says what is."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a section, of a plugin's options class, or one flag of an engine.

    Example: ``Setting("optimizer", "lr", ...)`` has the flag ``--lr`` and the key ``lr``; the plugin's
    ``Setting("grpo", "std_normalization", ..., owner="plugin")`` has ``--grpo.std-normalization`` (where its annotation
    holds a ``Flag``, that one) and ``grpo.std_normalization``; the engine's ``Setting("sglang", "log_level", ...,
    owner="engine")`` has ``--sglang-log-level`` and ``sglang.log_level``. Megatron's flags stand on the command line
    without a prefix.
    """

    section: str
    name: str
    info: FieldInfo
    owner: Literal["core", "plugin", "engine"] = "core"

    @property
    def key(self) -> str:
        """Name in records of where values came from; unique in a run."""
        return self.name if self.owner == "core" else f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        if self.key in _OWN_FLAGS:
            return _OWN_FLAGS[self.key]
        if (own := self._own_flag) is not None:
            return own.name
        prefix = {"plugin": f"{self.section}.", "engine": "sglang-" if self.section == "sglang" else ""}
        return "--" + prefix.get(self.owner, "") + self.name.replace("_", "-")

    @property
    def old_section(self) -> str | None:
        """The section of files in which it stood before it belonged to a plugin; None: there is none."""
        return None if (own := self._own_flag) is None else own.section

    @property
    def names_prompts(self) -> bool:
        """Whether it is a plugin's, and its paths are prompt files."""
        return self.of_plugin and bool(self.notes(NamesPrompts))

    @property
    def provides(self) -> list[Part]:
        """Tasks that its plugin does in place of the core where it is set."""
        return [part for entry in self.notes(Provides) for part in entry.parts]

    def notes(self, kind: type[T]) -> list[T]:
        """The objects of ``kind``, a class of :mod:`slime_core.config.options`, in its annotation."""
        return [entry for entry in self.info.metadata if isinstance(entry, kind)]

    @property
    def _own_flag(self) -> Flag | None:
        return next(iter(self.notes(Flag)), None) if self.of_plugin else None

    @property
    def of_plugin(self) -> bool:
        """Whether a plugin's options class declares it."""
        return self.owner == "plugin"

    @property
    def default(self) -> Any:
        """Its value where nothing else says one."""
        return self.info.get_default(call_default_factory=True)

    @property
    def optional(self) -> bool:
        """Whether None, written ``none``, is a value."""
        return NoneType in get_args(self.info.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means true."""
        return self.info.annotation in (bool, bool | None)

    @property
    def is_sequence(self) -> bool:
        """Whether the flag takes several values and may be repeated."""
        return get_origin(self.info.annotation) is tuple

    @property
    def passes_on(self) -> bool:
        """Whether SGLang reads the value, so that any number of words is accepted."""
        return self.owner == "engine" and self.section == "sglang"

    @property
    def is_pairs(self) -> bool:
        """Whether its values come in pairs."""
        return self.is_sequence and get_origin(get_args(self.info.annotation)[0]) is tuple

    @property
    def is_tables(self) -> bool:
        """Whether its values are tables."""
        return self.is_sequence and is_table(get_args(self.info.annotation)[0])

    @property
    def accepts(self) -> str:
        """The accepted values, in words."""
        return accepted_words(self.info.annotation, self.info.metadata)

    @property
    def placeholder(self) -> str:
        """The placeholder of the value in help."""
        own = self._own_flag.value if self._own_flag is not None else None
        known = own or _NO_NAMES.get(self.name) or placeholder_of(self.info.annotation)
        return known.replace("NAME", "PATH") if self.name.endswith("_path") else known

    def read_flag(self, words: Sequence[str]) -> Any:
        """The value that the words after the flag mean; paths are relative to the working directory.

        Raises:
            Unacceptable: they mean none.
        """
        if list(words) == ["none"] and (self.optional or self.is_pairs or self.is_tables):
            return None if self.optional else ()
        if self.passes_on:
            return passed_on(words)
        if self.is_tables:
            return self.read_toml([_table(word) for word in words], base=Path())
        if self.is_pairs and len(words) % 2:
            count = f"{len(words)} value{'s' * (len(words) != 1)}"
            raise Unacceptable(f"found {count}, {' '.join(words)!r}; {self._accepted}")
        if self.is_switch:
            return self._switch(words)
        if "" in words and _names_paths(self.info.annotation):
            raise Unacceptable(f"found {' '.join(words)!r}; {self._accepted}")
        return self._read(self._shaped(words), found=repr(" ".join(words)))

    def read_toml(self, value: object, *, base: Path) -> Any:
        """The value that a TOML value means; paths are relative to ``base``, the folder of the file.

        Raises:
            Unacceptable: it means none; ``"5"`` is not a number and 1 is not true.
        """
        if self.optional and value == "none":
            return None
        if value == "" and _names_paths(self.info.annotation):
            raise Unacceptable(f"found ''; {self._accepted}")
        try:
            as_json = json.dumps(value)
        except TypeError:  # dates and times, which no setting takes
            raise Unacceptable(f"found {value}; {self._accepted}") from None
        try:
            return self._placed(_adapter(self).validate_json(as_json, strict=True), base)
        except ValidationError as error:
            raise self._unacceptable(json.dumps(value, ensure_ascii=False), error) from None

    def recorded(self, value: Any) -> Any:
        """``value`` as the ``config.toml`` of a run holds it: files of functions, and files that engines read, by their
        absolute paths, so that they are found again from another working directory."""
        if self.section in _OF_ENGINES:
            return _existing_paths(value)
        return _code_paths(value, Path()) if self.notes(NamesCode) else value

    def read_python(self, value: object) -> Any:
        """The value that a plugin's preset means.

        Raises:
            Unacceptable: it means none.
        """
        return self._read(value, found=repr(value))

    def _switch(self, words: Sequence[str]) -> bool:
        known = {(): True, ("true",): True, ("false",): False}
        if tuple(words) not in known:
            raise Unacceptable(f"found {' '.join(words)!r}; {self._accepted}")
        return known[tuple(words)]

    def _shaped(self, words: Sequence[str]) -> object:
        if self.is_pairs:
            return list(zip(words[::2], words[1::2], strict=True))
        return list(words) if self.is_sequence else words[0]

    def _read(self, value: object, *, found: str) -> Any:
        try:
            return self._placed(_adapter(self).validate_python(value), Path())
        except ValidationError as error:
            raise self._unacceptable(found, error) from None

    def _placed(self, value: Any, base: Path) -> Any:
        if self.key == _PLUGINS:
            return tuple(str(_absolute(Path(name), base)) if name.endswith(".py") else name for name in value)
        if self.notes(NamesCode) and base != Path():
            return _code_paths(value, base)
        return anchored(value, base)

    def _unacceptable(self, found: str, error: ValidationError) -> Unacceptable:
        problems = error.errors()
        # What a validator of a plugin says stands in its ValueError.
        own = [str(one["ctx"]["error"]) for one in problems if one["type"] == "value_error" and self.of_plugin]
        if complete := [*(one["msg"] for one in problems if one["type"] == REJECTED), *own]:
            return Unacceptable("; ".join(complete))
        if self.is_tables:
            return Unacceptable("; ".join([*map(_table_mistake, problems), self._accepted]))
        # Of a plugin's own type only pydantic can say what it accepts.
        return Unacceptable(f"found {found}; {self._accepted if self.accepts else problems[0]['msg']}")

    @property
    def _accepted(self) -> str:
        return f"accepted: {self.accepts}"


@cache
def core_settings() -> Mapping[str, Setting]:
    """Every setting of the core by its name, in the order of ``schema``."""
    found: dict[str, Setting] = {}
    for section, holder in RunConfig.model_fields.items():
        kind: Any = holder.annotation
        if not issubclass(kind, EngineSection):  # its names are the engine's
            found |= {name: Setting(section, name, info) for name, info in kind.model_fields.items()}
    return found


def core_values(config: RunConfig) -> Mapping[str, Any]:
    """Setting name -> value of every setting of the core; read-only."""
    sections = (section for section in dict(config).values() if not isinstance(section, EngineSection))
    return MappingProxyType({name: value for section in sections for name, value in section})


def plugin_settings(options: Mapping[str, type[BaseModel]]) -> Mapping[str, Setting]:
    """Every setting of these plugins' options classes, by key (``grpo.std_normalization``)."""
    fields = ((plugin, name, info) for plugin, kind in options.items() for name, info in kind.model_fields.items())
    found = (Setting(plugin, name, info, owner="plugin") for plugin, name, info in fields)
    return {setting.key: setting for setting in found}


def _adapter(setting: Setting) -> TypeAdapter[Any]:
    annotated: Any = Annotated[setting.info.annotation, setting.info]
    return TypeAdapter(annotated)


def anchored(value: Any, base: Path) -> Any:
    """``value`` with every path in it absolute.

    Raises:
        Unacceptable: no file system takes a path.
    """
    if isinstance(value, Path):
        return _absolute(value, base)
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: anchored(entry, base) for name, entry in value})
    if isinstance(value, dict):
        return {name: anchored(entry, base) for name, entry in value.items()}
    return type(value)(anchored(entry, base) for entry in value) if isinstance(value, tuple | list) else value


_POSSIBLE = f"accepted: a path of at most {MOST_OF_PATH} bytes, in names of at most {MOST_OF_NAME}, without a NUL byte"


def _is_possible(path: Path) -> bool:
    """Whether a file system may hold it."""
    try:
        sizes = [len(os.fsencode(part)) for part in path.parts]
    except UnicodeEncodeError:  # half a character
        return False
    return "\0" not in f"{path}" and max(sizes, default=0) <= MOST_OF_NAME and sum(sizes) + len(sizes) <= MOST_OF_PATH


def _names_paths(annotation: Any) -> bool:
    """Whether a text of it may be a path; an empty one would be the working directory."""
    return annotation is Path or any(map(_names_paths, get_args(annotation)))


def _code_paths(value: Any, base: Path) -> Any:
    """One or several of ``file.py:function``, with the file's absolute path; modules as they are."""
    if isinstance(value, tuple | list):
        return tuple(_code_paths(one, base) for one in value)
    file, colon, function = (value or "").partition(":")
    return f"{_absolute(Path(file), base)}{colon}{function}" if file.endswith(".py") else value


_OF_ENGINES = ("sglang", "engine")
"""Sections with values that engines get as they stand, such as the file of ``--sglang-chat-template``."""


def _existing_paths(value: Any) -> Any:
    """``value``, in which a text that names a file or folder of the working directory is its absolute path. Only a text
    that looks like a path: SGLang has names of its own, such as ``chatml``."""
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _existing_paths(entry) for name, entry in value})
    if isinstance(value, tuple):
        return tuple(map(_existing_paths, value))
    is_path = isinstance(value, str) and ("/" in value or "." in value) and _is_possible(Path(value))
    return str(_absolute(Path(value), Path())) if is_path and os.path.exists(value) else value


def _absolute(path: Path, base: Path) -> Path:
    if not _is_possible(path):
        raise Unacceptable(f"found {str(path)[:SHOWN]!r}..., which no file system takes; {_POSSIBLE}")
    # abspath and not resolve: a checkpoint folder is often a link, and its own name is the one to show.
    return Path(os.path.abspath(base / os.path.expanduser(path)))


def _table(word: str) -> object:
    """The table in a word of a flag, as JSON or as TOML (``name = 'aime', path = 'aime.jsonl'``); else the word."""
    with suppress(ValueError):
        return parse_json(word)
    with suppress(ValueError):
        return parse_toml(f"it = {{ {word.strip().removeprefix('{').removesuffix('}')} }}")["it"]
    return word


def _table_mistake(one: ErrorDetails) -> str:
    """``table 1 engine_groups.0.num_gpus: found 0, input should be greater than or equal to 1``."""
    number, *keys = one["loc"] or (None,)
    where = "" if number is None else f"table {int(number) + 1} {'.'.join(map(str, keys))}".rstrip() + ": "
    found = "" if isinstance(one["input"], dict) else f"found {one['input']!r}, "
    return f"{where}{found}{one['msg'][:1].lower()}{one['msg'][1:]}"


def passed_on(words: Sequence[str]) -> Value:
    """Return the value of an SGLang flag: True without words, a number if its text is one, else text."""
    values = [_literal(word) for word in words]
    return True if not values else values[0] if len(values) == 1 else tuple(values)


def _literal(word: str) -> Any:
    if word in ("true", "false"):
        return word == "true"
    return json.loads(word) if _NUMBER.fullmatch(word) else word


_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?(e-?\d+)?", re.ASCII)

_TABLE = re.compile(r"[A-Za-z0-9_-]+")


def check_options(plugin: str, options: type[BaseModel], flags: dict[str, str], *, owner: str) -> None:
    """Check the options class of a plugin, and add its flags to ``flags``.

    Arguments:
        flags: flag -> who has it, of the plugins before; empty: of none.
        owner: the plugin in words.

    Raises:
        TypeError: it is no frozen pydantic model.
        ValueError: an option has no default or description, the plugin cannot have a table in a file, or a flag is that
            of the core or of another plugin.
    """
    if not flags:
        flags |= {setting.flag: "slime" for setting in core_settings().values()} | {"--config": "slime"}
    if not getattr(options, "model_config", {}).get("frozen"):
        raise TypeError("options are a subclass of slime_core.PluginOptions")
    for name, info in options.model_fields.items():
        if info.is_required() or not info.description:
            raise ValueError(f"option {name} needs a default and a description: Field(0.1, description='...')")
    if plugin in RunConfig.model_fields or _TABLE.fullmatch(plugin) is None:
        raise ValueError(f"[{plugin}] cannot be the table of its options; give the plugin another name")
    settings = plugin_settings({plugin: options}).values()
    if clash := next((setting.flag for setting in settings if setting.flag in flags), None):
        raise ValueError(f"the flag {clash} is taken by {flags[clash]}; --no-plugin leaves one of the two out")
    flags |= {setting.flag: owner for setting in settings}
