"""Whose passes keep the routes of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slime_core.learner.rank import Learner


class Keeping:
    """Notes which micro-batches it is asked to keep, and when it is left."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @contextmanager
    def kept(self, micro_batches: list[Any]) -> Iterator[None]:
        self.seen += micro_batches
        yield
        self.seen.append("left")


@pytest.fixture
def learner() -> Learner:
    found = object.__new__(Learner)
    found._routing = Keeping()
    return found


def test_the_actors_passes_keep_their_routes(learner: Learner) -> None:
    with learner._keeping(["a", "b"], "actor"):
        assert learner._routing.seen == ["a", "b"]
    assert learner._routing.seen == ["a", "b", "left"]


def test_the_reference_chooses_freely(learner: Learner) -> None:
    with learner._keeping(["a"], "reference"):
        assert learner._routing.seen == []


def test_without_replay_nothing_is_kept(learner: Learner) -> None:
    learner._routing = None
    with learner._keeping(["a"], "actor"):
        pass
