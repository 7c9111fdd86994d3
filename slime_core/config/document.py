"""Reads a TOML file of settings: one table a section, one a named plugin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.config.engine_flags import ENGINES, Refusal, engine_settings, find_flag, find_key
from slime_core.config.mistakes import Mistake, nearest
from slime_core.config.settings import Setting
from slime_core.errors import ConfigError
from slime_core.untrusted import MOST_TOML, parse_toml, read_text

__all__ = ["Document", "read_document"]

Places = Mapping[tuple[str, str], Setting]


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file.

    Arguments:
        path: of the file; its folder is what paths in it are relative to.
        tables: table name -> key -> value, as TOML types.
        lines: (table, key) -> line number, where a key stands on a line of its own.
    """

    path: Path
    tables: Mapping[str, Any]
    lines: Mapping[tuple[str, str], int]

    def place(self, table: str, key: str = "") -> str:
        """Where the key stands, for messages: ``run.toml:12 [optimizer] lr``."""
        line = self.lines.get((table, key))
        file = f"{self.path.name}:{line}" if line else self.path.name
        return " ".join(filter(None, [file, f"[{table}]" if table else "", key]))

    def values(
        self, settings: Mapping[str, Setting], mistakes: list[Mistake], inactive: Mapping[str, str] | None = None
    ) -> Iterator[tuple[Setting, object, str]]:
        """Every setting in the file with its TOML value, and where it stands; keys and tables that are none are added
        to ``mistakes``, and so is a setting that stands in its old section too.

        Arguments:
            inactive: flag without dashes, or plugin in brackets -> what to say of it, for plugins that are not active.
        """
        by_place = {(setting.section, setting.name): setting for setting in settings.values()}
        for setting in settings.values():
            if setting.old_section is not None:
                by_place.setdefault((setting.old_section, setting.name), setting)
        seen: dict[str, str] = {}
        for setting, value, place in self._every(by_place, mistakes, inactive or {}):
            if (first := seen.setdefault(setting.key, place)) != place:
                mistakes.append(Mistake(f"{place}: stands there and at {first}; keep one of them", setting.key))
            yield setting, value, place

    def _every(
        self, by_place: Places, mistakes: list[Mistake], inactive: Mapping[str, str]
    ) -> Iterator[tuple[Setting, object, str]]:
        for table, entries in self.tables.items():
            if not isinstance(entries, dict):
                mistakes.append(Mistake(f"{self.place('', table)}: stands in no section{_home(table, by_place)}"))
            elif table in ENGINES:
                yield from self._of_engine(table, entries, mistakes)
            elif not any(section == table for section, _ in by_place):
                of_keys = (inactive.get(key.replace("_", "-")) for key in entries)
                said = inactive.get(f"[{table}]") or next(filter(None, of_keys), None) or _no_table(table, by_place)
                mistakes.append(Mistake(f"{self.place(table)}: {said}"))
            else:
                yield from self._of_table(table, entries, by_place, mistakes, inactive)

    def _of_table(
        self,
        table: str,
        entries: Mapping[str, object],
        by_place: Places,
        mistakes: list[Mistake],
        inactive: Mapping[str, str],
    ) -> Iterator[tuple[Setting, object, str]]:
        for key, value in entries.items():
            setting = by_place.get((table, key))
            if setting is not None:
                yield setting, value, self.place(table, key)
            else:
                said = inactive.get(key.replace("_", "-")) or f"no such setting{_home(key, by_place)}"
                mistakes.append(Mistake(f"{self.place(table, key)}: {said}"))

    def _of_engine(
        self, table: str, entries: Mapping[str, object], mistakes: list[Mistake]
    ) -> Iterator[tuple[Setting, object, str]]:
        for key, value in entries.items():
            match find_key(table, key):
                case Setting() as setting:
                    yield setting, value, self.place(table, key)
                case Refusal(message):
                    mistakes.append(Mistake(f"{self.place(table, key)}: {message}"))
                case _:
                    near = nearest(key, engine_settings(table))
                    mistakes.append(Mistake(f"{self.place(table, key)}: {ENGINES[table]} has no such flag{near}"))


def read_document(path: Path) -> Document:
    """The file's tables.

    Raises:
        ConfigError: the file cannot be read, or is not TOML; with the line.
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
    """Best effort, for messages only: tomllib tells no positions."""
    table = ""
    found: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]", line):
            table = header[1]
            found.setdefault((table, ""), number)
            found.setdefault((table.partition(".")[0], table.partition(".")[2]), number)
        elif key := re.match(r"\s*([\w-]+)\s*=", line):
            found.setdefault((table, key[1]), number)
    return found


def _home(key: str, by_place: Places) -> str:
    """Which section a misplaced key belongs to, or which key a misspelt one resembles."""
    homes = [section for section, name in by_place if name == key]
    if homes:
        return f"; it belongs to [{homes[0]}]"
    match find_flag(f"--{key.replace('_', '-')}"):
        case Refusal(message):
            return f"\n{message}"
        case (setting, _):
            return f"; it belongs to [{setting.section}]{f' as {setting.name}' if setting.name != key else ''}"
    return nearest(key, [name for _, name in by_place])


def _no_table(table: str, by_place: Places) -> str:
    sections = [*dict.fromkeys(section for section, _ in by_place), *ENGINES]
    return (
        f"neither a section nor a named plugin with options{nearest(table, sections)}\n"
        f"sections: {', '.join(sections)}; a plugin is named with --plugin, or in [run] plugins"
    )
