"""Reads a command line and a TOML file.

A command line becomes flags with words, which ``settings`` converts to values. Accepted are ``--flag value``,
``--flag=value``, several values for sequences (and the flag again for more), and ``--flag``, ``--flag false`` and
``--no-flag`` for switches. Abbreviations are refused, because a new flag must not change the meaning of a script.
Other flags are looked up among those of the engines and those that plugins explain (``engine_flags``).

A TOML file has a table for each section and for each plugin.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from slime_core.config.engine_flags import (
    ENGINES,
    Refusal,
    WithoutEffect,
    find_flag,
    find_key,
    known_flags,
    megatron_settings,
)
from slime_core.config.other_names import counterpart
from slime_core.config.settings import Setting
from slime_core.errors import ConfigError, Mistake, nearest
from slime_core.untrusted import MOST_TOML, parse_toml, read_text

CONFIG_FLAG = "--config"
"""The flag of the TOML file, which is not a setting."""

NO_EVAL_FLAG = "--no-eval"
"""The flag that sets :data:`NO_EVAL`, which is not a setting."""

NO_EVAL = {
    "eval_interval": "none",
    "eval_prompt_data": "none",
    "eval_datasets": "none",
    "skip_eval_before_train": "true",
}
"""Values of ``--no-eval``: setting -> the word after its flag."""


@dataclass(slots=True)
class CommandLine:
    """A parsed command line.

    Example, ``--lr 1e-4 --no-save-hf``: ``words = {"lr": ["1e-4"], "save_hf": ["false"]}``.

    Arguments:
        words: setting key -> its words; a switch without a value has none.
        config: words after ``--config``.
        engine: key -> setting, for the flags of engines.
        without_effect: flags without effect, with their words.
        flags: every flag, known or unknown.
        mistakes: mistakes in the flags and words.
    """

    words: dict[str, list[str]] = field(default_factory=dict)
    config: list[str] = field(default_factory=list)
    engine: dict[str, Setting] = field(default_factory=dict)
    without_effect: list[tuple[str, list[str], WithoutEffect]] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)

    def blame(self, message: str, key: str = "") -> None:
        """Collect one mistake."""
        self.mistakes.append(Mistake(message, key))


def read_command_line(argv: Sequence[str], settings: Mapping[str, Setting]) -> CommandLine:
    """Parse the flags of ``argv`` and their words, and collect mistakes.

    Arguments:
        settings: key -> setting, of the core and of all loaded plugins.
    """
    line = CommandLine()
    by_flag = {setting.flag: setting for setting in settings.values()}
    switches = {setting.flag.replace("--", "--no-", 1): setting for setting in settings.values() if setting.is_switch}
    for flag, words in _flags_with_words(argv, line):
        line.flags.append(flag)
        if flag == CONFIG_FLAG:
            _take_config(words, line)
        elif flag == NO_EVAL_FLAG:
            _refuse_words(flag, words, line)
        elif flag in by_flag:
            _take(by_flag[flag], words, line)
        elif flag in switches:
            _switch_off(switches[flag], flag, words, line)
        else:
            _take_foreign(flag, words, line, by_flag)
    for key, word in NO_EVAL.items() if NO_EVAL_FLAG in line.flags else ():
        if line.words.setdefault(key, [word]) not in ([], [word]):
            line.blame(f"{NO_EVAL_FLAG} excludes {settings[key].flag}; leave one of them out", key)
    return line


def _flags_with_words(argv: Sequence[str], line: CommandLine) -> Iterator[tuple[str, list[str]]]:
    starts = [place for place, word in enumerate(argv) if word.startswith("--") and word != "--"]
    for word in argv[: starts[0] if starts else None]:
        line.blame(f"{word!r} belongs to no flag; settings are given as --flag value")
    for start, end in pairwise([*starts, len(argv)]):
        flag, equals, value = argv[start].partition("=")
        yield flag, [*([value] if equals else []), *argv[start + 1 : end]]


def _take_config(words: Sequence[str], line: CommandLine) -> None:
    line.config += words
    if len(line.config) != 1 or not words:
        line.blame(f"{CONFIG_FLAG}: found {' '.join(line.config) or 'nothing'}; accepted: the path of one TOML file")


def _take(setting: Setting, words: list[str], line: CommandLine) -> None:
    if setting.passes_on:
        _take_once(setting, words, line)
    elif not words and not setting.is_switch:
        line.blame(f"{setting.flag}: no value given; accepted: {setting.accepts}", setting.key)
    elif setting.is_sequence:
        line.words.setdefault(setting.key, []).extend(words)
    elif len(words) > 1:
        line.blame(f"{setting.flag}: found {' '.join(words)!r}; accepted: one value, {setting.accepts}", setting.key)
    else:
        _take_once(setting, words, line)


def _take_once(setting: Setting, words: list[str], line: CommandLine) -> None:
    if setting.key in line.words:
        first, second = (" ".join(values) or "true" for values in (line.words[setting.key], words))
        line.blame(f"{setting.flag}: given twice, as {first} and as {second}; accepted: once", setting.key)
    line.words[setting.key] = words


def _switch_off(setting: Setting, flag: str, words: Sequence[str], line: CommandLine) -> None:
    _refuse_words(flag, words, line, setting.key)
    _take_once(setting, ["false"], line)


def _refuse_words(flag: str, words: Sequence[str], line: CommandLine, key: str = "") -> None:
    if words:
        line.blame(f"{flag}: found {' '.join(words)!r}; accepted: no value", key)


def _take_foreign(flag: str, words: list[str], line: CommandLine, by_flag: Mapping[str, Setting]) -> None:
    match find_flag(flag):
        case Refusal() | None if instead := counterpart(flag):
            line.blame(f"{flag}: no such setting; write {instead}")
        case Refusal() as refusal:
            line.blame(refusal.given(words))
        case WithoutEffect() as accepted:
            line.without_effect.append((flag, words, accepted))
        case (setting, off):
            line.engine[setting.key] = setting
            (_switch_off(setting, flag, words, line) if off else _take(setting, words, line))
        case _:
            line.mistakes.append(_unknown(flag, by_flag))


def _unknown(flag: str, by_flag: Mapping[str, Setting]) -> Mistake:
    plugin, dot, _ = flag.removeprefix("--").partition(".")
    if dot and not any(setting.of_plugin and setting.section == plugin for setting in by_flag.values()):
        return Mistake(f"{flag}: no installed plugin {plugin!r} has options")

    def similar() -> str:
        # Settings of slime and its plugins come first, so that they win over engines' flags that are as similar.
        return nearest(flag.replace("_", "-"), dict.fromkeys([*by_flag, CONFIG_FLAG, *known_flags()]))

    return Mistake(f"{flag}: no such setting", ending=similar)


Places = Mapping[tuple[str, str], Setting]


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file.

    Arguments:
        path: path of the file; paths in the file are relative to its folder.
        tables: table name -> key -> value, as TOML types.
        lines: (table, key) -> line number, for keys that start a line.
    """

    path: Path
    tables: Mapping[str, Any]
    lines: Mapping[tuple[str, str], int]

    def place(self, table: str, key: str = "") -> str:
        """Return the place of the key for messages: ``run.toml:12 [optimizer] lr``."""
        line = self.lines.get((table, key))
        file = f"{self.path.name}:{line}" if line else self.path.name
        return " ".join(filter(None, [file, f"[{table}]" if table else "", key]))

    def other_tables(self, settings: Mapping[str, Setting]) -> list[str]:
        """Return the tables that belong to no setting and no engine."""
        sections = {setting.section for setting in settings.values()} | ENGINES.keys()
        return [table for table in self.tables if table not in sections]

    def values(
        self, settings: Mapping[str, Setting], mistakes: list[Mistake], without: Collection[str] = ()
    ) -> Iterator[tuple[Setting, object, str]]:
        """Yield every setting in the file with its TOML value and its place. Add unknown keys and tables to
        ``mistakes``, and settings that are also in their old section.

        Arguments:
            without: plugins that ``--no-plugin`` leaves out; their tables are ignored.
        """
        by_place = {(setting.section, setting.name): setting for setting in settings.values()}
        for setting in settings.values():
            if setting.old_section is not None:
                by_place.setdefault((setting.old_section, setting.name), setting)
        places: dict[str, str] = {}
        for place, entry, value in self._entries(by_place, without):
            if isinstance(entry, str):
                mistakes.append(Mistake(f"{place}: {entry}"))
                continue
            if (first := places.setdefault(entry.key, place)) != place:
                mistakes.append(Mistake(f"{place}: it is also at {first}; keep one of them", entry.key))
            yield entry, value, place

    def _entries(self, by_place: Places, without: Collection[str]) -> Iterator[tuple[str, Setting | str, object]]:
        """Yield every place with its setting, or the mistake there, and its value."""
        for table, entries in self.tables.items():
            if not isinstance(entries, dict):
                yield self.place("", table), f"it is in no section{_home(table, by_place)}", None
            elif table in ENGINES:
                yield from ((self.place(table, key), _of_engine(table, key), value) for key, value in entries.items())
            elif table in without:
                continue
            elif not any(section == table for section, _ in by_place):
                yield self.place(table), _no_table(table, by_place), None
            else:
                for key, value in entries.items():
                    setting = by_place.get((table, key)) or f"no such setting{_home(key, by_place)}"
                    yield self.place(table, key), setting, value


