from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint.folder import (
    Retention,
    RunState,
    SaveClock,
    drafted,
    find,
    newest,
    remove_drafts,
    replacing,
    set_aside,
    write_state,
    writing,
)
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import CheckpointConfig, RunConfig
from slime_core.errors import CheckpointError, ConfigError, RunError


def save(folder: Path, step: int, **state) -> Path:
    with drafted(folder, step) as draft:
        write_state(draft, RunState(step, **state))
    return folder / f"step-{step:06d}"


def test_a_checkpoint_gets_its_name_when_it_is_whole(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    with drafted(folder, 40) as draft:
        write_state(draft, RunState(40))
        assert [path.name for path in folder.iterdir()] == [".step-000040.draft"]
        assert newest(folder) is None
    assert [path.name for path in folder.iterdir()] == ["step-000040"]


def fail_half_way(folder: Path, failure: BaseException) -> None:
    with drafted(folder, 1) as draft:
        (draft / "torch_dist").mkdir()
        raise failure


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (RunError("engine died"), RunError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(28, "No space left on device"), CheckpointError),
    ],
)
@pytest.mark.parametrize("is_rewrite", [False, True])
def test_a_failed_checkpoint_leaves_nothing_or_the_one_before(tmp_path, failure, raised, is_rewrite):
    if is_rewrite:
        save(tmp_path, 1, cursor={"next": 4})
    with pytest.raises(raised):
        fail_half_way(tmp_path, failure)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"] * is_rewrite
    assert not is_rewrite or find(tmp_path).state.cursor == {"next": 4}


def test_a_rewrite_replaces_the_old_checkpoint_wholly(tmp_path):
    old = save(tmp_path, 1)
    (old / "hf").mkdir()
    save(tmp_path, 1, cursor={"next": 4})
    assert [path.name for path in old.iterdir()] == ["state.json"]


def test_a_checkpoint_that_cannot_take_its_name_leaves_the_old_one(tmp_path, monkeypatch):
    old = save(tmp_path, 1, cursor={"next": 4})
    rename = Path.rename

    def refuse_drafts(path: Path, target: Path) -> Path:
        if path.name.endswith(".draft"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_drafts)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert find(old).state.cursor == {"next": 4}


