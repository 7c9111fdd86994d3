"""The command: what it prints where, and which exit code it returns."""

from __future__ import annotations

import subprocess
import sys

import pytest

import slime_core
from slime_core.cli import main as command
from slime_core.cli.main import main

HEAVY = ("torch", "ray", "megatron", "sglang", "transformers", "numpy")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_overview_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert [name for name in command._COMMANDS if f"slime {name}" not in printed] == []


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"slime {slime_core.__version__}\n"


def test_a_mistake_is_a_message_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plugin", "grpo", "--lr", "fast"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("slime: 1 mistake in the settings:\n  - --lr: found 'fast'; accepted: a number")


def test_an_unknown_command_lists_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    assert "'rum' is no command; commands are run, eval, plugins, config" in capsys.readouterr().err


def test_an_unknown_plugin_is_a_message_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plugin", "grop"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


def test_an_interrupt_returns_what_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(command._COMMANDS, "run", interrupted)
    assert main(["run"]) == 130


def test_help_of_run_shows_options_of_the_named_plugin_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    assert "--grpo." not in capsys.readouterr().out
    assert main(["run", "--plugin", "grpo", "--help"]) == 0
    assert "--grpo.std-normalization" in capsys.readouterr().out


def test_help_of_run_takes_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "watch"]) == 0
    assert capsys.readouterr().out.startswith("[watch] Limits on waiting")


def test_a_setting_is_explained_with_the_flags_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "advantage_estimator", "--plugin", "grpo"]) == 0
    assert capsys.readouterr().out.startswith("algorithm.advantage_estimator = grpo\n  from     preset of plugin grpo")


@pytest.mark.parametrize("words", [[], ["explain"], ["erase"]])
def test_config_without_a_known_verb_says_what_it_takes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *words]) == 2
    assert "slime config explain KEY" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["plugins", "list"], ["run", "--help"], ["config", "explain", "lr"]])
def test_reading_about_slime_imports_nothing_heavy(words: list[str]) -> None:
    code = f"""
import sys
from slime_core.cli.main import main
assert main({words!r}) == 0
print([name for name in {HEAVY!r} if name in sys.modules])"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"


def test_the_package_runs_as_a_module() -> None:
    words = [sys.executable, "-m", "slime_core", "--version"]
    finished = subprocess.run(words, capture_output=True, text=True, check=True)
    assert finished.stdout.startswith("slime ")
