"""A command does not import code that another user's run folder names; the user's own needs no confirmation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.checkpoint.folder import RunState, drafted, write_state
from slime_core.cli.activation import remember, resolve
from slime_core.cli.main import main
from slime_core.config.schema import ARITHMETIC

EVIL = """
from pathlib import Path
from slime_core import hookimpl

Path({trace!r}).touch()

@hookimpl
def slime_run_start():
    pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of a stranger, with a checkpoint and a plugin that leaves a trace; its user has run nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    with drafted(folder / "checkpoints", 4) as draft:
        (draft / "hf").symlink_to(ARITHMETIC / "model")
        write_state(draft, RunState(4))
    (folder / "evil.py").write_text(EVIL.format(trace=str(folder / "ran")))
    settings(folder, '[run]\nplugins = ["grpo", "evil.py"]\n')
    return folder


def settings(run: Path, text: str) -> None:
    (run / "config.toml").write_text(text)


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["check", "--load", "run"],
        ["run", "--load", "run"],
        ["eval", "run"],
        ["check", "run/config.toml"],
        ["config", "show", "--load", "run"],
        ["config", "explain", "lr", "--load", "run"],
        ["plugins", "trace", "--load", "run"],
        ["plugins", "lock", "--load", "run"],
    ],
)
def test_no_command_imports_a_plugin_of_a_strangers_run(
    run: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(words, capsys)
    assert f"  {run}/evil.py (sha256 " in message
    assert "--plugin" in message
    assert not (run / "ran").exists()


def test_a_plugin_that_the_command_line_names_is_imported(run: Path) -> None:
    resolve(["--load", "run", "--plugin", "grpo", "--plugin", "run/evil.py"])
    assert (run / "ran").exists()


def test_code_that_a_run_of_this_user_had_needs_no_further_words_until_it_changes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolved, active = resolve(["--plugin", "grpo", "--plugin", "run/evil.py"])
    remember(active.manifest, resolved)
    assert main(["config", "show", "--load", "run"]) == 0
    (run / "evil.py").write_text("import os\n")
    assert "evil.py" in refused(["config", "show", "--load", "run"], capsys)


def test_a_function_that_a_strangers_run_names_by_path_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(run, f'[run]\nplugins = ["grpo"]\n[compat]\ncustom_rm_path = "{run}/evil.py:reward"\n')
    message = refused(["check", "--load", "run"], capsys)
    assert "--custom-rm-path" in message
    assert not (run / "ran").exists()


def test_code_in_the_model_folder_of_a_strangers_run_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = run / "model"
    model.mkdir()
    (model / "modeling_evil.py").write_text(EVIL)
    (model / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "auto_map": {"AutoConfig": "stranger/repo--evil.Config"}})
    )
    settings(run, f'[run]\nplugins = ["grpo"]\n[model]\ntrust_remote_code = true\nref_load = "{model}"\n')
    words = ["config", "show", "--load", "run", "--use-kl-loss", "--kl-loss-coef", "0.1"]
    message = refused(words, capsys)
    assert f"  {model}/modeling_evil.py, by trust_remote_code (sha256 " in message
    assert f"  stranger/repo--evil.Config of {model}/config.json, by trust_remote_code (sha256 " in message
    assert "--trust-remote-code" in message
    assert main([*words, "--trust-remote-code"]) == 0
    resolved, active = resolve([*words[2:], "--trust-remote-code"])
    remember(active.manifest, resolved)
    assert main(words) == 0


def test_functions_that_an_engine_imports_for_a_strangers_run_are_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings(run, '[run]\nplugins = ["grpo"]\n[sglang]\ncustom_weight_loader = ["os.system"]\n')
    message = refused(["check", "--load", "run"], capsys)
    assert "custom_weight_loader = ('os.system',)" in message


def test_a_settings_file_of_ones_own_names_code_without_further_words(run: Path) -> None:
    (run.parent / "mine.toml").write_text('[run]\nplugins = ["grpo", "run/evil.py"]\n')
    assert main(["config", "show", "--config", "mine.toml"]) == 0
