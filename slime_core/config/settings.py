"""One setting: its names and accepted values, and how to read a value from a flag or from TOML.

The core's settings come from ``schema``, a plugin's from its options class, with the flag ``--grpo.std-normalization``
and the key ``[grpo] std_normalization`` unless the annotation names another flag. The same code reads both.

``accepted_words``, ``as_words`` and ``as_toml`` describe settings and values for messages, help and files.
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
    """Description of a custom type, used in messages. Attach it with ``Annotated``."""

    text: str


def accepted_words(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """Return the accepted values in words; empty for other types."""
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
    """Return the placeholder of a value in help, such as ``N`` for a number; empty for a switch."""
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
    """Return whether values of this type are written as tables."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bounds(metadata: Sequence[object]) -> str:
    bounds = []
    for entry in _flat(metadata):
        match entry:
            case Ge(ge=limit) | Gt(gt=limit) | Le(le=limit) | Lt(lt=limit):
                bounds.append(f"{_BOUNDS[type(entry)]} {limit}")
    return " and ".join(bounds)


def _flat(metadata: Sequence[object]) -> list[object]:
    return [entry for item in metadata for entry in (item.metadata if isinstance(item, FieldInfo) else [item])]


def as_toml(value: object) -> str:
    """Return the value as TOML. Tables leave out entries with their default.

    Raises:
        PluginError: TOML has no such type, which happens only with options of plugins.
    """
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            # TOML's basic strings are those of JSON, except for one control character.
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
    """Return the value as a user writes it after the flag, without the secrets in addresses."""
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
_SINGULAR_FLAGS = {_PLUGINS: "--plugin", "no_plugins": "--no-plugin"}
"""Flags that name one entry at a time, of settings that hold several."""

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
"""Setting -> placeholder in help, of texts that name no component, field or file."""


MOST_OF_NAME, MOST_OF_PATH = 255, 4000
"""Maximum bytes of a file name and of a path. Linux accepts paths of 4096, and the run appends file names."""

SHOWN = 60
"""Characters of a path that a message shows."""


