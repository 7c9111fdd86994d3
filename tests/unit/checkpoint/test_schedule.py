"""When a run saves, and which checkpoints stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.checkpoint import schedule
from slime_core.checkpoint.schedule import Retention, SaveClock
from slime_core.config.schema import CheckpointConfig, RolloutConfig, RunConfig


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
    monkeypatch.setattr(schedule.time, "monotonic", lambda: now_s[0])
    clock = SaveClock(config(save_interval=4, save_interval_minutes=30))
    assert [step for step in range(1, 11) if clock.is_due(step)] == [4, 8, 10]
    now_s[0] += 30 * 60
    assert [clock.is_due(5), clock.is_due(6)] == [True, False]
    now_s[0] += 30 * 60 - 1
    assert not clock.is_due(7)
    assert not SaveClock(config(save_interval_minutes=None)).is_due(9)
