"""The command: what it prints where, and which exit code it returns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.cli import main as command
from slime_core.cli.main import CORE_COMMANDS, main
from slime_core.errors import ServerDied
from slime_core.plugins.registry import load_plugins

HEAVY = ("torch", "ray", "megatron", "sglang", "transformers", "numpy")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_overview_names_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    printed = capsys.readouterr().out
    commands = [*command._COMMANDS, *command.added_commands(load_plugins(options=False))]
    assert [name for name in commands if f"slime {name}" not in printed] == []


def test_an_unknown_command_lists_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rum"]) == 2
    message = capsys.readouterr().err
    assert "did you mean run" in message
    added = command.added_commands(load_plugins(options=False))
    assert {*CORE_COMMANDS, *(name.split()[0] for name in added)} <= {*re.findall(r"\w+", message)}


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("run --plugin grpo --lr fast", "--lr: found 'fast'"),
        ("run --plugin grop", "did you mean grpo"),
        ("run --plugin grpo --no-plugin grop", "--no-plugin grop: "),
        ("train", "slime run"),
        ("evaluate", "slime eval"),
        ("dry-run", "slime check"),
        ("config", "slime config explain KEY"),
        ("config explain", "slime config explain KEY"),
        ("config erase", "slime config explain KEY"),
        ("check --plugin grpo --allow-plugin-change", "allow_plugin_change"),
        ("check --plugin grpo --load nowhere", "nowhere"),
        (
            "check --plugin grpo --device cpu --no-plugin models --no-plugin transformers",
            "architecture Qwen3ForCausalLM",
        ),
        ("ledger", "slime ledger"),
        ("ledger nowhere", "nowhere is not"),
        ("ledger --load x", "slime ledger --load x"),
        ("eval", "slime: eval: "),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_two(
    line: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert names in printed.err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_after_the_death_of_a_process_names_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt from ServerDied("engine 0 ended by signal 9.")

    monkeypatch.setitem(command._COMMANDS, "run", interrupted)
    assert main(["run"]) == 130
    assert "engine 0 ended by signal 9" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tis_clip", "--tis-clip", "offpolicy.tis_clip"])
def test_a_setting_of_an_installed_plugin_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", name]) == 0
    assert capsys.readouterr().out.startswith("offpolicy.tis_clip = 2\n")


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        *[(line, HEAVY) for line in ("--help", "run --help", "plugins list", "plugins show grpo", "config explain lr")],
        ("plugins trace --plugin grpo", HEAVY),
        ("check --plugin grpo", ("ray", "sglang")),
    ],
)
def test_reading_about_slime_imports_nothing_heavy(line: str, modules: tuple[str, ...]) -> None:
    code = f"""
import sys
from slime_core.cli.main import main
assert main({line.split()!r}) == 0
print([name for name in {modules!r} if name in sys.modules])"""
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


def test_help_leaves_out_a_plugin_that_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plugin", "grpo", "--no-plugin", "grpo", "--help"]) == 0
    assert "--grpo.std-normalization" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_target_that_does_not_fit_ends_a_run_before_it_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from slime_core import hookimpl\n"
        "@hookimpl\ndef slime_register(add):\n"
        "    add.reward_model('length', length)\n"
        "def length(samples): return 0\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main([command, "--plugin", "grpo", str(mine), "--rm-type", "length"]) == 2
    message = capsys.readouterr().err
    assert "reward model length" in message or "'length'" in message
    assert str(mine) in message
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


# --- slime plugins trace ----------------------------------------------------------------------------------------------


FIRST = """
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.reward_model("length", f"{__name__}:Length")

@hookimpl
def slime_run_start(run, options):
    pass
"""
SECOND = "from slime_core import hookimpl\n\n@hookimpl\ndef slime_run_start():\n    pass\n"


@pytest.fixture
def traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    (tmp_path / "first.py").write_text(FIRST)
    (tmp_path / "second.py").write_text(SECOND)
    (tmp_path / "run.toml").write_text('[rollout]\nrm_type = "length"\n')
    plugins = ["grpo", str(tmp_path / "second.py"), str(tmp_path / "first.py")]
    assert main(["plugins", "trace", "--config", str(tmp_path / "run.toml"), "--plugin", *plugins]) == 0
    return capsys.readouterr().out.replace(str(tmp_path), "HERE").splitlines()


def row_of(rows: list[str], hook: str) -> int:
    return next(place for place, row in enumerate(rows) if row.split()[:1] == [hook])


def test_hooks_are_traced_in_the_order_in_which_the_run_calls_them(traced: list[str]) -> None:
    place = row_of(traced, "slime_run_start")
    first, second = traced[place + 1 : place + 3]
    assert first.endswith("  HERE/first.py:8")
    assert second.endswith("  HERE/second.py:3")


def test_a_hook_without_implementations_says_so(traced: list[str]) -> None:
    assert "(no plugin)" in traced[row_of(traced, "slime_after_train_step")]


def test_components_are_traced_with_what_selected_them(traced: list[str]) -> None:
    rows = traced[traced.index("components") + 1 :]
    selected = {
        "single_turn": "generate_function",
        "length": "run.toml:2",
        "grpo": "plugin grpo",
        "clipped": "estimator grpo",
        "qwen3": "Qwen3ForCausalLM",
    }
    for component, cause in selected.items():
        assert any(f" {component}, by " in row and cause in row for row in rows), component


def test_functions_named_by_path_stand_under_the_component_that_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rm.py").write_text("async def f(args, sample): return 0.0\ndef initialize(args): ...\n")
    Path("run.toml").write_text('[run]\nplugins = ["grpo"]\n[custom]\ncustom_rm_path = "rm.py:f"\n')
    assert main(["plugins", "trace", "run.toml", "--custom-megatron-init-path", "rm.py:initialize"]) == 0
    rows = capsys.readouterr().out.splitlines()
    place = next(place for place, row in enumerate(rows) if row.startswith("  reward model custom_rm_path, "))
    assert rows[place + 1] == "    plugin 'compat' (slime-compat 0.1.0): slime_compat.reward:PathReward"
    assert "--custom-rm-path rm.py:f" in rows[place + 2]
    assert "--custom-megatron-init-path rm.py:initialize" in rows[-1]
