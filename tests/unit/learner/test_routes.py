"""Whose passes keep the routes of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slime_core.learner.replay import Replay


class Keeping:
    """Notes which micro-batches it is asked to keep, and when it is left."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @contextmanager
    def kept(self, micro_batches: list[Any]) -> Iterator[None]:
        self.seen += micro_batches
        yield
        self.seen.append("left")

    def require_fitting(self, shard: Any) -> None:
        self.seen.append(shard)


def test_the_actors_passes_keep_their_routes() -> None:
    routing = Keeping()
    with Replay(routing).kept(["a", "b"], "actor"):
        assert routing.seen == ["a", "b"]
    assert routing.seen == ["a", "b", "left"]


def test_the_old_actors_passes_keep_them_too() -> None:
    routing = Keeping()
    with Replay(routing).kept(["a"], "old_actor"):
        assert routing.seen == ["a"]


def test_the_reference_chooses_freely() -> None:
    routing = Keeping()
    with Replay(routing).kept(["a"], "reference"):
        assert routing.seen == []


def test_without_replay_nothing_is_kept() -> None:
    with Replay(None).kept(["a"], "actor"):
        pass


@pytest.mark.parametrize("from_engine", [True, False])
def test_only_routes_of_the_engine_have_to_fit(from_engine: bool) -> None:
    routing = Keeping()
    Replay(routing, from_engine=from_engine).require_fitting("shard")
    assert routing.seen == ["shard"] * from_engine
