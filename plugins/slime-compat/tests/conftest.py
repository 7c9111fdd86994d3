"""Functions as users write them, in files, and the options from which adapters are made."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_compat.forms import check_rollout_functions
from slime_compat.options import PathOptions
from tests.function_paths import handed

Write = Callable[..., PathOptions]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """``write("custom_rm_path", "def f...", *flags)``: options of a run that names the file ``mine.py`` there."""
    monkeypatch.chdir(tmp_path)

    def make(setting: str, text: str, *flags: str, name: str = "", checked: bool = True) -> PathOptions:
        Path("mine.py").write_text(textwrap.dedent(text))
        options = handed([f"--{setting.replace('_', '-')}", f"mine.py{name}", *flags])
        if checked:
            check_rollout_functions(options.sources, group_rm=options.group_rm, has_model=True)
        return options

    return make
