"""Writes settings for users: as a TOML file that repeats the run, as help, and one setting in full."""

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
"""Settings that the short help describes. It only names the others."""

_ENGINE_ROWS: Final = {
    "--NAME [megatron]": "flags of Megatron: --help megatron lists them",
    "--sglang-NAME [sglang]": "flags of SGLang: python -m sglang.launch_server --help lists them",
}

_FIRST_WORDS: Final = {"eval": "[RUN | CHECKPOINT | MODEL_FOLDER] [--json] "}
"""Command -> its arguments before settings."""

CONFIG_HELP: Final = "TOML file of settings, with a table for each section; flags override it"


def to_toml(resolved: Resolved) -> str:
    """Return a TOML file that resolves to the same settings (``slime run --config FILE``), with sources of values."""
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
    """Return the value and the source of a setting, its accepted values and its description.

    Arguments:
        name: a key (``lr``, ``optimizer.lr``, ``grpo.std_normalization``, ``megatron.decoupled_lr``) or a flag
            (``--lr``, ``--no-save-hf``).

    Raises:
        ConfigError: there is no such setting.
    """
    values = resolved.values()
    names: dict[str, str] = {}
    for key, (setting, _) in values.items():
        flag = called(setting)
        off = [f"no_{flag}"] if setting.is_switch else []
        names |= dict.fromkeys([key, f"{setting.section}.{setting.name}", flag, *off], key)
    spelling = name.removeprefix("--").replace("-", "_")
    setting = values[names[spelling]][0] if spelling in names else _of_engine(spelling, name, names)
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


def _of_engine(spelling: str, name: str, names: Iterable[str]) -> Setting:
    section, _, key = spelling.rpartition(".")
    match find_key(section, key) if section in ENGINES else find_flag(f"--{spelling.replace('_', '-')}"):
        case Refusal() | None if instead := counterpart(spelling):
            raise ConfigError(f"{name}: no such setting; write {instead}")
        case Setting() as setting:
            return setting
        case (setting, _):
            return setting
        case Refusal(message):
            raise ConfigError(message)
        case WithoutEffect():
            raise ConfigError(f"{name}: the flag is accepted and has no effect")
    near = nearest(spelling, [*names, *(flag.removeprefix("--").replace("-", "_") for flag in known_flags())])
    raise ConfigError(f"{name}: no such setting{near}; slime run --help all lists them")


def help_page(command: str, options: Mapping[str, type[BaseModel]] | None = None) -> str:
    """Return ``slime run --help``: common settings with descriptions, the names of others, and all plugin options."""
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
    """Return ``slime run --help SECTION``: the settings of a section, engine or plugin, or of ``all`` except engines.

    Raises:
        ConfigError: there is no such section.
    """
    if topic in ENGINES:
        return "\n".join(_engine_parts(topic))
    sections = _sections(options)
    if topic != "all" and topic not in sections:
        topics = ["all", *sections, *ENGINES]
        raise ConfigError(f"--help {topic}: no such section{nearest(topic, topics)}; accepted: {', '.join(topics)}")
    shown = sections if topic == "all" else [topic]
    parts = [line for section in shown for line in ["", _title(section), *_rows(map(_row, sections[section]))]]
    return "\n".join(parts[1:])


def settings_tables(options: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """Yield the settings of the core and of ``options`` as Markdown: a heading and a table for each section."""
    for section, settings in _sections(options).items():
        yield f"## {_title(section)}\n\n| setting | default | |\n|---|---|---|"
        for setting in settings:
            cells = f"`{_flag(setting)}`", f"`{as_words(setting.default)}`", _does(setting)
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        yield ""


def _does(setting: Setting) -> str:
    return " ".join((setting.info.description or "").split())


def _sections(options: Mapping[str, type[BaseModel]] | None) -> dict[str, list[Setting]]:
    """Return section -> its settings, of the core and then of plugins."""
    settings = [*core_settings().values(), *plugin_settings(options or {}).values()]
    return {section: list(group) for section, group in groupby(settings, attrgetter("section"))}


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
    """Return the flag with its placeholder; ``short`` leaves out the choices, which the description has."""
    follows = "NAME" if short and "|" in setting.placeholder else setting.placeholder
    return f"{setting.flag} {follows}".rstrip()


def _row(setting: Setting, *, short: bool = False) -> tuple[str, str]:
    """Return the flag and its description, or the first clause of it (``short``)."""
    default, text = as_words(setting.default), _does(setting)
    text = text.split(". ")[0].split("; ")[0].removesuffix(".") if short else text
    return _flag(setting), text + ("" if default in ("none", "(empty)") else f" [{default}]")


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for flag, text in rows:
        head = f"  {flag:<{_LEFT}} "
        if len(flag) > _LEFT:
            yield head.rstrip()
            head = " " * (_LEFT + 3)
        first, *others = textwrap.wrap(text, _RIGHT, break_on_hyphens=False) or [""]
        yield (head + first).rstrip()
        yield from (" " * (_LEFT + 3) + line for line in others)


def _wrapped(text: str, *, indent: int, hanging: int | None = None) -> str:
    later = " " * (indent if hanging is None else hanging)
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=" " * indent, subsequent_indent=later, break_on_hyphens=False)
    return wrapper.fill(text)
