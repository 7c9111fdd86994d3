"""``slime run``: which folder, which settings, what is refused, and when it starts again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime_core.checkpoint.folder import RunState, drafted, find, write_state
from slime_core.cli.activation import with_settings_of_loaded_run
from slime_core.cli.evaluate import expand as expand_eval
from slime_core.cli.main import main
from slime_core.cli.run import RunRestarts, how_to_continue, no_trace_if_refused, open_record, paths
from slime_core.config.load import Resolved, peek
from slime_core.config.options import PluginSettings
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import JobConfig, ModelConfig, RunConfig
from slime_core.errors import (
    ConfigError,
    DataError,
    EngineError,
    EngineSilent,
    NodeDied,
    PlacementError,
    ProcessDied,
    RunError,
    ServerDied,
    SlimeError,
)
from slime_core.track.record import RunRecord

TRACKER = """
from slime_core import hookimpl

@hookimpl
def slime_register(add):
    add.tracker("broken", Broken)

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
        (draft / "hf" / "config.json").touch()
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


def test_a_checkpoint_outside_a_run_brings_no_settings(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    lone = save(tmp_path / "kept", 2)
    assert with_settings_of_loaded_run(["--load", str(lone)]) == ["--load", str(lone)]
    assert expand_eval([str(lone)]) == ["--hf-checkpoint", str(lone / "hf")]
    assert expand_eval(["run"])[:2] == ["--config", str(run / "config.toml")]


def test_a_run_that_goes_back_sets_later_checkpoints_aside(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = find(run / "checkpoints" / "step-000002")
    elsewhere = open_record(config(tmp_path / "new"), held)
    assert (elsewhere.directory, elsewhere.resumed_step) == (tmp_path / "new", None)
    record = open_record(config(), held)
    assert (record.directory, record.resumed_step) == (run, 2)
    assert find(run).state.step == 4
    record.begin()
    assert find(run).state.step == 2
    assert str(run / "checkpoints" / ".abandoned-step-000004") in capsys.readouterr().out
    assert (run / "config-step-000002.toml").is_file()


def test_a_folder_that_a_run_cannot_have_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="--load"):
        open_record(config(run), None)
    with pytest.raises(ConfigError, match=r"output_dir: /proc/slime/run .*--output-dir"):
        open_record(config(Path("/proc/slime/run")), None)


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
    assert "tracker 'broken' failed with KeyError: 'no account'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_summary_names_checkpoints_where_there_are_some(tmp_path: Path) -> None:
    record = open_record(config(tmp_path / "new"), None)
    assert dict(paths(record, ["report"])) == {
        "run": record.directory,
        "report": Path(f"slime report {record.directory}"),
    }
    save(record.checkpoints, 1)
    record.add_row(0, {"train/loss": 0.5})
    for name in ("curves.svg", "report.html", "samples/train-000000.jsonl", "tensorboard/events"):
        (record.directory / name).write_text("something")
    found = dict(paths(record, ["report"]))
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
    line = how_to_continue(record.directory, config(), total=4)
    assert all(word in line for word in words)
    assert "\n" not in line
    assert f"{record.directory}" in line


def test_the_command_that_continues_a_run_names_its_code(tmp_path: Path) -> None:
    record = open_record(config(tmp_path / "new"), None)
    save(record.checkpoints, 2)
    named = PluginSettings(code=("custom_rm_path = my rm.py:f",))
    job, model = JobConfig(plugins=("grpo", "./mine.py")), ModelConfig(trust_remote_code=True)
    line = how_to_continue(record.directory, RunConfig(run=job, model=model).with_plugins(named), total=4)
    flags = "--plugin grpo ./mine.py --custom-rm-path 'my rm.py:f' --trust-remote-code"
    assert line.endswith(f"slime run --load {record.directory} {flags}")


# --- Traces -----------------------------------------------------------------------------------------------------------


def end(folder: Path, error: SlimeError) -> None:
    """A run in ``folder`` that wrote a log and ended with ``error``."""
    is_new = not folder.exists()
    record = RunRecord(folder)
    record.write_text("config.toml", "")
    (record.logs / "engine-0.log").write_text("loading\n")
    with pytest.raises(type(error)), no_trace_if_refused(record, is_new=is_new):
        raise error


def test_a_refused_run_leaves_nothing_and_a_failed_one_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for error in (DataError("line 5"), PlacementError("1 too few")):
        end(tmp_path / "outputs" / "run", error)
        assert list(tmp_path.iterdir()) == []
    end(tmp_path / "run", EngineError("ended"))
    assert (tmp_path / "run" / "logs" / "engine-0.log").exists()
    end(tmp_path / "run", DataError("line 5"))
    assert RunRecord(tmp_path / "run").logs.is_dir()


# --- Restarts ---------------------------------------------------------------------------------------------------------


DEATH = ProcessDied("learner rank 1: train() died.\n    pid: 7")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return RunRecord(tmp_path / "run").directory


def resolved(load: Path | None = None, total: int = 10) -> Resolved:
    config = RunConfig(model=ModelConfig(load=load), rollout=RolloutConfig(num_rollout=total), run=JobConfig())
    return Resolved(config=config, provenance={}, plugin_options={})


def test_a_run_restarts_from_its_newest_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(folder / "checkpoints", 2)
    save(folder / "checkpoints", 4)
    settings = RunRestarts(3, total=10, sleep=lambda _: None).after(DEATH, resolved(), folder)
    assert (settings.config.model.load, settings.config.run.output_dir) == (folder, folder)
    printed = capsys.readouterr().err
    assert str(DEATH) in printed
    assert "restart 1 of 3" in printed
    assert "step-000004" in printed
    assert "--max-restarts" in printed


def test_without_a_checkpoint_a_run_starts_from_where_it_started(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "checkpoints" / "step-000007"
    settings = RunRestarts(3, total=10, sleep=lambda _: None).after(DEATH, resolved(load=other), folder)
    assert (settings.config.model.load, settings.config.run.output_dir) == (other, folder)


def test_restarts_are_limited_until_the_next_checkpoint_and_each_waits_longer(folder: Path) -> None:
    pauses_s: list[float] = []
    restarts = RunRestarts(8, total=10, sleep=pauses_s.append)
    for step in (None, 2):
        if step is not None:
            save(folder / "checkpoints", step)
        for _ in range(8):
            restarts.after(DEATH, resolved(), folder)
    with pytest.raises(ProcessDied) as caught:
        restarts.after(DEATH, resolved(), folder)
    assert pauses_s == [1, 2, 4, 8, 16, 32, 60, 60] * 2
    assert f"step 2 with --load {folder}" in str(caught.value)


@pytest.mark.parametrize("death", [ServerDied("engine 0 died"), NodeDied("Ray died"), EngineSilent("no answer")])
def test_without_restarts_a_death_ends_the_run_as_itself(folder: Path, death: RunError) -> None:
    with pytest.raises(type(death), match=str(death)) as caught:
        RunRestarts(0, total=10).after(death, resolved(), folder)
    assert type(caught.value) is type(death)


def test_a_death_after_the_last_checkpoint_ends_the_run(folder: Path) -> None:
    save(folder / "checkpoints", 10)
    with pytest.raises(ProcessDied, match="step-000010"):
        RunRestarts(3, total=10).after(DEATH, resolved(), folder)


def test_a_start_in_the_folder_of_an_earlier_one_without_a_checkpoint_drops_its_rows(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/a": 1.0}\n{"step": 1}\n')
    record = open_record(RunConfig(run=JobConfig(output_dir=folder)), None, restarts=True)
    record.begin()
    assert (record.directory, record.resumed_step) == (folder, 0)
    assert (folder / "metrics.jsonl").read_text() == ""


def test_a_released_folder_stays_locked_by_its_next_owner(folder: Path) -> None:
    first = RunRecord(folder)
    first.release()
    second = RunRecord(folder)
    del first
    assert second.lock_warning == ""
    assert _is_locked_for_others(folder)


def _is_locked_for_others(folder: Path) -> bool:
    code = f"import fcntl; fcntl.lockf(open({str(folder / 'run.lock')!r}, 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode != 0
