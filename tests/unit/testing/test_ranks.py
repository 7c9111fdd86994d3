"""When hooks of two ranks count as stuck."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.testing import ranks


class Starting:
    """A rank that says nothing for long, and enters its first hook while somebody looks at it."""

    def __init__(self, said: Path) -> None:
        self._said, self._looks = said, itertools.count(1)

    def poll(self) -> int | None:
        look = next(self._looks)
        if look == 6:
            self._said.write_text('{"enter": "slime_learner_start"}\n')
        return 0 if look > 8 else None


def test_a_hook_that_a_rank_has_only_just_entered_is_not_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(0, 4)
    monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    for rank in ranks.RANKS:
        (tmp_path / f"out{rank}").touch()
        (tmp_path / f"err{rank}").touch()
    processes: Any = [Starting(tmp_path / "out0"), SimpleNamespace(poll=lambda: 0)]
    assert ranks._watched(tmp_path, processes, 10.0) == ranks.RankReport()
