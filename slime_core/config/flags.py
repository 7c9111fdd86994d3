"""Reads a command line into words for each flag; what the words mean is ``settings``' part.

Accepted are ``--flag value``, ``--flag=value``, several values where the setting is a sequence (and the flag again for
more), and for switches ``--flag``, ``--flag false`` and ``--no-flag``. Abbreviations are not: a flag that is added
later must not change what a script means.

A flag that is neither the core's nor a named plugin's is looked up among those of the engines and of slime
(``engine_flags``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from slime_core.config.engine_flags import Refusal, find_flag, known_flags
from slime_core.config.mistakes import Mistake, nearest
from slime_core.config.settings import Setting

__all__ = ["CONFIG_FLAG", "NO_EVAL", "NO_EVAL_FLAG", "CommandLine", "of_inactive", "read_command_line"]

CONFIG_FLAG = "--config"
"""Names the TOML file; no setting."""

NO_EVAL_FLAG = "--no-eval"
"""Stands for :data:`NO_EVAL`; no setting."""

NO_EVAL = {
    "eval_interval": "none",
    "eval_prompt_data": "none",
    "eval_datasets": "none",
    "skip_eval_before_train": "true",
}
"""What a run without evaluations says: setting -> the word behind its flag."""


@dataclass(slots=True)
class CommandLine:
    """What stood on a command line.

    Example, ``--lr 1e-4 --no-save-hf``: ``words = {"lr": ["1e-4"], "save_hf": ["false"]}``.

    Arguments:
        words: setting key -> the words given for it; a switch that stood alone has none.
        config: words after ``--config``.
        engine: by key, the engines' settings that stood there.
        flags: every flag, known or not, as it stood there.
        mistakes: what could not be understood.
    """

    words: dict[str, list[str]] = field(default_factory=dict)
    config: list[str] = field(default_factory=list)
    engine: dict[str, Setting] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)

    def blame(self, message: str, key: str = "") -> None:
        """Collect one mistake."""
        self.mistakes.append(Mistake(message, key))


def read_command_line(
    argv: Sequence[str], settings: Mapping[str, Setting], inactive: Mapping[str, str] | None = None
) -> CommandLine:
    """Every flag of ``argv`` with its words; mistakes are collected, not raised.

    Arguments:
        settings: by key, those of the core and of the active plugins.
        inactive: flag without dashes, or plugin in brackets -> what to say of it, for plugins that are not active.
    """
    line = CommandLine()
    by_flag = {setting.flag: setting for setting in settings.values()}
    switches = {setting.flag.replace("--", "--no-", 1): setting for setting in settings.values() if setting.is_switch}
    for flag, words in _flags_with_words(argv, line):
        line.flags.append(flag)
        if flag == CONFIG_FLAG:
            _take_config(words, line)
        elif flag == NO_EVAL_FLAG:
            if words:
                line.blame(f"{flag}: found {' '.join(words)!r}; it takes no value")
        elif flag in by_flag:
            _take(by_flag[flag], words, line)
        elif flag in switches:
            _switch_off(switches[flag], flag, words, line)
        elif said := of_inactive(flag, inactive or {}):
            line.blame(f"{flag}: {said}")
        else:
            _take_foreign(flag, words, line, by_flag)
    if NO_EVAL_FLAG in line.flags:
        _switch_off_evaluations(line)
    return line


def of_inactive(flag: str, inactive: Mapping[str, str]) -> str | None:
    """What ``inactive`` says of a flag, or of one that turns a switch off; see :func:`read_command_line`."""
    name = flag.removeprefix("--")
    plugin, dot, _ = name.partition(".")
    return inactive.get(f"[{plugin}]" if dot else name) or inactive.get(name.removeprefix("no-"))


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
    if not words and not setting.is_switch:
        line.blame(f"{setting.flag}: no value given; accepted: {setting.accepts}", setting.key)
    elif setting.is_sequence:
        line.words.setdefault(setting.key, []).extend(words)
    elif len(words) > 1:
        line.blame(f"{setting.flag}: found {' '.join(words)!r}; accepted: one value, {setting.accepts}", setting.key)
    else:
        _take_once(setting, words, line)


def _take_once(setting: Setting, words: list[str], line: CommandLine) -> None:
    if setting.key in line.words:
        first, second = (" ".join(given) or "true" for given in (line.words[setting.key], words))
        line.blame(f"{setting.flag}: given twice, as {first} and as {second}; accepted: once", setting.key)
    line.words[setting.key] = words


def _switch_off(setting: Setting, flag: str, words: Sequence[str], line: CommandLine) -> None:
    if words:
        line.blame(f"{flag}: found {' '.join(words)!r}; it takes no value, {setting.flag} does", setting.key)
    _take_once(setting, ["false"], line)


def _switch_off_evaluations(line: CommandLine) -> None:
    given = [key for key in (*NO_EVAL, "eval_config") if key in line.words and line.words[key] != ["none"]]
    if given and given != ["skip_eval_before_train"]:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in given)
        line.blame(f"{NO_EVAL_FLAG}: nothing is evaluated with it, and {flags} asks for evaluations; leave one out")
    line.words |= {key: [word] for key, word in NO_EVAL.items()}


def _take_foreign(flag: str, words: list[str], line: CommandLine, by_flag: Mapping[str, Setting]) -> None:
    match find_flag(flag):
        case Refusal() as refusal:
            line.blame(refusal.given(words))
        case (setting, off):
            line.engine[setting.key] = setting
            (_switch_off(setting, flag, words, line) if off else _take(setting, words, line))
        case _:
            line.blame(_unknown(flag, by_flag))


def _unknown(flag: str, by_flag: Mapping[str, Setting]) -> str:
    plugin, dot, _ = flag.removeprefix("--").partition(".")
    if dot and not any(setting.of_plugin and setting.section == plugin for setting in by_flag.values()):
        return f"{flag}: the run names no plugin {plugin!r} that has options; add --plugin {plugin}"
    # One's own first: where both are as near, that is what was meant.
    return f"{flag}: no such setting{nearest(flag, dict.fromkeys([*by_flag, CONFIG_FLAG, *known_flags()]))}"
