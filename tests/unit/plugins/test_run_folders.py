"""The settings of a run folder, which may be a stranger's, name code: nothing is imported until the flags repeat it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_core.checkpoint.folder import RunState, drafted, write_state
from slime_core.cli.activation import resolve
from slime_core.cli.main import main
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import PluginError
from tests.plugin_files import Site

EVIL = """
from pathlib import Path
from slime_core import hookimpl

Path({trace!r}).touch()

@hookimpl
def slime_run_start(): ...

def reward(args, sample):
    return 1.0
"""

Settings = Callable[[str], None]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site) -> Settings:
    """Writes the settings of a run folder with a checkpoint; ``evil.py`` and module ``evil_p.plugin`` write ``ran``."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    with drafted(folder / "checkpoints", 4) as draft:
        (draft / "hf").symlink_to(ARITHMETIC / "model")
        write_state(draft, RunState(4))
    site.install("evil", EVIL.format(trace=str(tmp_path / "ran")), points={})
    (folder / "evil.py").write_text(EVIL.format(trace=str(tmp_path / "ran")))

    def write(text: str) -> None:
        (folder / "config.toml").write_text(text)

    return write


NAMED = {
    "a file": '[run]\nplugins = ["grpo", "./evil.py"]\n',
    "a module": '[run]\nplugins = ["grpo", "evil_p.plugin"]\n',
    "a function in a file": '[run]\nplugins = ["grpo"]\n[compat]\ncustom_rm_path = "evil.py:reward"\n',
    "a function in a module": '[run]\nplugins = ["grpo"]\n[compat]\ncustom_rm_path = "evil_p.plugin.reward"\n',
    "code of a model": '[run]\nplugins = ["grpo"]\n[model]\ntrust_remote_code = true\n',
    "code of an engine": '[run]\nplugins = ["grpo"]\n[sglang]\ncustom_weight_loader = ["evil_p.plugin.reward"]\n',
}
RUNS = ("a file", "a module")
"""Code that ``slime config show`` imports once the command line names it."""


@pytest.mark.parametrize("code", NAMED)
def test_code_is_refused_and_runs_with_the_flags_that_the_error_prints(
    settings: Settings, tmp_path: Path, code: str
) -> None:
    settings(NAMED[code])
    with pytest.raises(PluginError) as refused:
        resolve(["--load", "run"])
    assert not (tmp_path / "ran").exists()
    flags = re.search(r"command line: (.*)$", str(refused.value))
    assert flags is not None
    resolve(["--load", "run", *shlex.split(flags[1])])
    assert (tmp_path / "ran").exists() is (code in RUNS)


@pytest.mark.parametrize("code", ["a file", "a function in a file"])
@pytest.mark.parametrize(
    "words",
    [
        "check --load run",
        "run --load run",
        "run --config run/config.toml",
        "eval run",
        "check run/config.toml",
        "config show --load run",
        "config explain lr --load run",
        "plugins trace --load run",
    ],
)
def test_no_command_imports_it(
    settings: Settings, tmp_path: Path, words: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(NAMED[code])
    assert main(words.split()) == 2
    assert "evil.py" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_installed_plugins_need_no_flags(settings: Settings) -> None:
    settings('[run]\nplugins = ["grpo"]\n')
    assert list(resolve(["--load", "run"])[1].registry.loaded) == ["core", "datasets", "models", "grpo"]


def test_other_plugins_on_the_command_line_replace_those_of_the_folder(settings: Settings, tmp_path: Path) -> None:
    settings(NAMED["a file"])
    resolve(["--load", "run", "--plugin", "grpo"])
    assert not (tmp_path / "ran").exists()


def test_a_file_of_settings_elsewhere_names_code_without_further_words(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[run]\nplugins = ["grpo", "run/evil.py"]\n')
    resolve(["--config", "mine.toml"])
    assert (tmp_path / "ran").exists()
