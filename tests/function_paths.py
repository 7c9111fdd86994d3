"""Options of a run that names functions of one file, for tests of the learner's side of slime-compat."""

from __future__ import annotations

from pathlib import Path

from slime_compat.options import PathOptions
from slime_core.config.load import load
from slime_core.plugins.construction import run_plan
from slime_core.plugins.functions import find_function


def options_for(folder: Path, code: str, *, settings: tuple[str, ...] = (), **paths: str) -> PathOptions:
    """The options of a run that names functions of one file: ``options_for(tmp_path, CODE, spec="layers")``."""
    file = folder / "mine.py"
    file.write_text(code)
    sources = {name: (find_function(f"{file}:{function}", setting=name),) for name, function in paths.items()}
    return PathOptions(plan=run_plan(load(settings, check_rules=False).config), sources=sources)
