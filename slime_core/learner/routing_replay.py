"""Records the experts that routers choose for each token, and uses them in later passes of the same rollout.

``rank.py`` uses it; the routers are :class:`~slime_core.modeling.layers.KeepingRouter`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from slime_core.config.learning import LearnerConfig
from slime_core.errors import ConfigError, RunError
from slime_core.learner.micro_batches import PackedMicroBatch
from slime_core.learner.trained_model import ACTOR, OLD_ACTOR
from slime_core.types import TrainBatch

if TYPE_CHECKING:
    from slime_core.modeling.layers import KeepingRouter


class RoutingReplay:
    """The routers of one model, if the run replays routes; otherwise its methods do nothing.

    Arguments:
        chunks: of the model.
        settings: of the learner: whether routes are replayed, and whether the first ones are the engine's.

    Raises:
        ConfigError: a layer has a router that does not record its choice.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], settings: LearnerConfig) -> None:
        self._from_engine = settings.use_rollout_routing_replay
        is_used = settings.use_routing_replay or settings.use_rollout_routing_replay
        self._routers: list[KeepingRouter] = _routers(chunks) if is_used else []

    @contextmanager
    def record_or_replay(self, micro_batches: Sequence[PackedMicroBatch], role: str) -> Iterator[None]:
        """Inside the block, let a pass of ``role`` replay the routes of ``micro_batches``, and record missing ones."""
        routers = self._routers if role in (ACTOR, OLD_ACTOR) else []
        for router in routers:
            router.choice.start_pass(router.layer_number, micro_batches)
        try:
            yield
        finally:
            for router in routers:
                router.choice.end()

    def require_routes(self, shard: TrainBatch) -> None:
        """Raise RunError if the engine's routes are to be replayed and are missing, or name other layers or experts."""
        if not self._from_engine or not self._routers:
            return  # there is nothing to replay; also on a pipeline stage without a mixture
        config = self._routers[0].config
        routes_TLK = shard.routes_TLK
        if routes_TLK is None:
            raise RunError(
                "use_rollout_routing_replay needs the routes of every sample, and this rollout has none; one that "
                "is loaded must have been saved with it. Or leave it out"
            )
        (_, layers, experts), largest = routes_TLK.shape, int(routes_TLK.max(initial=-1))
        expected = (config.num_layers, config.moe_router_topk)
        if (layers, experts) != expected or largest >= config.num_moe_experts:
            raise RunError(
                f"the engine returned routes of {layers} layers with {experts} experts a token, the largest of them "
                f"number {largest}; the learner's model has {expected[0]} layers with {expected[1]} experts a token of "
                f"{config.num_moe_experts}. Engine and learner must run the same model"
            )


def _routers(chunks: Sequence[torch.nn.Module]) -> list[KeepingRouter]:
    from megatron.core.transformer.moe.router import Router

    from slime_core.modeling.layers import KeepingRouter

    routers = [part for chunk in chunks for part in chunk.modules() if isinstance(part, Router)]
    keeping = [router for router in routers if isinstance(router, KeepingRouter)]
    if len(routers) > len(keeping):
        raise ConfigError(
            "routing replay records the routes of the core's own router, but the layers of this model have another "
            "router; build them with slime_core.modeling.local_layers, or leave use_routing_replay and "
            "use_rollout_routing_replay out"
        )
    return keeping
