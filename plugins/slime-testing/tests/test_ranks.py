"""When hooks of two ranks count as stuck."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_testing import ranks


def outputs(folder: Path) -> None:
    """What two ranks have written before they say anything."""
    for name in ("out0", "out1", "err0", "err1"):
        (folder / name).touch()


class Starting:
    """A rank that reports nothing for long, and enters its first hook during a check."""

    def __init__(self, events: Path) -> None:
        self._events, self._looks = events, itertools.count(1)

    def poll(self) -> int | None:
        look = next(self._looks)
        if look == 6:
            self._events.write_text('{"enter": "slime_learner_start"}\n')
        return 0 if look > 8 else None


def test_a_hook_that_a_rank_has_only_just_entered_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0, 4)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    outputs(tmp_path)
    processes: Any = [Starting(tmp_path / "out0"), SimpleNamespace(poll=lambda: 0)]
    assert ranks._watched(tmp_path, processes, 10.0) == ranks.RankReport()


def test_ranks_that_never_reach_a_hook_are_reported_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(0, 100)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    outputs(tmp_path)
    (tmp_path / "err1").write_text("importing a large library")
    processes: Any = 2 * [SimpleNamespace(poll=lambda: None)]
    assert "300 s" in ranks._watched(tmp_path, processes, 10.0).hung
