"""Whose passes keep the routes of a mixture; :mod:`slime_core.learner.model.routing` says how they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slime_core.config.schema import LearnerConfig
from slime_core.learner.packed.batches import MicroBatch
from slime_core.learner.roles import ACTOR, OLD_ACTOR
from slime_core.types import TrainBatch

__all__ = ["Replay"]


class Replay:
    """The actor and the old actor replay what was chosen for a token first; other roles choose freely.

    Arguments:
        routing: keeps the routes; None: routers choose anew in every pass.
        from_engine: the first choice is the engine's, which comes with the samples.
    """

    def __init__(self, routing: Any, *, from_engine: bool = False) -> None:
        self._routing, self._from_engine = routing, from_engine

    @classmethod
    def of(cls, learner: LearnerConfig, chunks: Sequence[torch.nn.Module]) -> Replay:
        """As the run asks for it, of the model ``chunks``; raises as the routing does."""
        if not (learner.use_routing_replay or learner.use_rollout_routing_replay):
            return cls(None)
        from slime_core.learner.model.routing import Routing

        return cls(Routing(chunks), from_engine=learner.use_rollout_routing_replay)

    def kept(self, micro_batches: Sequence[MicroBatch], role: str) -> AbstractContextManager[None]:
        """Inside, one pass of ``role`` over ``micro_batches`` keeps its routes, if it is one of those that do."""
        if self._routing is None or role not in (ACTOR, OLD_ACTOR):
            return nullcontext()
        kept: AbstractContextManager[None] = self._routing.kept(micro_batches)
        return kept

    def require_fitting(self, shard: TrainBatch) -> None:
        """The engine's routes, where they are to be replayed, are those of this model.

        Raises:
            RunError: there are none, or they name other layers or experts.
        """
        if self._from_engine:
            self._routing.require_fitting(shard)