class Unacceptable(ValueError):
    """The setting does not accept a value; the message lists the accepted ones."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a section or of a plugin's options class, or a flag of an engine.

    Examples of arguments, flag and key::

        ("optimizer", "lr")                            --lr                          lr
        ("grpo", "std_normalization", owner="plugin")  --grpo.std-normalization      grpo.std_normalization
        ("sglang", "log_level", owner="engine")        --sglang-log-level            sglang.log_level
        ("megatron", "decoupled_lr", owner="engine")   --decoupled-lr                megatron.decoupled_lr
    """

    section: str
    name: str
    info: FieldInfo
    owner: Literal["core", "plugin", "engine"] = "core"

    @property
    def key(self) -> str:
        """Name of the setting; unique in a run."""
        return self.name if self.owner == "core" else f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """Flag on the command line."""
        if self.key in _SINGULAR_FLAGS:
            return _SINGULAR_FLAGS[self.key]
        if self._declared_flag is not None:
            return self._declared_flag.name
        prefix = {"plugin": f"{self.section}.", "engine": "sglang-" if self.section == "sglang" else ""}
        return "--" + prefix.get(self.owner, "") + self.name.replace("_", "-")

    @property
    def old_section(self) -> str | None:
        """Former section of the setting in files, before a plugin had it; None if it had none."""
        return None if self._declared_flag is None else self._declared_flag.section

    @property
    def names_prompts(self) -> bool:
        """Whether the setting belongs to a plugin and its paths are prompt files."""
        return self.of_plugin and bool(self.notes(NamesPrompts))

    @property
    def provides(self) -> list[Part]:
        """Tasks that the plugin does instead of the core if the setting is set."""
        return [part for entry in self.notes(Provides) for part in entry.parts]

    def notes(self, kind: type[T]) -> list[T]:
        """Return the objects of ``kind``, a class of :mod:`slime_core.config.options`, in the annotation."""
        return [entry for entry in self.info.metadata if isinstance(entry, kind)]

    @property
    def _declared_flag(self) -> Flag | None:
        return next(iter(self.notes(Flag)), None) if self.of_plugin else None

    @property
    def of_plugin(self) -> bool:
        """Whether the setting belongs to a plugin."""
        return self.owner == "plugin"

    @property
    def default(self) -> Any:
        """Value if nothing sets another."""
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
        """Whether the values are pairs."""
        return self.is_sequence and get_origin(get_args(self.info.annotation)[0]) is tuple

    @property
    def is_tables(self) -> bool:
        """Whether the values are tables."""
        return self.is_sequence and is_table(get_args(self.info.annotation)[0])

    @property
    def accepts(self) -> str:
        """The accepted values, in words."""
        return accepted_words(self.info.annotation, self.info.metadata)

    @property
    def placeholder(self) -> str:
        """The placeholder of the value in help."""
        declared = None if self._declared_flag is None else self._declared_flag.value
        placeholder = declared or _NO_NAMES.get(self.name) or placeholder_of(self.info.annotation)
        return placeholder.replace("NAME", "PATH") if self.name.endswith("_path") else placeholder

    def read_flag(self, words: Sequence[str]) -> Any:
        """Return the value of the words after the flag. Paths are relative to the working directory.

        Raises:
            Unacceptable: the setting does not accept them.
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
        return self._read(self._shaped(words), shown=repr(" ".join(words)))

    def read_toml(self, value: object, *, base: Path) -> Any:
        """Return the value of a TOML value. Paths are relative to ``base``, the folder of the file.

        Raises:
            Unacceptable: the setting does not accept it. ``"5"`` is not a number, and 1 is not true.
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
        """Return ``value`` for the ``config.toml`` of a run: the paths of functions and of files that engines read are
        absolute, so that they hold in another working directory."""
        if self.section in _OF_ENGINES:
            return _existing_paths(value)
        return _code_paths(value, Path()) if self.notes(NamesCode) else value

    def read_python(self, value: object) -> Any:
        """Return the value of a plugin's preset.

        Raises:
            Unacceptable: the setting does not accept it.
        """
        return self._read(value, shown=repr(value))

    def _switch(self, words: Sequence[str]) -> bool:
        values = {(): True, ("true",): True, ("false",): False}
        if tuple(words) not in values:
            raise Unacceptable(f"found {' '.join(words)!r}; {self._accepted}")
        return values[tuple(words)]

    def _shaped(self, words: Sequence[str]) -> object:
        if self.is_pairs:
            return list(zip(words[::2], words[1::2], strict=True))
        return list(words) if self.is_sequence else words[0]

    def _read(self, value: object, *, shown: str) -> Any:
        try:
            return self._placed(_adapter(self).validate_python(value), Path())
        except ValidationError as error:
            raise self._unacceptable(shown, error) from None

    def _placed(self, value: Any, base: Path) -> Any:
        if self.key == _PLUGINS:
            return tuple(str(_absolute(Path(name), base)) if name.endswith(".py") else name for name in value)
        if self.notes(NamesCode) and base != Path():
            return _code_paths(value, base)
        return anchored(value, base)

    def _unacceptable(self, shown: str, error: ValidationError) -> Unacceptable:
        problems = error.errors()
        if self.is_tables:
            messages = _table_mistakes(get_args(self.info.annotation)[0], problems)
            is_complete = all("; accepted: " in message for message in messages)
            return Unacceptable("; ".join(messages if is_complete else [*messages, self._accepted]))
        if complete := list(filter(None, map(_complete, problems))):
            return Unacceptable("; ".join(complete))
        # Only pydantic can describe the type of a plugin.
        return Unacceptable(f"found {shown}; {self._accepted if self.accepts else problems[0]['msg']}")

    @property
    def _accepted(self) -> str:
        return f"accepted: {self.accepts}"


@cache
def core_settings() -> Mapping[str, Setting]:
    """Return the settings of the core by name, in the order of ``schema``."""
    settings: dict[str, Setting] = {}
    for section, holder in RunConfig.model_fields.items():
        kind: Any = holder.annotation
        if not issubclass(kind, EngineSection):
            settings |= {name: Setting(section, name, info) for name, info in kind.model_fields.items()}
    return settings


def core_values(config: RunConfig) -> Mapping[str, Any]:
    """Return name -> value of every setting of the core; read-only."""
    sections = (section for section in dict(config).values() if not isinstance(section, EngineSection))
    return MappingProxyType({name: value for section in sections for name, value in section})


def plugin_settings(options: Mapping[str, type[BaseModel]]) -> Mapping[str, Setting]:
    """Return the settings of these options classes by key (``grpo.std_normalization``)."""
    fields = ((plugin, name, info) for plugin, kind in options.items() for name, info in kind.model_fields.items())
    settings = (Setting(plugin, name, info, owner="plugin") for plugin, name, info in fields)
    return {setting.key: setting for setting in settings}


def _adapter(setting: Setting) -> TypeAdapter[Any]:
    annotated: Any = Annotated[setting.info.annotation, setting.info]
    return TypeAdapter(annotated)