def test_later_checkpoints_are_set_aside_and_stay_on_disk(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    assert [path.name for path in set_aside(tmp_path, after=2)] == [".abandoned-step-000004", ".abandoned-step-000006"]
    save(tmp_path, 4)
    assert [path.name for path in set_aside(tmp_path, after=2)] == [".abandoned-step-000004-2"]
    found = newest(tmp_path)
    assert found is not None
    assert found.state.step == 2
    assert find(tmp_path / ".abandoned-step-000006").state.step == 6


def test_a_checkpoint_is_at_home_in_a_run_folder_only(tmp_path, monkeypatch):
    run = tmp_path / "run"
    save(run / "checkpoints", 2)
    assert find(run).home is None
    (run / "config.toml").touch()
    (tmp_path / "config.toml").touch()
    assert find(run).home == run
    assert find(save(tmp_path / "kept", 2)).home is None
    monkeypatch.chdir(run / "checkpoints")
    assert find(Path("step-000002")).home == run


def test_files_that_a_killed_process_left_are_removed(tmp_path):
    (tmp_path / ".step-000001.draft" / "torch_dist").mkdir(parents=True)
    with replacing(tmp_path / "step-000001", next_step="Free space.") as draft:
        write_state(draft, RunState(1))
    assert [path.name for path in (tmp_path / "step-000001").iterdir()] == ["state.json"]


def test_what_a_full_disk_does_not_take_is_named_with_the_room_that_there_is(tmp_path):
    torch = pytest.importorskip("torch")
    file = tmp_path / "__0_0.distcp"
    file.symlink_to("/dev/full")  # the kernel answers every write there with ENOSPC

    # torch's own writer fails with a RuntimeError that does not say why.
    with pytest.raises(CheckpointError) as caught, writing(file), file.open("wb", buffering=0) as stream:
        torch.save(torch.zeros(1000), stream)
    assert re.fullmatch(rf"{re.escape(str(file))} .*No space left .*\(\d+ MiB .*\)", str(caught.value))


def test_drafts_go_and_checkpoints_stay(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step-000002.draft" / "torch_dist").mkdir(parents=True)
    remove_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/file/.*step-000001 "), drafted(tmp_path / "file", 1):
        pass


def test_a_checkpoint_is_found_by_its_own_folder_its_parent_or_the_run(tmp_path):
    run = tmp_path / "run"
    save(run / "checkpoints", 2)
    last = save(run / "checkpoints", 10)
    assert find(run).path == find(run / "checkpoints").path == find(last).path == last
    assert find(run / "checkpoints" / "step-000002").state.step == 2


def test_the_newest_is_the_highest_step_not_the_last_name(tmp_path):
    for step in (999_999, 1_000_000, 12):
        save(tmp_path, step)
    (tmp_path / "step-notes").mkdir()
    (tmp_path / ".step-2000000.draft").mkdir()
    found = newest(tmp_path)
    assert found is not None
    assert found.state.step == 1_000_000


@pytest.mark.parametrize("make", [False, True])
def test_a_path_without_a_checkpoint_is_refused_with_what_would_do(tmp_path, make):
    path = tmp_path / "run"
    if make:
        (path / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"{path} "):
        find(path)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"stp": 3}'])
def test_a_broken_or_missing_state_is_named(tmp_path, text):
    state = save(tmp_path, 3) / "state.json"
    state.unlink()
    if text is not None:
        state.write_text(text)
    for read in (find, newest):
        with pytest.raises(CheckpointError, match=r"step-000003/state\.json "):
            read(tmp_path)


# --- When a run saves, and what it keeps ------------------------------------------------------------------------------


def saved(folder: Path, retention: Retention, *steps: int) -> list[int]:
    """The checkpoints that are left after those of ``steps`` were written."""
    for step in steps:
        checkpoint = folder / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text("{}")
        retention.mark(checkpoint, step)
        retention.tidy(folder, newest=step)
    assert not list(folder.glob(".*"))
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


@pytest.mark.parametrize(
    ("retention", "steps", "left"),
    [
        (Retention(interval=10, total=40), (10, 20, 30, 40), [10, 20, 30, 40]),
        (Retention(total=40), (7, 13, 40), [40]),
        (Retention(total=40), (7, 13), [13]),
        (Retention(interval=10, total=40), (10, 13, 17), [10, 17]),
        (Retention(interval=10, total=40), (10, 13, 20), [10, 20]),
        (Retention(interval=10, total=60, last=2), (10, 20, 25, 30, 40, 50, 60), [50, 60]),
        (Retention(interval=10, total=60, last=2), (10, 20, 30, 35), [20, 30, 35]),
        (Retention(interval=10, total=60, last=1, every=20), (10, 20, 30, 40, 50), [20, 40, 50]),
    ],
)
def test_checkpoints_that_stay(tmp_path: Path, retention: Retention, steps: tuple[int, ...], left: list[int]):
    assert saved(tmp_path, retention, *steps) == left


def test_checkpoints_of_another_interval_stay(tmp_path: Path):
    """A run that goes on with other settings removes what the former ones meant to replace, and no more."""
    assert saved(tmp_path, Retention(interval=5, total=12), 5, 10, 12) == [5, 10, 12]
    assert saved(tmp_path, Retention(total=40), 17, 23) == [5, 10, 12, 23]


def test_a_checkpoint_that_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(target)

    monkeypatch.setattr(Path, "rename", refuse)
    assert saved(tmp_path, Retention(), 3, 4) == [3, 4]


def config(*, total: int = 10, **checkpoint: Any) -> RunConfig:
    return RunConfig(rollout=RolloutConfig(num_rollout=total), checkpoint=CheckpointConfig(**checkpoint))


def test_a_save_is_due_by_steps_by_minutes_and_at_the_end(monkeypatch: pytest.MonkeyPatch):
    now_s = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    clock = SaveClock(config(save_interval=4, save_interval_minutes=30))
    assert [step for step in range(1, 11) if clock.is_due(step)] == [4, 8, 10]
    now_s[0] += 30 * 60
    assert [clock.is_due(5), clock.is_due(6)] == [True, False]
    now_s[0] += 30 * 60 - 1
    assert not clock.is_due(7)
    assert not SaveClock(config(save_interval_minutes=None)).is_due(9)
