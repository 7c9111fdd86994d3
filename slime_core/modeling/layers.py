"""Layers that our Megatron layer specs use: the norm, and the router of a mixture of experts.

The router can record and replay which experts it chose for a token, see :mod:`slime_core.learner.trained_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "KeepingRouter",
    "RMSNorm",
]


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm as a module of Megatron's layer spec; its weight is marked for sequence parallelism.

    Megatron's own wrapper (transformer/torch_norm.py:32) refuses sequence parallelism. All that it takes is the mark,
    by which the gradients of the weight are summed over the tensor-parallel ranks
    (distributed/finalize_model_grads.py:354).

    Arguments:
        config: Megatron's TransformerConfig.
        hidden_size: size of the last dimension.
        eps: added to the mean square.

    Raises:
        ValueError: the config asks for another norm, or for zero-centred weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"normalization {config.normalization!r} (zero-centred: {config.layernorm_zero_centered_gamma}) was "
                "asked for; only a plain RMSNorm is built here; give another norm through the layer spec"
            )
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Routed(Protocol):
    """What a router reads and writes of a micro-batch of t tokens.

    Attributes:
        routes: layer -> int16 [t, k], the experts that this layer took for each token.
        given_routes_TLK: int16 [t, layers, k], those of the engine, -1 where it has none; None: none at all.
    """

    @property
    def routes(self) -> dict[int, torch.Tensor]: ...

    @property
    def given_routes_TLK(self) -> torch.Tensor | None: ...


class KeepingRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router, whose choice of experts can be given; takes its place in the layer spec.

    Attributes:
        choice: in the place of Megatron's own RouterReplay (moe/router_replay.py), which keeps one list for all models
            of a process.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.router_replay = self.choice = _Choice()


class _Choice:
    """Which experts one router takes; what ``topk_routing_with_score_function`` calls in place of its own top-k."""

    def __init__(self) -> None:
        self._layer = 0
        self._micro_batches: Sequence[Routed] | None = None
        self._calls = [0, 0]

    def begin(self, layer: int, micro_batches: Sequence[Routed]) -> None:
        self._layer = layer
        self._micro_batches = micro_batches
        self._calls = [0, 0]

    def end(self) -> None:
        self._micro_batches = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and numbers of the experts of every token: float [n, topk], int64 [n, topk].

        Arguments: those of Megatron's ``RouterReplay.get_replay_topk``.
        """
        assert default_compute_topk is not None
        if self._micro_batches is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        micro = self._next()
        if self._layer not in micro.routes:
            _, own = default_compute_topk(scores.detach(), topk, num_groups, group_topk)
            if micro.given_routes_TLK is not None:
                own = _completed(micro.given_routes_TLK[:, self._layer - 1], own)
            micro.routes[self._layer] = own.to(torch.int16)
        chosen = micro.routes[self._layer].long()
        return scores.gather(1, chosen), chosen

    def _next(self) -> Routed:
        assert self._micro_batches is not None
        kind = torch.is_grad_enabled()
        self._calls[kind] += 1
        return self._micro_batches[self._calls[kind] - 1]


def _completed(given: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """``given`` for the tokens that this router sees, with ``own`` where the route of a token is not given."""
    if given.size(0) != own.size(0):  # sequence parallelism shares them out
        parts = given.tensor_split(parallel_state.get_tensor_model_parallel_world_size())
        given = parts[parallel_state.get_tensor_model_parallel_rank()]
    return torch.where(given < 0, own, given.long())
