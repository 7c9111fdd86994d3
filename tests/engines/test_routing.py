"""Routing replay on one rank: what is kept, what is replayed, and that gradients still reach the router.

Random routes in every layout, recomputation included, are compared with transformers in ``make families``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_core.config.learning import LearnerConfig
from slime_core.errors import ConfigError, RunError
from slime_core.learner.micro_batches import PackedMicroBatch, make_micro_batches
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, TrainBatch
from tests.engines.families import build, write
from tests.engines.learners import equal

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

FAMILY, LAYERS, EXPERTS, CHOSEN = "qwen3_moe", 3, 8, 2
LENGTHS = (9, 4, 12, 6)
REPLAY, FROM_ENGINE = LearnerConfig(use_routing_replay=True), LearnerConfig(use_rollout_routing_replay=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(FAMILY, tmp_path_factory.mktemp("model"))


@pytest.fixture
def chunk(megatron: Any, folder: Path) -> Any:
    _, (chunk,) = build(FAMILY, folder, megatron)
    return chunk


def replay(chunk: Any, config: LearnerConfig = REPLAY) -> Any:
    from slime_core.learner.routing_replay import RoutingReplay

    return RoutingReplay([chunk], config)


def shard(routes: list[Any] | None = None) -> TrainBatch:
    random = np.random.default_rng(3)
    samples = [
        Sample(
            index=i,
            tokens=random.integers(0, 16, length).tolist(),
            response_length=2,
            rollout_log_probs=[-1.0, -1.0],
            rollout_routed_experts=None if routes is None else routes[i],
        )
        for i, length in enumerate(LENGTHS)
    ]
    advantages_B, plan = np.ones(len(samples), np.float32), BatchPlan(num_ranks=1, max_tokens=16)
    (only,) = make_shards(samples, advantages_B, plan, rollout=0, temperature=1.0, with_routes=routes is not None)
    return only


def random_routes(layers: int = LAYERS, experts: int = EXPERTS) -> list[Any]:
    random = np.random.default_rng(5)
    return [
        np.array([[random.permutation(experts)[:CHOSEN] for _ in range(layers)] for _ in range(length - 1)], np.int16)
        for length in LENGTHS
    ]


def forward(chunk: Any, micro_batches: list[PackedMicroBatch]) -> torch.Tensor:
    """Logits of all rows."""
    rows = [
        chunk(micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=micro.packed_sequence)[0]
        for micro in micro_batches
    ]
    return torch.cat(rows)


def passed(
    chunk: Any, routing: Any, micro_batches: list[PackedMicroBatch]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of one pass with gradients, and the gradients of their log-probabilities' sum."""
    chunk.zero_grad()
    with routing.record_or_replay(micro_batches, "actor"):
        logits = forward(chunk, micro_batches)
    logits.log_softmax(-1)[:, 3].sum().backward()
    gradients = {name: part.grad.clone() for name, part in chunk.named_parameters() if part.grad is not None}
    return logits.detach(), gradients


def nudge(chunk: Any) -> None:
    """Change the choice of routers, as an optimizer step would."""
    torch.manual_seed(1)
    with torch.no_grad():
        for part in chunk.parameters():
            part.add_(0.1 * torch.randn_like(part))


def test_replaying_ones_own_routes_changes_no_bit(chunk) -> None:
    (micro_batches,) = make_micro_batches(shard())
    with torch.no_grad():
        free = forward(chunk, micro_batches)
    recorded, first = passed(chunk, replay(chunk), micro_batches)
    replayed, second = passed(chunk, replay(chunk), micro_batches)
    assert torch.equal(recorded, free)
    assert torch.equal(replayed, free)
    assert equal(first, second)


def test_a_pass_without_gradients_records_what_the_next_one_replays(chunk) -> None:
    routing = replay(chunk)

    def recorded() -> list[PackedMicroBatch]:
        (micro_batches,) = make_micro_batches(shard())
        with torch.no_grad(), routing.record_or_replay(micro_batches, "actor"):
            forward(chunk, micro_batches)
        return list(micro_batches)

    micro_batches = recorded()
    before = [{layer: routes.clone() for layer, routes in micro.routes.items()} for micro in micro_batches]
    assert [sorted(routes) for routes in before] == [[1, 2, 3]] * len(micro_batches)
    nudge(chunk)
    others = recorded()
    assert any(not torch.equal(other.routes[1], routes[1]) for other, routes in zip(others, before, strict=True))
    passed(chunk, routing, micro_batches)
    assert all(equal(micro.routes, routes) for micro, routes in zip(micro_batches, before, strict=True))


def test_replayed_routes_leave_the_weights_of_experts_to_the_router_and_its_gradient(chunk) -> None:
    (routed,), (plain,) = make_micro_batches(shard(random_routes())), make_micro_batches(shard())
    replayed, gradients = passed(chunk, replay(chunk), routed)
    with torch.no_grad():  # outside a pass that replays, routers choose freely
        free = forward(chunk, routed)
        assert torch.equal(free, forward(chunk, plain))
    assert (replayed - free).abs().max() > 0.1
    routers = [gradient for name, gradient in gradients.items() if name.endswith("router.weight")]
    assert len(routers) == LAYERS
    assert all(gradient.norm() > 1e-4 for gradient in routers)


@pytest.mark.parametrize(
    ("routes", "named"),
    [
        (random_routes(layers=2), "2 layers with 2 experts"),
        (random_routes(experts=64), "3 layers with 2 experts"),
        (None, "use_rollout_routing_replay"),
    ],
    ids=["other layers", "other experts", "none"],
)
def test_routes_of_another_model_and_none_are_refused(chunk, routes, named) -> None:
    with pytest.raises(RunError, match=named):
        replay(chunk, FROM_ENGINE).require_routes(shard(routes))


def test_a_model_with_a_router_of_its_own_is_refused(chunk) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    chunk.decoder.layers[1].mlp.router.__class__ = TopKRouter
    with pytest.raises(ConfigError, match="use_rollout_routing_replay"):
        replay(chunk)
