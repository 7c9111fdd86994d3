"""Writes settings for people: as a TOML file that repeats the run, as help, and one setting in full."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from pydantic import BaseModel

from slime_core.config.check import called, stated
from slime_core.config.engine_flags import (
    ENGINES,
    Refusal,
    WithoutEffect,
    find_flag,
    find_key,
    known_flags,
    megatron_settings,
)
from slime_core.config.load import DEFAULT, Resolved
from slime_core.config.options import CheckedIfGiven, Once
from slime_core.config.other_names import counterpart
from slime_core.config.schema import RunConfig
from slime_core.config.settings import Setting, as_toml, as_words, core_settings, plugin_settings
from slime_core.errors import ConfigError, nearest

WIDTH: Final = 100
"""Columns of help."""

_LEFT: Final = 33
_RIGHT: Final = WIDTH - _LEFT - 3

_COMMON_NAMES = """
    hf_checkpoint load bf16 device actor_num_gpus_per_node rollout_num_gpus prompt_data
    apply_chat_template num_rollout rollout_batch_size n_samples_per_prompt rollout_temperature
    rollout_max_response_len rm_type eval_prompt_data eval_interval advantage_estimator use_kl_loss
    kl_loss_coef lr global_batch_size max_tokens_per_gpu save_interval output_dir seed plugins progress
"""

COMMON: Final = frozenset(_COMMON_NAMES.split())
"""Settings that the short help describes; the others it only names."""

_ENGINE_ROWS: Final = {
    "--NAME [megatron]": "Megatron's own flags: --help megatron lists them",
    "--sglang-NAME [sglang]": "SGLang's own flags: python -m sglang.launch_server --help lists them",
}

_FIRST_WORDS: Final = {"eval": "[RUN | CHECKPOINT | MODEL_FOLDER] [--json] "}
"""Command -> what it takes in addition to settings."""

CONFIG_HELP: Final = "TOML file of settings, one table a section; flags win over it"


def to_toml(resolved: Resolved) -> str:
    """A file that resolves to the same settings again (``slime run --config FILE``), with each value's source."""
    lines = ["# All settings of a run. slime run --config THIS_FILE repeats it with the same plugins installed."]
    section = ""
    for key, (setting, value) in resolved.values().items():
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"]
        source, recorded = str(resolved.provenance[key]), setting.recorded(value)
        if recorded is None and source == str(DEFAULT):
            lines.append(f"# {setting.name} is not set")
        elif setting.notes(CheckedIfGiven) and source == str(DEFAULT):
            lines.append(f"# {setting.name} = {as_toml(recorded)}  # {source}")
        elif setting.notes(Once):
            lines.append(f"# {setting.name} = {as_toml(recorded)}  # {source}; holds for one start")
        else:
            lines.append(f"{setting.name} = {as_toml(recorded)}  # {source}")
    return "\n".join(lines) + "\n"


def explain(name: str, resolved: Resolved) -> str:
    """Return the value of one setting, its source, and what it accepts and does.

    Arguments:
        name: as a key (``lr``, ``optimizer.lr``, ``grpo.std_normalization``, ``megatron.decoupled_lr``) or a flag
            (``--lr``), also the one that turns a switch off (``--no-save-hf``).

    Raises:
        ConfigError: there is no such setting; with the nearest, or why there is none.
    """
    values = resolved.values()
    names: dict[str, str] = {}
    for key, (setting, _) in values.items():
        own = called(setting)
        off = [f"no_{own}"] if setting.is_switch else []
        names |= dict.fromkeys([key, f"{setting.section}.{setting.name}", own, *off], key)
    wanted = name.removeprefix("--").replace("-", "_")
    setting = values[names[wanted]][0] if wanted in names else _of_engine(wanted, name, names)
    value = values[setting.key][1] if setting.key in values else "(not given)"
    rows = {
        "from": str(resolved.provenance.get(setting.key, DEFAULT)),
        "accepts": setting.accepts,
        "default": as_words(setting.default),
        "flag": _flag(setting),
        "file": f"[{setting.section}] {setting.name}",
    }
    listed = "\n".join(f"  {label:<8} {text}" for label, text in (*rows.items(), *stated(setting)))
    return f"{setting.section}.{setting.name} = {as_words(value)}\n{listed}\n{_wrapped(_does(setting), indent=2)}"


def _of_engine(wanted: str, name: str, names: Iterable[str]) -> Setting:
    section, _, key = wanted.rpartition(".")
    found = find_key(section, key) if section in ENGINES else find_flag(f"--{wanted.replace('_', '-')}")
    match found:
        case Refusal() | None if instead := counterpart(wanted):
            raise ConfigError(f"{name}: no such setting; write {instead}")
        case Setting() as setting:
            return setting
        case (setting, _):
            return setting
        case Refusal(message):
            raise ConfigError(message)
        case WithoutEffect():
            raise ConfigError(f"{name}: no setting; a command line may have the flag, and it changes nothing")
    near = nearest(wanted, [*names, *(flag.removeprefix("--").replace("-", "_") for flag in known_flags())])
    raise ConfigError(f"{name}: no such setting{near}; slime run --help all lists them")


