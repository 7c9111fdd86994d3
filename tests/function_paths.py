"""Runs that name functions of one file, for tests of slime-compat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_compat.options import PathOptions
from slime_core.config.load import Resolved, load, peek
from slime_core.plugins.activation import ActivePlugins, activate
from slime_core.plugins.construction import prepare_options


def resolve(argv: Sequence[str]) -> tuple[Resolved, ActivePlugins]:
    """The settings and plugins of a command line; neither rules nor a model are looked at."""
    seen = peek(argv)
    active = activate(seen.plugins, choices=seen.choices, flags=seen.flags, code=seen.code, without=seen.no_plugins)
    return load(argv, **active.for_settings, check_rules=False), active


def handed(argv: Sequence[str]) -> PathOptions:
    """What the adapters of a run with these flags are made with."""
    resolved, active = resolve(argv)
    options = prepare_options(resolved.config, active.registry, resolved.plugin_options, active.functions)["compat"]
    assert isinstance(options, PathOptions)
    return options


def options_for(folder: Path, code: str, *, settings: tuple[str, ...] = (), **paths: str) -> PathOptions:
    """The options of a run that names functions of one file: ``options_for(tmp_path, CODE, spec="layers")``."""
    file = folder / "mine.py"
    file.write_text(code)
    words = {name: [f"{file}:{function}"] for name, function in paths.items()}
    if "spec" in words:
        words["spec"] = [str(file), paths["spec"]]
    flags = [word for name, value in words.items() for word in (f"--{name.replace('_', '-')}", *value)]
    return handed([*settings, *flags])
