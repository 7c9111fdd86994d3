"""When hooks of two ranks count as stuck; time is counted by the test."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_testing import ranks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The output of two ranks that have written nothing; each look at the clock is later by the test's parameter."""
    seconds = itertools.count(0, request.param)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    for name in ("out0", "out1", "err0", "err1"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("folder", [4], indirect=True)
def test_a_hook_that_a_rank_has_only_just_entered_is_not_stuck(folder: Path) -> None:
    looks = itertools.count(1)

    def poll() -> int | None:
        look = next(looks)
        if look == 6:
            (folder / "out0").write_text('{"enter": "slime_learner_start"}\n')
        return 0 if look > 8 else None

    processes: Any = [SimpleNamespace(poll=poll), SimpleNamespace(poll=lambda: 0)]
    assert ranks._watched(folder, processes, 10.0) == ranks.RankReport()


@pytest.mark.parametrize("folder", [100], indirect=True)
def test_ranks_that_never_reach_a_hook_are_reported_without_one(folder: Path) -> None:
    processes: Any = 2 * [SimpleNamespace(poll=lambda: None)]
    assert "300 s" in str(ranks._watched(folder, processes, 10.0).hung)
