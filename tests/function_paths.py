"""Runs that name functions of one file, for tests of slime-compat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_compat.paths import PathOptions
from slime_core.cli.activation import activate_peeked
from slime_core.components.construction import prepare_options
from slime_core.config.load import Resolved, load, peek
from slime_core.plugins.activation import ActivePlugins


def resolve(argv: Sequence[str]) -> tuple[Resolved, ActivePlugins]:
    """Return the settings and plugins of a command line, without checking rules or the model."""
    active = activate_peeked(peek(argv), builds_model=False)
    return load(argv, **active.for_load, check_rules=False), active


def handed(argv: Sequence[str]) -> PathOptions:
    """Return the options that adapters get in a run with these flags."""
    resolved, active = resolve(argv)
    options = prepare_options(resolved.config, active.registry, resolved.plugin_options, active.functions)["compat"]
    assert isinstance(options, PathOptions)
    return options


def options_for(folder: Path, code: str, *, settings: tuple[str, ...] = (), **paths: str) -> PathOptions:
    """Return the options of a run that names functions of one file: ``options_for(tmp_path, CODE, spec="layers")``."""
    file = folder / "mine.py"
    file.write_text(code)
    words = {name: [f"{file}:{function}"] for name, function in paths.items()}
    if "spec" in words:
        words["spec"] = [str(file), paths["spec"]]
    flags = [word for name, value in words.items() for word in (f"--{name.replace('_', '-')}", *value)]
    return handed([*settings, *flags])
