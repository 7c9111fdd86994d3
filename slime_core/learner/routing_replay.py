"""Routing replay: the experts that a mixture chose for a token stay chosen in every later pass over that token.

Two passes over the same tokens may choose other experts where scores nearly tie: engine and learner add in another
order, and a step changes the weights. An importance ratio then compares two different networks (2510.11370, R3). Replay
keeps the *choice*; the weights of the chosen experts are computed from the current router, so gradients reach it.

Routes are stored in ``MicroBatch.routes``. A router replays a route that is there. For one that is missing it takes the
engine's if the samples carry it, else chooses, and stores the result: the first pass over a rollout records, later ones
replay. Passes of the reference and the teacher are not wrapped and choose freely. Where activations are recomputed, a
router runs a second time in the backward pass, with gradients, and finds what it stored in the forward pass, without:
Megatron's schedules take the micro-batches of a chunk in the same order both ways, so each router counts its calls of
either kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from slime_core.config.schema import LearnerConfig
from slime_core.errors import ConfigError, RunError
from slime_core.learner.frozen_models import ACTOR, OLD_ACTOR
from slime_core.learner.micro_batches import MicroBatch
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    from slime_core.modeling.router import KeepingRouter

__all__ = ["RoutingReplay"]


class RoutingReplay:
    """The routers of one model, if the run replays routes; otherwise its methods do nothing.

    Arguments:
        chunks: of the model.
        settings: say whether routes are replayed, and whether the first ones are the engine's.

    Raises:
        ConfigError: a layer has a router that does not keep its choice.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], settings: LearnerConfig) -> None:
        self._from_engine = settings.use_rollout_routing_replay
        is_used = settings.use_routing_replay or settings.use_rollout_routing_replay
        self._routers: list[KeepingRouter] = _routers(chunks) if is_used else []

    @contextmanager
    def record_or_replay(self, micro_batches: Sequence[MicroBatch], role: str) -> Iterator[None]:
        """One pass of ``role`` inside replays the routes that ``micro_batches`` have and records those they lack."""
        routers = self._routers if role in (ACTOR, OLD_ACTOR) else []
        for router in routers:
            router.choice.begin(router.layer_number, micro_batches)
        try:
            yield
        finally:
            for router in routers:
                router.choice.end()

    def require_routes(self, shard: TrainBatch) -> None:
        """Return if the engine's routes, where they are to be replayed, are those of this model.

        Raises:
            RunError: there are none, or they name other layers or experts.
        """
        if not self._from_engine or not self._routers:
            return  # also a pipeline stage without a mixture
        config = self._routers[0].config
        routes_TLK = shard.routes_TLK
        if routes_TLK is None:
            raise RunError(
                "use_rollout_routing_replay needs the routes of every sample, and this rollout has none; one that "
                "is loaded must have been saved with it. Or leave it out"
            )
        (_, layers, experts), largest = routes_TLK.shape, int(routes_TLK.max(initial=-1))
        wanted = (config.num_layers, config.moe_router_topk)
        if (layers, experts) != wanted or largest >= config.num_moe_experts:
            raise RunError(
                f"the engine returned routes of {layers} layers with {experts} experts a token, the largest of them "
                f"number {largest}; the learner's model has {wanted[0]} layers with {wanted[1]} experts a token of "
                f"{config.num_moe_experts}. Engine and learner must run the same model"
            )


def _routers(chunks: Sequence[torch.nn.Module]) -> list[KeepingRouter]:
    from megatron.core.transformer.moe.router import Router

    from slime_core.modeling.router import KeepingRouter

    routers = [part for chunk in chunks for part in chunk.modules() if isinstance(part, Router)]
    keeping = [router for router in routers if isinstance(router, KeepingRouter)]
    if len(routers) > len(keeping):
        raise ConfigError(
            "routing replay was asked for, but the layers of this model choose experts with a router of their own; "
            "build them with slime_core.modeling.local_layers, or leave use_routing_replay and "
            "use_rollout_routing_replay out"
        )
    return keeping
