"""Routing replay: the experts that a mixture chose for a token stay chosen in every later pass over that token.

Two passes over the same tokens may choose other experts where scores nearly tie: engine and learner add in another
order, and a step moves the weights. An importance ratio then compares two different networks (2510.11370, R3). Replay
keeps the *choice*; the weights of the chosen experts are computed from the current router, so gradients reach it.

    Routing         hands the routes of a pass's micro-batches to the routers, and keeps what they chose

Routes live in ``MicroBatch.routes``. What is there is replayed; what is not is taken from the engine where it told,
chosen where it did not, and kept. So the first pass over a rollout records and the later ones replay. Passes of the
reference and other roles are not wrapped, and choose freely. Where activations are recomputed, a router runs a second
time in the backward pass, with gradients, and finds what it kept in the forward pass, without: Megatron's schedules
take the micro-batches of a chunk in the same order both ways, so each router counts its calls of either kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.router import Router

from slime_core.errors import ConfigError, RunError
from slime_core.learner.packed.batches import MicroBatch
from slime_core.modeling.router import KeepingRouter
from slime_core.types import TrainBatch

__all__ = ["Routing"]


class Routing:
    """The routers of one model.

    Arguments:
        chunks: of the model.

    Raises:
        ConfigError: a layer has a router that does not keep its choice.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._routers = [part for chunk in chunks for part in chunk.modules() if isinstance(part, KeepingRouter)]
        all_of_them = [part for chunk in chunks for part in chunk.modules() if isinstance(part, Router)]
        if len(all_of_them) > len(self._routers):
            raise ConfigError(
                "routing replay was asked for, but the layers of this model choose experts with a router of their own; "
                "build them with slime_core.modeling.local_layers, or leave use_routing_replay and "
                "use_rollout_routing_replay out"
            )

    @contextmanager
    def kept(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Inside, one pass over ``micro_batches`` replays the routes that they have, and keeps those that they lack."""
        for router in self._routers:
            router.choice.begin(router.layer_number, micro_batches)
        try:
            yield
        finally:
            for router in self._routers:
                router.choice.end()

    def require_fitting(self, shard: TrainBatch) -> None:
        """Routes that came with the samples are those of this model.

        Raises:
            RunError: there are none, or they name other layers or experts.
        """
        if not self._routers:
            return  # a pipeline stage without a mixture
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
