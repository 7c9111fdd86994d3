"""``slime check`` of runs that only generate or only train, and of their rollout files; nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.cli.main import main
from slime_core.rollout.rollout_files import Recorded, write_rollout
from slime_core.types import Sample, Status

TRAINED = Sample(
    group_index=0,
    index=0,
    tokens=[5, 6],
    response_length=1,
    rollout_log_probs=[-0.5],
    reward=1.0,
    status=Status.COMPLETED,
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


def check(*words: str) -> int:
    return main(["check", "--plugin", "grpo", "--device", "cpu", *words])


def test_training_alone_is_planned_without_engines_router_and_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    for rollout in (0, 1):
        write_rollout(Path(f"{rollout}.jsonl"), Recorded(rollout, 1.0, [TRAINED]))
    assert check("--load-debug-rollout-data", "{rollout_id}.jsonl", "--num-rollout", "2") == 0
    printed = capsys.readouterr().out
    assert " = 1 bundles" in printed
    assert "learner rank 0" in printed
    assert "engine 0" not in printed
    assert "debug_train_only" in printed
    assert f"{Path.cwd()}/{{rollout_id}}.jsonl" in printed


def test_generating_alone_is_planned_without_a_learner(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--debug-rollout-only") == 0
    printed = capsys.readouterr().out
    assert "engine 0" in printed
    assert "learner rank 0" not in printed
    assert "debug_rollout_only" in printed


def test_generating_alone_needs_no_plugin_that_builds_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--no-plugin", "models") == 2
    assert "architecture Qwen3ForCausalLM needs plugin 'models'" in capsys.readouterr().err
    assert check("--no-plugin", "models", "--debug-rollout-only") == 0
    assert "plugins: core 0.1.0, grpo 0.1.0\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [((), "num_rollout = 80"), (("--num-rollout", "1", "--rollout-temperature", "0.5"), "rollout_temperature")],
)
def test_wrong_rollout_files_are_errors_of_the_user(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rollout(Path("0.jsonl"), Recorded(0, 1.0, [TRAINED]))
    assert check("--load-debug-rollout-data", "{rollout_id}.jsonl", *words) == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert "Traceback" not in errors


def test_a_token_beyond_the_vocabulary_of_the_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write_rollout(Path("0.jsonl"), Recorded(0, 1.0, [Sample(**{**_fields(TRAINED), "tokens": [5, 151_643]})]))
    assert check("--load-debug-rollout-data", "0.jsonl", "--num-rollout", "1") == 2
    assert "0.jsonl, line 2: token 151643" in capsys.readouterr().err


def _fields(sample: Sample) -> dict[str, object]:
    return {name: getattr(sample, name) for name in ("response_length", "rollout_log_probs", "reward", "status")}
