"""``slime run``: which folder, which settings, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.checkpoint.folder import RunState, drafted, find, write_state
from slime_core.cli.activation import with_settings_of_loaded_run
from slime_core.cli.evaluate import expand as expand_eval
from slime_core.cli.main import main
from slime_core.cli.run import going_on, open_record, paths
from slime_core.config.load import peek
from slime_core.config.schema import JobConfig, RunConfig
from slime_core.errors import ConfigError

TRACKER = """
from slime_core import Component, hookimpl

@hookimpl
def slime_register_trackers():
    yield Component("broken", target=f"{__name__}:Broken")

class Broken:
    def __init__(self, options, run):
        raise KeyError("no account")

    def log(self, step, metrics): ...
    def start(self, run): pass
    def close(self, error): ...
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with checkpoints of steps 2 and 4; the working directory is its parent."""
    for step in (2, 4):
        save(tmp_path / "run" / "checkpoints", step)
    (tmp_path / "run" / "config.toml").write_text('[rollout]\nnum_rollout = 4\n[run]\nplugins = ["grpo"]\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def save(folder: Path, step: int) -> Path:
    with drafted(folder, step) as draft:
        (draft / "hf").mkdir()
        write_state(draft, RunState(step))
    return folder / f"step-{step:06d}"


def config(folder: Path | None = None) -> RunConfig:
    return RunConfig(run=JobConfig(output_dir=folder))


@pytest.mark.parametrize("named", ["run", "run/checkpoints", "run/checkpoints/step-000002"])
def test_load_without_config_means_the_settings_of_that_run(named: str, run: Path) -> None:
    argv = with_settings_of_loaded_run(["--load", named, "--lr", "1"])
    assert argv == ["--load", named, "--lr", "1", "--config", str(run / "config.toml")]
    assert peek(argv).plugins == ("grpo",)


@pytest.mark.parametrize("line", ["--load run --config mine.toml", "--load missing", "--load none", "--lr 1", "--load"])
def test_flags_that_name_their_settings_or_load_nothing_stay_as_they_are(line: str, run: Path) -> None:
    assert with_settings_of_loaded_run(line.split()) == line.split()


def test_settings_of_the_loaded_run_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "num_rollout", "--load", "run"]) == 0
    printed = capsys.readouterr().out
    assert "num_rollout = 4\n" in printed
    assert "config.toml:2" in printed


def test_a_checkpoint_outside_a_run_brings_no_settings(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    lone = save(tmp_path / "kept", 2)
    assert with_settings_of_loaded_run(["--load", str(lone)]) == ["--load", str(lone)]
    assert expand_eval([str(lone)]) == ["--hf-checkpoint", str(lone / "hf")]
    assert expand_eval(["run"])[:2] == ["--config", str(run / "config.toml")]


def test_a_run_that_goes_back_sets_later_checkpoints_aside(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = open_record(config(), find(run / "checkpoints" / "step-000002"))
    assert (record.directory, record.resumed_step) == (run, 2)
    assert find(run).state.step == 4
    record.begin()
    assert find(run).state.step == 2
    assert str(run / "checkpoints" / ".abandoned-step-000004") in capsys.readouterr().out
    assert (run / "config-step-000002.toml").is_file()


def test_a_run_that_resumes_elsewhere_leaves_its_home_alone(run: Path, tmp_path: Path) -> None:
    record = open_record(config(tmp_path / "new"), find(run / "checkpoints" / "step-000002"))
    assert (record.directory, record.resumed_step) == (tmp_path / "new", None)
    assert find(run).state.step == 4


def test_a_checkpoint_outside_a_run_is_resumed_in_a_new_folder(run: Path, tmp_path: Path) -> None:
    record = open_record(config(), find(save(tmp_path / "kept", 2)))
    assert (record.directory.parent, record.resumed_step) == (tmp_path / "outputs", None)


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(run: Path) -> None:
    assert len({open_record(config(), None).directory for _ in range(3)}) == 3


def test_another_run_s_folder_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="holds another run's files"):
        open_record(config(run), None)


def test_a_run_that_has_done_its_rollouts_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--load", "run"]) == 2
    assert "num_rollout = 4, and " in (printed := capsys.readouterr().err)
    assert "--num-rollout more than 4" in printed


def test_a_critic_is_not_continued_from_a_checkpoint_without_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--plugin", "ppo", "--load", "run", "--num-rollout", "5"]) == 1
    checkpoint = run / "checkpoints" / "step-000004"
    printed = capsys.readouterr().err
    assert f"{checkpoint.relative_to(Path.cwd())} holds no critic" in printed
    assert "--hf-checkpoint" in printed
    (checkpoint / "critic").mkdir()
    assert main(["run", "--plugin", "ppo", "--load", "run", "--num-rollout", "5"]) != 0
    assert "holds no critic" not in capsys.readouterr().err


def test_a_tracker_that_cannot_be_made_is_named_before_there_is_a_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(TRACKER)
    assert main(["run", "--plugin", "grpo", "--plugin", "./mine.py", "--output-dir", "new"]) != 0
    assert "making tracker 'broken' failed with KeyError: 'no account'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_config_json_that_is_no_json_is_a_mistake(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.json").write_text("{")
    assert main(["run", "--plugin", "grpo", "--hf-checkpoint", "run"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_the_summary_names_checkpoints_where_there_are_some(tmp_path: Path) -> None:
    record = open_record(config(tmp_path / "new"), None)
    assert dict(paths(record)) == {"run": record.directory, "report": Path(f"slime report {record.directory}")}
    save(record.checkpoints, 1)
    record.add_row(0, {"train/loss": 0.5})
    for name in ("curves.svg", "report.html", "samples/train-000000.jsonl", "tensorboard/events"):
        (record.directory / name).write_text("something")
    found = dict(paths(record))
    assert found["checkpoint"] == record.checkpoints
    assert (found["curves"].name, found["report"].name) == ("curves.svg", "report.html")
    assert {*found} == {"run", "metrics", "samples", "checkpoint", "curves", "report", "TensorBoard"}


@pytest.mark.parametrize(
    ("step", "words"), [(0, ["nothing"]), (2, ["step-000002", "slime run --load"]), (4, ["slime eval"])]
)
def test_an_interrupted_run_says_what_it_saved_and_how_it_goes_on(tmp_path: Path, step: int, words: list[str]) -> None:
    record = open_record(config(tmp_path / "new"), None)
    if step:
        save(record.checkpoints, step)
    line = going_on(record.directory, total=4)
    assert all(word in line for word in words)
    assert "\n" not in line
    assert f"{record.directory}" in line
