"""One process of a separate critic, with a process group and a parallel layout of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.config.model_config import described, forward_flops
from slime_core.learner import LearnerSettings
from slime_core.learner.columns import response_tokens
from slime_core.learner.critic import Critic
from slime_core.learner.critic_reshard import SampleIndex, TokenValues, gather_tokens, reshard
from slime_core.learner.metric_sums import average_metrics
from slime_core.learner.micro_batches import MicroBatch, make_micro_batches
from slime_core.learner.process import prepare_process
from slime_core.learner.trained_model import add_idle_micro_batches
from slime_core.ops.packing import row_budget
from slime_core.plugins import contracts
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.registry import Registry
from slime_core.types import TrainBatch


def reports_shard() -> bool:
    """Whether this rank returns the numbers of a shard, as one of the ranks that share a copy of the model."""
    from megatron.core import parallel_state

    is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
    return is_first and bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def reshard_for_critic(
    settings: LearnerSettings, shards: Sequence[TrainBatch]
) -> list[tuple[TrainBatch, list[SampleIndex]]]:
    """``shards`` of the actor's ranks, divided for the critic's layout by the sampler's rules.

    Raises:
        RunError: an optimizer step has fewer samples than there are ranks.
    """
    learner, layout = settings.config.learner, settings.layout
    return reshard(
        shards,
        num_ranks=layout.data_size(settings.world_size),
        max_tokens=row_budget(learner.max_tokens_per_gpu, context=layout.context, multiple=layout.row_multiple),
        micro_batch_size=learner.micro_batch_size,
        cost=forward_flops(described(settings.folder) or {}).of if learner.balance_by_flops else int,
    )


class CriticRank:
    """One rank of the critic. Methods are collective over all its ranks."""

    def __init__(self, settings: LearnerSettings, registry: Registry) -> None:
        """Join the process group and build the critic; raises as :class:`~slime_core.learner.rank.Learner` does."""
        from slime_core.cpu import megatron

        megatron.install()
        from slime_core.learner.components import accepted_inputs, build_model_spec, model_spec_label

        self._settings = settings
        self._device = prepare_process(settings)
        where = f"critic rank {settings.rank}"
        hooks = LifecycleHooks(registry, place=contracts.Place.RANK, options=settings.options, where=where)
        spec = build_model_spec(registry, settings, hooks=hooks)
        self._accepted_inputs = accepted_inputs(registry, settings)
        self.critic = Critic(spec, label=model_spec_label(registry, settings.architecture), settings=settings)
        self._steps: list[list[MicroBatch]] = []
        self._shards: Sequence[TrainBatch] = ()
        self._places: list[SampleIndex] = []

    def values(self, shards: Sequence[TrainBatch]) -> TokenValues | None:
        """Values of the response tokens of this rank's share of ``shards``.

        Returns:
            None on ranks that do not report their share, see :func:`reports_shard`.

        Raises:
            RunError: the samples carry inputs that the model does not take.
        """
        settings = self._settings
        self._accepted_inputs.require(shards[0].inputs.keys())
        shares = reshard_for_critic(settings, shards)
        share, self._places = shares[settings.layout.data_rank(settings.rank, world_size=settings.world_size)]
        self._shards, self._steps = shards, self._make_micro_batches(share)
        micro_batches = self._micro_batches()
        self.critic.fill_values(micro_batches)
        if micro_batches[0].values_U is None:
            return None
        found = response_tokens(share, micro_batches, reads={"values"}, context_group=self._context_group())
        if found.values_U is None or not reports_shard():
            return None
        return TokenValues(self._places, share.response_lengths_B, found.values_U.cpu().numpy())

    def fit(self, returns_U: Sequence[np.ndarray]) -> dict[str, float]:
        """Every optimizer step of the rollout whose values were computed last.

        Arguments:
            returns_U: of each shard, float32, one number a response token.

        Returns:
            ``train/...`` metrics, averaged over the steps; the same on every rank.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is NaN or infinite.
        """
        mine_U = torch.from_numpy(gather_tokens(returns_U, self._shards, self._places)).to(self._device)
        for micro in self._micro_batches():
            micro.returns_U = mine_U[micro.places_U]
        rollout = self._shards[0].rollout
        results = average_metrics([self.critic.step(step, rollout=rollout) for step in self._steps])
        self.critic.require_finite_weights(rollout)
        self._steps, self._shards = [], ()
        return {f"train/{name}": value for name, value in results.items()}

    def close(self) -> None:
        """Leave the process group."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

    def _micro_batches(self) -> list[MicroBatch]:
        return [micro for step in self._steps for micro in step]

    def _make_micro_batches(self, share: TrainBatch) -> list[list[MicroBatch]]:
        from megatron.core import parallel_state

        layout, context_rank = self._settings.layout, parallel_state.get_context_parallel_rank()
        steps = make_micro_batches(share, device=self._device, layout=layout, context_rank=context_rank)
        add_idle_micro_batches(steps, layout)
        return steps

    def _context_group(self) -> Any:
        from megatron.core import parallel_state

        return parallel_state.get_context_parallel_group() if self._settings.layout.context > 1 else None
