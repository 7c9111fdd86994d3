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
from slime_core.learner.micro_batches import MicroBatch, make_micro_batches
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, TrainBatch
from tests.engines.families import build, write

# Megatron warns about its own calls between its own modules.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")

FAMILY, LAYERS, EXPERTS, CHOSEN = "qwen3_moe", 3, 8, 2
LENGTHS = (9, 4, 12, 6)
REPLAY, FROM_ENGINE = LearnerConfig(use_routing_replay=True), LearnerConfig(use_rollout_routing_replay=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(FAMILY, tmp_path_factory.mktemp("model"))


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
    (found,) = make_shards(samples, advantages_B, plan, rollout=0, temperature=1.0, with_routes=routes is not None)
    return found


def random_routes(layers: int = LAYERS, experts: int = EXPERTS) -> list[Any]:
    random = np.random.default_rng(5)
    return [
        np.array([[random.permutation(experts)[:CHOSEN] for _ in range(layers)] for _ in range(length - 1)], np.int16)
        for length in LENGTHS
    ]


def forward(chunk: Any, micro: MicroBatch) -> torch.Tensor:
    logits: torch.Tensor = chunk(micro.tokens_1T, micro.position_ids_1T, None, packed_seq_params=micro.packed_sequence)
    return logits[0]


def passed(chunk: Any, routing: Any, micro_batches: list[MicroBatch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of one pass with gradients, and the gradients of their log-probabilities' sum."""
    chunk.zero_grad()
    with routing.record_or_replay(micro_batches, "actor"):
        logits = torch.cat([forward(chunk, micro) for micro in micro_batches])
    logits.log_softmax(-1)[:, 3].sum().backward()
    return logits.detach(), {
        name: part.grad.clone() for name, part in chunk.named_parameters() if part.grad is not None
    }


def nudge(chunk: Any) -> None:
    """As an optimizer step would: routers change their minds."""
    torch.manual_seed(1)
    with torch.no_grad():
        for part in chunk.parameters():
            part.add_(0.1 * torch.randn_like(part))


def test_replaying_ones_own_routes_changes_no_bit(megatron, folder):
    from slime_core.learner.trained_model import RoutingReplay

    _, (chunk,) = build(FAMILY, folder, megatron)
    (micro_batches,) = make_micro_batches(shard())
    with torch.no_grad():
        free = torch.cat([forward(chunk, micro) for micro in micro_batches])
    recorded, first = passed(chunk, RoutingReplay([chunk], REPLAY), micro_batches)
    replayed, second = passed(chunk, RoutingReplay([chunk], REPLAY), micro_batches)
    assert torch.equal(recorded, free)
    assert torch.equal(replayed, free)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_pass_without_gradients_records_what_the_next_one_replays(megatron, folder):
    from slime_core.learner.trained_model import RoutingReplay

    _, (chunk,) = build(FAMILY, folder, megatron)
    (micro_batches,) = make_micro_batches(shard())
    routing = RoutingReplay([chunk], REPLAY)
    with torch.no_grad(), routing.record_or_replay(micro_batches, "actor"):
        for micro in micro_batches:
            forward(chunk, micro)
    recorded = [{layer: routes.clone() for layer, routes in micro.routes.items()} for micro in micro_batches]
    assert [sorted(routes) for routes in recorded] == [[1, 2, 3]] * len(micro_batches)
    nudge(chunk)
    (others,) = make_micro_batches(shard())
    with torch.no_grad(), routing.record_or_replay(others, "actor"):
        for micro in others:
            forward(chunk, micro)
    assert any(not torch.equal(mine.routes[1], theirs[1]) for mine, theirs in zip(others, recorded, strict=True))
    passed(chunk, routing, micro_batches)
    assert all(
        torch.equal(micro.routes[layer], routes[layer])
        for micro, routes in zip(micro_batches, recorded, strict=True)
        for layer in routes
    )


def test_replayed_routes_leave_the_weights_of_experts_to_the_router_and_its_gradient(megatron, folder):
    from slime_core.learner.trained_model import RoutingReplay

    _, (chunk,) = build(FAMILY, folder, megatron)
    (micro_batches,) = make_micro_batches(shard(random_routes()))
    given, gradients = passed(chunk, RoutingReplay([chunk], REPLAY), micro_batches)
    with torch.no_grad():
        free = torch.cat([forward(chunk, micro) for micro in micro_batches])
    assert (given - free).abs().max() > 0.1
    routers = [gradient for name, gradient in gradients.items() if name.endswith("router.weight")]
    assert len(routers) == LAYERS
    assert all(gradient.norm() > 1e-4 for gradient in routers)


def test_outside_a_kept_pass_routers_choose_freely(megatron, folder):
    from slime_core.learner.trained_model import RoutingReplay

    _, (chunk,) = build(FAMILY, folder, megatron)
    (given,), (plain,) = make_micro_batches(shard(random_routes())), make_micro_batches(shard())
    passed(chunk, RoutingReplay([chunk], REPLAY), given)
    with torch.no_grad():
        free = [torch.cat([forward(chunk, micro) for micro in micro_batches]) for micro_batches in (given, plain)]
    assert torch.equal(*free)


@pytest.mark.parametrize(
    ("changes", "found"), [({"layers": 2}, "2 layers with 2 experts"), ({"experts": 64}, "3 layers with 2 experts")]
)
def test_routes_of_another_model_are_refused(megatron, folder, changes, found):
    from slime_core.learner.trained_model import RoutingReplay

    _, (chunk,) = build(FAMILY, folder, megatron)
    with pytest.raises(RunError, match=f" {found} "):
        RoutingReplay([chunk], FROM_ENGINE).require_routes(shard(random_routes(**changes)))


def test_a_rollout_without_routes_is_refused(megatron, folder):
    from slime_core.learner.trained_model import RoutingReplay

    _, (chunk,) = build(FAMILY, folder, megatron)
    with pytest.raises(RunError, match="use_rollout_routing_replay"):
        RoutingReplay([chunk], FROM_ENGINE).require_routes(shard())


def test_a_model_with_a_router_of_its_own_is_refused(megatron, folder):
    from megatron.core.transformer.moe.router import TopKRouter

    from slime_core.learner.trained_model import RoutingReplay

    _, (chunk,) = build(FAMILY, folder, megatron)
    chunk.decoder.layers[1].mlp.router.__class__ = TopKRouter
    with pytest.raises(ConfigError, match=r"another router.* use_rollout_routing_replay"):
        RoutingReplay([chunk], REPLAY)
