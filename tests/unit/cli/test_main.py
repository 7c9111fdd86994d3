"""The command: what it prints where, and which exit code it returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import slime_core
from slime_core.cli import main as command
from slime_core.cli.main import CORE_COMMANDS, added, main
from slime_core.errors import ServerDied

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
    assert "--lr: found 'fast'" in captured.err


def test_an_unknown_command_lists_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    message = capsys.readouterr().err
    assert "did you mean run" in message
    assert all(command in message for command in (*CORE_COMMANDS, *(one.words[0] for one in added())))


@pytest.mark.parametrize(("word", "command"), [("train", "run"), ("evaluate", "eval"), ("dry-run", "check")])
def test_a_command_of_another_tool_is_answered_with_ours(capsys, word: str, command: str) -> None:
    assert main([word]) == 2
    assert f"slime {command}" in capsys.readouterr().err


def test_an_unknown_plugin_is_a_message_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plugin", "grop"]) == 2
    assert "did you mean 'grpo'" in capsys.readouterr().err


def test_an_interrupt_returns_what_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(command._COMMANDS, "run", interrupted)
    assert main(["run"]) == 130


def test_an_interrupt_after_the_death_of_a_process_names_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt from ServerDied("engine 0 ended by signal 9.")

    monkeypatch.setitem(command._COMMANDS, "run", interrupted)
    assert main(["run"]) == 130
    assert "engine 0 ended by signal 9" in capsys.readouterr().err


def test_help_of_run_shows_options_of_the_named_plugin_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    assert "--grpo." not in capsys.readouterr().out
    assert main(["run", "--plugin", "grpo", "--help"]) == 0
    assert "--grpo.std-normalization" in capsys.readouterr().out


def test_help_of_run_takes_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "watch"]) == 0
    assert capsys.readouterr().out.startswith("[watch] Limits on waiting")


def test_a_setting_is_explained_with_related_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "advantage_estimator", "--plugin", "grpo"]) == 0
    assert capsys.readouterr().out.startswith("algorithm.advantage_estimator = grpo\n")


@pytest.mark.parametrize("name", ["tis_clip", "--tis-clip", "offpolicy.tis_clip"])
def test_a_setting_of_a_plugin_that_is_not_active_is_explained_once_the_plugin_is_named(name, capsys):
    assert main(["config", "explain", name]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"slime: {name}: ")
    assert "of plugin 'offpolicy' (slime-offpolicy" in message
    assert "--plugin offpolicy" in message
    assert main(["config", "explain", name, "--plugin", "offpolicy"]) == 0
    assert capsys.readouterr().out.startswith("offpolicy.tis_clip = 2\n")


@pytest.mark.parametrize("words", [[], ["explain"], ["erase"]])
def test_config_without_a_known_verb_says_what_it_takes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *words]) == 2
    assert "slime config explain KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["plugins", "list"],
        ["plugins", "show", "grpo"],
        ["plugins", "trace", "--plugin", "grpo"],
        ["run", "--help"],
        ["config", "explain", "lr"],
    ],
)
def test_reading_about_slime_imports_nothing_heavy(words: list[str]) -> None:
    code = f"""
import sys
from pathlib import Path
from slime_core.cli.main import CORE_COMMANDS, added, main
assert main({words!r}) == 0
print([name for name in {HEAVY!r} if name in sys.modules])"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"


def test_help_comes_with_a_broken_plugin_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "mine.py"
    broken.write_text("import no_such_thing")
    assert main(["run", "--plugin", str(broken), "grpo", "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("slime run [--plugin NAME]")
    assert f"'mine' ({broken} sha256" in shown.err
    assert "'no_such_thing'" in shown.err


@pytest.mark.parametrize("written", ["grpo", "slime-grpo:grpo", "Slime_GRPO:grpo"])
def test_help_leaves_out_what_is_taken_away_however_it_is_written(
    written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--plugin", "grpo", "--no-plugin", written, "--help"]) == 0
    assert "--grpo.std-normalization" not in capsys.readouterr().out


def test_help_shows_an_option_under_its_plugin_s_name_and_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plugin", "grpo", "--help"]) == 0
    before, title, after = capsys.readouterr().out.partition("[grpo] options of plugin grpo")
    assert "grpo." not in before
    assert title
    assert "--grpo.std-normalization" in after


def test_eval_without_an_argument_asks_what_to_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("slime: eval: ")


def test_a_target_that_does_not_fit_ends_a_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from slime_core import Component, hookimpl\n"
        "@hookimpl\ndef slime_register_reward_models():\n"
        "    yield Component('length', target=f'{__name__}:length')\n"
        "def length(samples): return 0\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--plugin", "grpo", str(mine), "--rm-type", "length"]) == 2
    message = capsys.readouterr().err
    assert "reward model length" in message or "'length'" in message
    assert str(mine) in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