def help_page(command: str, options: Mapping[str, type[BaseModel]] | None = None) -> str:
    """``slime run --help``: what is set most, described; the rest by name; the named plugins' options in full."""
    usage = f"slime {command} {_FIRST_WORDS.get(command, '')}[--plugin NAME] [--config FILE.toml] [--setting value ...]"
    parts = [usage, *_rows([("--config PATH", CONFIG_HELP)])]
    for section, settings in _sections(options).items():
        parts += ["", _title(section)]
        if section not in RunConfig.model_fields:
            parts += _rows(map(_row, settings))
            continue
        parts += _rows(_row(setting, short=True) for setting in settings if setting.name in COMMON)
        if others := [setting.flag for setting in settings if setting.name not in COMMON]:
            parts.append(_wrapped("also " + " ".join(others), indent=2, hanging=7))
    parts += ["", *_rows(_ENGINE_ROWS.items())]
    parts += ["", f"slime {command} --help SECTION describes all of a section, --help all everything."]
    return "\n".join(parts)


def help_topic(topic: str, options: Mapping[str, type[BaseModel]] | None = None) -> str:
    """``slime run --help SECTION``: every setting of one section, engine or named plugin, or of ``all`` but engines.

    Raises:
        ConfigError: there is no such section.
    """
    if topic in ENGINES:
        return "\n".join(_engine_parts(topic))
    sections = _sections(options)
    wanted = list(sections) if topic == "all" else [topic]
    if wanted[0] not in sections:
        topics = ["all", *sections, *ENGINES]
        raise ConfigError(f"--help {topic}: no such section{nearest(topic, topics)}; accepted: {', '.join(topics)}")
    parts = [line for section in wanted for line in ["", _title(section), *_rows(map(_row, sections[section]))]]
    return "\n".join(parts[1:])


def settings_tables(options: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """Every setting of the core and of ``options`` as Markdown: a heading and a table for each section."""
    for section, settings in _sections(options).items():
        yield f"## {_title(section)}\n\n| setting | default | |\n|---|---|---|"
        for setting in settings:
            cells = f"`{_flag(setting)}`", f"`{as_words(setting.default)}`", _does(setting)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""


def _does(setting: Setting) -> str:
    return " ".join((setting.info.description or "").split())


def _sections(options: Mapping[str, type[BaseModel]] | None) -> dict[str, list[Setting]]:
    """Section -> its settings, of the core and then of the plugins."""
    settings = [*core_settings().values(), *plugin_settings(options or {}).values()]
    return {section: list(found) for section, found in groupby(settings, attrgetter("section"))}


def _title(section: str) -> str:
    info = RunConfig.model_fields.get(section)
    if info is None:
        return f"[{section}] options of plugin {section}"
    kind: Any = info.annotation
    return f"[{section}] {kind.__doc__.splitlines()[0].removesuffix('.')}"


def _engine_parts(engine: str) -> list[str]:
    if engine == "sglang":
        text = "--sglang-NAME passes --NAME on to every engine; python -m sglang.launch_server --help lists all names."
        return [_title(engine), "", _wrapped(text, indent=0)]
    rows = ((_flag(setting, short=True), _does(setting)) for setting in megatron_settings().values())
    return [_title(engine), "", *_rows(rows)]


def _flag(setting: Setting, *, short: bool = False) -> str:
    """The flag with what follows it; ``short``: without the choices, which stand next to it."""
    follows = "NAME" if short and "|" in setting.placeholder else setting.placeholder
    return f"{setting.flag} {follows}".rstrip()


def _row(setting: Setting, *, short: bool = False) -> tuple[str, str]:
    """The flag, and what it does; ``short``: the first clause of that."""
    default, text = as_words(setting.default), _does(setting)
    text = text.split(". ")[0].split("; ")[0].removesuffix(".") if short else text
    return _flag(setting), text + ("" if default in ("none", "(empty)") else f" [{default}]")


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for left, right in rows:
        head = f"  {left:<{_LEFT}} "
        if len(left) > _LEFT:
            yield head.rstrip()
            head = " " * (_LEFT + 3)
        first, *others = textwrap.wrap(right, _RIGHT, break_on_hyphens=False) or [""]
        yield (head + first).rstrip()
        yield from (" " * (_LEFT + 3) + line for line in others)


def _wrapped(text: str, *, indent: int, hanging: int | None = None) -> str:
    later = " " * (indent if hanging is None else hanging)
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=" " * indent, subsequent_indent=later, break_on_hyphens=False)
    return wrapper.fill(text)
