"""Whose passes record and replay the routes of a mixture, with routers that only note their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_core.config.learning import LearnerConfig
from slime_core.errors import RunError
from slime_core.learner import routing_replay
from slime_core.learner.routing_replay import RoutingReplay


class Noting:
    """A router of layer 3 that records the start and the end of passes."""

    layer_number = 3
    config = SimpleNamespace(num_layers=1, moe_router_topk=2, num_moe_experts=4)

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.choice = self

    def start_pass(self, layer: int, micro_batches: list[Any]) -> None:
        self.seen.append((layer, micro_batches))

    def end(self) -> None:
        self.seen.append("end")


def replay(monkeypatch: pytest.MonkeyPatch, **settings: bool) -> tuple[RoutingReplay, Noting]:
    router = Noting()
    monkeypatch.setattr(routing_replay, "_routers", lambda _: [router])
    return RoutingReplay([], LearnerConfig(**settings)), router


@pytest.mark.parametrize(
    ("replays", "role", "passes"),
    [(True, "actor", 1), (True, "old_actor", 1), (True, "reference", 0), (False, "actor", 0)],
)
def test_passes_of_the_actor_replay_routes_if_the_run_does(
    monkeypatch: pytest.MonkeyPatch, replays: bool, role: str, passes: int
) -> None:
    routing, router = replay(monkeypatch, use_routing_replay=replays)
    with routing.record_or_replay(["a", "b"], role):
        assert router.seen == [(3, ["a", "b"])] * passes
    assert router.seen == [(3, ["a", "b"]), "end"][: 2 * passes]


def test_only_routes_of_the_engine_have_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = SimpleNamespace(routes_TLK=np.zeros((5, 2, 2), np.int16))
    replay(monkeypatch, use_routing_replay=True)[0].require_routes(other)
    with pytest.raises(RunError, match=r"2 layers .* 2 experts"):
        replay(monkeypatch, use_rollout_routing_replay=True)[0].require_routes(other)
