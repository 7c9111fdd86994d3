"""A resume that cannot be as requested is refused before anything of the run folder changes; what it changes is shown.

The processes of the run are left out: the run that is resumed has a real checkpoint state with the place of the
built-in data source.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint.folder import RunState, drafted, write_state
from slime_core.cli.main import main
from slime_core.config.schema import ARITHMETIC
from slime_core.errors import CheckpointError
from slime_core.plugins.contracts import PromptRequest
from slime_core.prompts.numbered import Held, NumberedPrompts
from slime_core.runtime import launch

SETTINGS = ("--plugin", "grpo", "--device", "cpu", "--num-rollout", "4", "--n-samples-per-prompt", "8")
ROWS = "".join(json.dumps({"step": step, "train/loss": 0.5}) + "\n" for step in range(3))


def place(prompts: Path, *, size: int = 8, seed: int = 1234) -> dict[str, Any]:
    request = PromptRequest(prompts, "prompt", "label", n_samples_per_prompt=size, shuffle=True, seed=seed)
    source = NumberedPrompts(Held(request), request)
    source.next_groups(4)
    return source.state()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The checkpoints that starts of the run were to continue from; a test may put an error in front."""
    found: list[Any] = []

    def start(job: Any, *, track: Any, resume: Any = None) -> RunState:
        if found and isinstance(found[0], Exception):
            raise found[0]
        found.append(None if resume is None else resume.state.step)
        track.record.begin()
        return RunState(4)

    monkeypatch.setattr(launch, "run", start)
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> Path:
    """A run of 3 steps with checkpoints after steps 2 and 3, and the prompts that it was given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    prompts = tmp_path / "prompts.jsonl"
    rows = (ARITHMETIC / "data" / "train.jsonl").read_text().splitlines()[:100]  # a start reads every prompt
    prompts.write_text("\n".join(rows) + "\n")
    assert main(["run", *SETTINGS, "--prompt-data", "prompts.jsonl", "--output-dir", "r"]) == 0
    seen.clear()
    for step in (2, 3):
        with drafted(tmp_path / "r" / "checkpoints", step) as draft:
            shutil.copytree(ARITHMETIC / "model", draft / "hf")
            cursor = {"ledger": {}, "source": place(prompts), "in_flight": []}
            write_state(draft, RunState(step, cursor, json.loads((tmp_path / "r" / "plugins.json").read_text())))
    (tmp_path / "r" / "metrics.jsonl").write_text(ROWS)
    return tmp_path / "r"


def content(folder: Path) -> Mapping[str, str]:
    """What a later resume reads: everything but the lock and TensorBoard's empty files."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tensorboard"]
    names = {path.relative_to(folder).as_posix(): path for path in files if path.name != "run.lock"}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(names.items())}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", ("--n-samples-per-prompt", "4")),
        ("check", ("--seed", "4")),
        ("run", ("--no-rollout-shuffle",)),
        ("run", ("--load", "r/checkpoints/step-000002", "--seed", "4")),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else words,
)
def test_a_resume_whose_place_in_the_data_would_mean_other_prompts_changes_nothing(
    run: Path, seen: list[Any], capsys: pytest.CaptureFixture[str], command: str, words: tuple[str, ...]
) -> None:
    before = content(run)
    assert main([command, *(() if "--load" in words else ("--load", "r")), *words]) == 2
    errors = capsys.readouterr().err
    assert words[-2 if words[-1] == "4" else -1].replace("--no-", "--") in errors
    assert "Traceback" not in errors
    assert content(run) == before
    assert seen == []
    assert main(["run", "--load", "r"]) == 0
    assert seen == [3]


@pytest.mark.parametrize("command", ["run", "check"])
def test_other_prompts_and_another_model_are_refused_too(
    run: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 64)
    shutil.copytree(ARITHMETIC / "model", tmp_path / "model")
    wide = json.loads((tmp_path / "model" / "config.json").read_text())
    wide["num_hidden_layers"] += 1
    (tmp_path / "model" / "config.json").write_text(json.dumps(wide))
    before = content(run)
    assert main([command, "--load", "r", "--prompt-data", "other.jsonl"]) == 2
    assert "other.jsonl" in capsys.readouterr().err
    assert main([command, "--load", "r", "--hf-checkpoint", "model"]) == 2
    assert "num_hidden_layers" in capsys.readouterr().err
    assert content(run) == before


def test_a_refusal_that_comes_only_from_the_processes_changes_nothing(run: Path, seen: list[Any]) -> None:
    before = content(run)
    seen.append(CheckpointError("a data source of a plugin refuses its state"))
    assert main(["run", "--load", "r/checkpoints/step-000002", "--lr", "0.5"]) == 1
    assert content(run) == before


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_resume_lists_each_setting_that_it_changes(
    run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--load", "r", "--num-rollout", "9", "--lr", "0.5", "--rollout-temperature", "0.5")
    capsys.readouterr()
    assert main([command, *words]) == 0
    changes = [line for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert [line.partition(": ")[2] for line in changes] == [
        "optimizer.lr: 0.0003 -> 0.5",
        "rollout.num_rollout: 4 -> 9",
        "rollout.rollout_temperature: 1.0 -> 0.5",
    ]


def test_a_resume_without_changes_lists_none_and_one_that_goes_back_sets_aside(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["run", "--load", "r/checkpoints/step-000002"]) == 0
    assert " -> " not in capsys.readouterr().out
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    assert (run / "checkpoints" / ".abandoned-step-000003").is_dir()


@pytest.mark.parametrize("phase", ["start", "step"])
def test_ctrl_c_ends_with_what_is_saved_and_the_command_that_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], phase: str
) -> None:
    def interrupted(job: Any, *, track: Any, resume: Any = None) -> RunState:
        if phase == "step":
            track.record.begin()
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run", interrupted)
    assert main(["run", "--load", "r"]) == 130
    saved, last = capsys.readouterr().err.splitlines()[-2:]
    assert "step-000003" in saved
    assert f"slime run --load {run}" in saved
    assert last == "slime: interrupted"
