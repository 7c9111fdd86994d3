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


def row_of(rows: list[str], hook: str) -> int:
    return next(place for place, row in enumerate(rows) if row.split()[:1] == [hook])


def test_hooks_are_traced_in_the_order_in_which_the_run_calls_them(traced: list[str]) -> None:
    place = row_of(traced, "slime_run_start")
    first, second = traced[place + 1 : place + 3]
    assert first.endswith("  HERE/second.py:3")
    assert second.endswith("  HERE/first.py:8")


def test_a_hook_without_implementations_says_so(traced: list[str]) -> None:
    for hook in ("slime_after_train_step", "slime_register_trackers"):
        assert "(no plugin)" in traced[row_of(traced, hook)]


def test_declarations_are_traced_with_version_file_and_line(traced: list[str]) -> None:
    place = row_of(traced, "slime_presets")
    assert traced[place + 1].startswith("    1. grpo (slime-grpo 0.1.0)  ")
    assert "/slime_grpo/plugin.py:" in traced[place + 1]


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
    assert rows[place + 1] == "    compat (slime-compat 0.1.0): slime_compat.reward:PathReward"
    assert "--custom-rm-path rm.py:f" in rows[place + 2]
    assert "--custom-megatron-init-path rm.py:initialize" in rows[-1]
