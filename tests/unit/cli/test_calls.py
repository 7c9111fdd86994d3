"""``slime plugins trace``: who is called for each hook, in order, and what selects each component."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.main import main

FIRST = """
from slime_core import Component, hookimpl

@hookimpl
def slime_register_reward_models():
    yield Component("length", target=f"{__name__}:Length")

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


def test_hooks_are_traced_in_the_order_in_which_the_run_calls_them(traced: list[str]) -> None:
    place = traced.index("  slime_run_start                          on driver; participant")
    first, second = traced[place + 1 : place + 3]
    assert first.startswith("    1. second (HERE/second.py sha256:")
    assert first.endswith("  HERE/second.py:3")
    assert second.startswith("    2. first (HERE/first.py sha256:")
    assert second.endswith("  HERE/first.py:8")


def test_a_hook_without_implementations_says_so(traced: list[str]) -> None:
    assert "  slime_after_train_step                   on every rank; observer  (no plugin)" in traced
    assert "  slime_register_trackers                    (no plugin)" in traced


def test_declarations_are_traced_with_version_file_and_line(traced: list[str]) -> None:
    place = traced.index("  slime_presets")
    assert traced[place + 1].startswith("    1. grpo (slime-grpo 0.1.0)  ")
    assert "/slime_grpo/plugin.py:" in traced[place + 1]


def test_components_are_traced_with_what_selected_them(traced: list[str]) -> None:
    rows = traced[traced.index("components") + 1 :]
    assert "  generate function single_turn, by default of generate_function" in rows
    assert "  reward model length, by rm_type (file run.toml:2)" in rows
    assert "  advantage estimator grpo, by advantage_estimator (preset of plugin grpo)" in rows
    assert "  policy loss clipped, by advantage estimator grpo" in rows
    assert "  model spec qwen3, by architecture Qwen3ForCausalLM" in rows


def test_functions_named_by_path_stand_under_the_component_that_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rm.py").write_text("async def f(args, sample): return 0.0\ndef initialize(args): ...\n")
    Path("run.toml").write_text('[run]\nplugins = ["grpo"]\n[custom]\ncustom_rm_path = "rm.py:f"\n')
    assert main(["plugins", "trace", "run.toml", "--custom-megatron-init-path", "rm.py:initialize"]) == 0
    rows = capsys.readouterr().out.splitlines()
    place = next(place for place, row in enumerate(rows) if row.startswith("  reward model custom_rm_path, "))
    assert rows[place + 1] == "    compat (slime-compat 0.1.0): slime_compat.reward:PathReward"
    assert rows[place + 2].startswith("    --custom-rm-path rm.py:f  (rm.py sha256:")
    assert rows[-2] == "functions that other settings name by path"
    assert rows[-1].startswith("    --custom-megatron-init-path rm.py:initialize  (rm.py sha256:")


def test_help_of_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "trace", "--help"]) == 0
    assert capsys.readouterr().out.startswith("slime plugins trace CONFIG.toml [flags of slime run]\n")
