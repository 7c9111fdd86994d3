"""Reads a command line: its settings, and the plugins that take part.

A run folder may come from a stranger, and its ``config.toml`` may name code: files and modules as plugins, functions by
path, model folders with code. Such code runs only if the command line names it again. A file that the user names with
``--config``, and that is in no run folder, needs no such repetition.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from slime_core.checkpoint.folder import find
from slime_core.cli.hub import Downloads
from slime_core.cli.memory import with_memory_defaults
from slime_core.cli.preflight import computes_on_gpus, finds_gpus, print_warning
from slime_core.components.functions import with_functions
from slime_core.components.selection import check_selection, check_settings
from slime_core.config.engine_flags import FlagAdvice, use_advice
from slime_core.config.load import Peek, Resolved, load, peek
from slime_core.config.model_config import architecture_of
from slime_core.config.settings import as_words, core_settings
from slime_core.config.sources import read_command_line
from slime_core.errors import PluginError
from slime_core.plugins.activation import ActivePlugins, activate_line
from slime_core.plugins.discovery import Plugin, is_path, short_name
from slime_core.plugins.loading import load_attribute, next_step
from slime_core.plugins.registry import Registry, load_plugins
from slime_core.user_code.failures import boundary

ENGINE_CODE = ("custom_weight_loader", "forward_hooks")
"""SGLang's flags that name functions which an engine imports."""


def resolve(
    argv: Sequence[str], *, purpose: Literal["run", "eval"] = "run", checks: bool = True
) -> tuple[Resolved, ActivePlugins]:
    """Return the settings and the plugins of a command line.

    Arguments:
        checks: check rules, and require a plugin for the model. False returns the settings of all plugins.
    """
    trains = purpose == "run"
    argv = with_settings_of_loaded_run(argv) if trains else argv
    downloads = Downloads(argv) if checks else None
    argv = argv if downloads is None else downloads.argv
    line = peek(argv)
    active = activate_peeked(line, builds_model=checks and not line.debug_rollout_only)
    plugins = active.for_load if checks else {**active.for_load, "takes_part": None}
    resolved = load(argv, **plugins, purpose=purpose, check_rules=checks, finds_gpus=finds_gpus)
    if downloads is None:
        return resolved, active
    downloads.finish()
    _refuse_unnamed(_code_of_settings(resolved), line)
    if trains and computes_on_gpus(resolved.config):
        resolved = with_memory_defaults(resolved, active.registry)
    check_selection(resolved.config, active.registry, trains=trains, options=resolved.plugin_options)
    architecture = architecture_of(resolved.config.model.hf_checkpoint)
    check_settings(resolved, active.registry, architecture=architecture, code=active.functions, trains=trains)
    return resolved, active


def activate_peeked(line: Peek, *, builds_model: bool) -> ActivePlugins:
    """Load the plugins, and decide which take part in the run of a command line. Warn of plugins that do not load.

    Raises:
        PluginError: a named plugin cannot be loaded, no plugin offers a component of the run, or a run folder names
            code that the command line does not name.
    """
    left_out = set(map(short_name, line.no_plugins))
    names = [name for name in line.plugins if short_name(name) not in left_out]
    if any(map(is_path, names)) and "--plugin" not in line.flags:
        _refuse_unnamed([f"--plugin {shlex.join(names)}"], line)
    loaded = load_plugins(line.plugins, without=line.no_plugins, in_file=line.in_file)
    prepare_flags(loaded)
    architecture = architecture_of(line.hf_checkpoint) if builds_model else None
    active = activate_line(line, loaded=loaded, architecture=architecture)
    code = active.uses.code if active.uses else ()
    _refuse_unnamed((f"{entry.flag} {entry.path}" for entry in code if entry.flag not in line.flags), line)
    for problem in loaded.broken.values():
        print_warning(str(problem))
    return with_functions(active)


def prepare_flags(loaded: Registry) -> None:
    """Let the loaded plugins explain flags of other tools."""
    paths = ((entry.plugin, entry.added.advice) for entry in loaded.loaded.values())
    use_advice(partial(_advice, plugin, path) for plugin, path in paths if path is not None)


def _advice(plugin: Plugin, path: str) -> Mapping[str, FlagAdvice]:
    with boundary(plugin, f"calling {path}", next_step=next_step(plugin), locate=True):
        advice = dict(load_attribute(path)())
        for flag, message in advice.items():
            if not (isinstance(message, str) or callable(message)):
                raise TypeError(f"the advice on {flag} is neither a text nor a function")
        return advice


def with_leading_config(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` with ``--config`` before a leading file name."""
    return [*argv] if not argv or argv[0].startswith("-") else ["--config", *argv]


def with_settings_of_loaded_run(argv: Sequence[str]) -> list[str]:
    """Return ``argv``; if it has ``--load`` without ``--config``, add the settings of the run that is resumed.

    Raises:
        ConfigError: the folder to load holds no checkpoint.
    """
    line = read_command_line(argv, core_settings())
    folder = Path(*line.words.get("load", [])).expanduser()
    if line.config or "load" not in line.words or not folder.is_dir():
        return list(argv)
    home = find(folder).home
    return [*argv] if home is None else [*argv, "--config", str(home / "config.toml")]


# --- Code that a run folder names -------------------------------------------------------------------------------------


def _refuse_unnamed(flags: Iterator[str] | Sequence[str], line: Peek) -> None:
    """Raise PluginError if a run folder's settings name code that the command line does not name.

    Arguments:
        flags: the flags that would name the code on the command line.
    """
    unnamed = list(dict.fromkeys(flags))
    if line.config is None or not unnamed:
        return
    folder = line.config.parent
    if (folder / "plugins.json").exists() or any((folder / "checkpoints").glob("*/state.json")):
        raise PluginError(
            f"{line.config} is in a run folder and names code, none of which has been imported. Read the code. To run "
            f"it, repeat its flags on the command line: {' '.join(unnamed)}"
        )


def _code_of_settings(resolved: Resolved) -> Iterator[str]:
    """Yield the flags of settings from a file that let transformers or an engine import code."""
    for key, (setting, value) in resolved.values().items():
        if resolved.provenance[key].layer != "file" or not value:
            continue
        named = (setting.name, value) if setting.section == "sglang" else value
        if setting.name == "trust_remote_code":
            yield setting.flag
        elif setting.section in ("engine", "eval", "sglang") and _names_engine_code(named):
            yield f"{setting.flag} {shlex.quote(as_words(value))}"


def _names_engine_code(value: object) -> bool:
    """Return whether a flag of :data:`ENGINE_CODE` is anywhere in ``value``."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] in ENGINE_CODE:
        return True
    return isinstance(value, BaseModel | tuple) and any(map(_names_engine_code, value))