def _of_engine(table: str, key: str) -> Setting | str:
    match find_key(table, key):
        case Setting() as setting:
            return setting
        case Refusal(message):
            return message
    return f"{ENGINES[table]} has no such flag{nearest(key, megatron_settings())}"


def read_document(path: Path) -> Document:
    """Read and parse a TOML file.

    Raises:
        ConfigError: the file cannot be read, or is not TOML; the message has the line.
    """
    try:
        text = read_text(path, limit=MOST_TOML)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; accepted: the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: byte {error.start} is not UTF-8; TOML files are") from None
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}; accepted: a TOML file") from None
    try:
        return Document(path, parse_toml(text), _lines(text))
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Return the lines of keys, as far as regular expressions find them; tomllib has no positions."""
    table = ""
    lines: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]", line):
            table = header[1]
            lines.setdefault((table, ""), number)
            lines.setdefault((table.partition(".")[0], table.partition(".")[2]), number)
        elif key := re.match(r"\s*([\w-]+)\s*=", line):
            lines.setdefault((table, key[1]), number)
    return lines


def _home(key: str, by_place: Places) -> str:
    """Return the section of a misplaced key, or the nearest name, for a message."""
    homes = [section for section, name in by_place if name == key]
    if homes:
        return f"; it belongs to [{homes[0]}]"
    match find_flag(f"--{key.replace('_', '-')}"):
        case Refusal() | None if instead := counterpart(key):
            return f"; as a flag, write {instead}"
        case Refusal(message):
            return f"\n{message}"
        case (setting, _):
            return f"; it belongs to [{setting.section}] as {setting.name}"
    return nearest(key, [name for _, name in by_place])


def _no_table(table: str, by_place: Places) -> str:
    sections = [*dict.fromkeys(section for section, _ in by_place), *ENGINES]
    return (
        f"neither a section nor an installed plugin with options{nearest(table, sections)}\n"
        f"sections: {', '.join(sections)}; slime plugins list shows the plugins"
    )