def anchored(value: Any, base: Path) -> Any:
    """Return ``value`` with absolute paths.

    Raises:
        Unacceptable: a path is one that no file system accepts.
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
    """Return whether a file system accepts the path."""
    try:
        sizes = [len(os.fsencode(part)) for part in path.parts]
    except UnicodeEncodeError:  # half a character
        return False
    return "\0" not in f"{path}" and max(sizes, default=0) <= MOST_OF_NAME and sum(sizes) + len(sizes) <= MOST_OF_PATH


def _names_paths(annotation: Any) -> bool:
    """Return whether the type holds paths; an empty text would be the working directory."""
    return annotation is Path or any(map(_names_paths, get_args(annotation)))


def _code_paths(value: Any, base: Path) -> Any:
    """Return ``file.py:function``, or several, with absolute paths. Names of modules do not change."""
    if isinstance(value, tuple | list):
        return tuple(_code_paths(path, base) for path in value)
    file, colon, function = (value or "").partition(":")
    return f"{_absolute(Path(file), base)}{colon}{function}" if file.endswith(".py") else value


_OF_ENGINES = ("sglang", "engine")
"""Sections whose values engines receive unchanged, such as the file of ``--sglang-chat-template``."""


def _existing_paths(value: Any) -> Any:
    """Return ``value`` with absolute paths of existing files and folders. Only texts that look like paths count,
    because SGLang also has names such as ``chatml``."""
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _existing_paths(entry) for name, entry in value})
    if isinstance(value, tuple):
        return tuple(map(_existing_paths, value))
    is_path = isinstance(value, str) and ("/" in value or "." in value) and _is_possible(Path(value))
    return str(_absolute(Path(value), Path())) if is_path and os.path.exists(value) else value


def _absolute(path: Path, base: Path) -> Path:
    if not _is_possible(path):
        raise Unacceptable(f"found {str(path)[:SHOWN]!r}..., which no file system takes; {_POSSIBLE}")
    # abspath and not resolve: a checkpoint folder is often a link, and messages show the name that the user gave.
    return Path(os.path.abspath(base / os.path.expanduser(path)))


def _table(word: str) -> object:
    """Return the table that a word holds as JSON or TOML (``name = 'aime', path = 'aime.jsonl'``), or the word."""
    with suppress(ValueError):
        return parse_json(word)
    with suppress(ValueError):
        return parse_toml(f"it = {{ {word.strip().removeprefix('{').removesuffix('}')} }}")["it"]
    return word


def _complete(problem: ErrorDetails) -> str | None:
    """Return the message of a validator of slime or of a plugin, which needs no addition; None for pydantic's."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    return problem["msg"] if problem["type"] == REJECTED else None


def _table_mistakes(table: type[BaseModel], problems: Sequence[ErrorDetails]) -> list[str]:
    """Return one message for each entry: ``table 1 engine_groups.0.num_gpus: found 0; accepted: a whole number of at
    least 1``."""
    messages: dict[str, str] = {}
    for problem in problems:
        number, *keys = problem["loc"] or (None,)
        path, accepted = _entry_of(table, keys)
        place = "" if number is None else f"table {int(number) + 1} {path}".rstrip() + ": "
        if complete := _complete(problem):
            text = complete
        elif accepted and problem["type"] != "missing":
            text = f"found {problem['input']!r}; accepted: {accepted}"
        else:
            shown = "" if isinstance(problem["input"], dict) else f"found {problem['input']!r}, "
            text = f"{shown}{problem['msg'][:1].lower()}{problem['msg'][1:]}"
        messages.setdefault(place, place + text)
    return list(messages.values())


def _entry_of(table: Any, keys: Sequence[int | str]) -> tuple[str, str]:
    """Return the path of an entry without pydantic's names of the members of a union, and its accepted values."""
    path, accepted = [], ""
    for key in keys:
        if is_table(table) and key in table.model_fields:
            info = table.model_fields[key]
            accepted = accepted_words(info.annotation, info.metadata)
            table = next(iter(get_args(info.annotation)), None)
        elif not isinstance(key, int) and not is_table(table):
            continue
        path.append(str(key))
    return ".".join(path), accepted


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
        flags: flag -> its owner, of the plugins checked before.
        owner: the plugin in words.

    Raises:
        TypeError: the class is not a frozen pydantic model.
        ValueError: an option has no default or description, the plugin's name cannot be a table in a file, or the core
            or another plugin has one of the flags.
    """
    if not flags:
        flags |= {setting.flag: "slime" for setting in core_settings().values()} | {"--config": "slime"}
    if not getattr(options, "model_config", {}).get("frozen"):
        raise TypeError("options must be a subclass of slime_core.PluginOptions")
    for name, info in options.model_fields.items():
        if info.is_required() or not info.description:
            raise ValueError(f"option {name} needs a default and a description: Field(0.1, description='...')")
    if plugin in RunConfig.model_fields or _TABLE.fullmatch(plugin) is None:
        raise ValueError(f"[{plugin}] cannot be the table of its options; give the plugin another name")
    settings = plugin_settings({plugin: options}).values()
    if clash := next((setting.flag for setting in settings if setting.flag in flags), None):
        raise ValueError(f"the flag {clash} is taken by {flags[clash]}; --no-plugin leaves one of the two out")
    flags |= {setting.flag: owner for setting in settings}
