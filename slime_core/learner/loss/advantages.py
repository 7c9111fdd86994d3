"""Advantages token by token: estimated once for a whole shard, then distributed over its micro-batches.

Micro-batches hold the tokens of a shard in the order of the packing, and under context parallelism only this rank's
share of them. An estimator does not see that: every column is in the order of the shard
(:class:`~slime_core.types.TrainBatch`), sample after sample, each response whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.errors import RunError
from slime_core.learner.checks import require_per_token, require_type
from slime_core.learner.micro_batches import MicroBatch
from slime_core.ops.whitening import whitened
from slime_core.plugins.boundary import boundary
from slime_core.plugins.contracts import (
    AdvantageSettings,
    Reductions,
    ResponseTokens,
    TokenAdvantageEstimator,
    TokenAdvantages,
)
from slime_core.types import TrainBatch

__all__ = ["DataParallelSums", "TokenEstimation", "fill_advantages", "response_tokens", "whiten_advantages"]


class TokenEstimation:
    """An estimator of scope ``token`` and what it needs to be called.

    Arguments:
        estimator: the component.
        label: the component in messages, with its plugin.
        reads: the columns it is going to read in this run.
        settings: what the estimator finds in its batch.
        reduce: sums over data-parallel shards.
        context_group: the ranks that share every row, if there are several.
    """

    def __init__(
        self,
        estimator: TokenAdvantageEstimator,
        *,
        label: str,
        reads: AbstractSet[str],
        settings: AdvantageSettings,
        reduce: Reductions,
        context_group: Any = None,
    ) -> None:
        self.reads = frozenset(reads)
        self._estimator = estimator
        self._label = label
        self._settings = settings
        self._reduce = reduce
        self._context_group = context_group

    def fill(self, shard: TrainBatch, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        """Fill the advantages, returns and estimator metrics of every micro-batch.

        Collective over the ranks that hold the last pipeline stage. ``micro_batches`` are those of the whole shard,
        with the log-probabilities and values that the estimator reads.

        Returns:
            The returns, float32 [u] in the order of the shard; None: there is no critic.

        Raises:
            RunError: the estimator failed, or returned what is no finite number a trained token; or it reads values and
                returned no targets for the critic.
        """
        batch = response_tokens(
            shard, micro_batches, reads=self.reads, settings=self._settings, context_group=self._context_group
        )
        trained_U = batch.mask_U != 0
        with torch.no_grad(), boundary(self._label, "estimating advantages", error=RunError):
            found = self._estimator.estimate(batch, self._reduce)
        advantages_U, metrics_U = _checked(found, trained_U, self._label)
        returns_U = _checked_returns(found, trained_U, self._label) if "values" in self.reads else None
        for micro in micro_batches:
            micro.advantages_U = advantages_U[micro.places_U]
            micro.returns_U = None if returns_U is None else returns_U[micro.places_U]
            micro.metrics_U = {name: values_U[micro.places_U] for name, values_U in metrics_U.items()}
        return returns_U

    def returns_of(self, micro_batches: Sequence[MicroBatch], *, count: int) -> torch.Tensor:
        """The critic's targets as the micro-batches hold them now, float32 [u] in the order of the shard. Collective
        over the ranks that share the rows.

        Arguments:
            micro_batches: those of the whole shard; an idle one repeats samples and is left out.
            count: response tokens of the shard.

        Raises:
            RunError: a plugin left NaN or infinity among them.
        """
        returns_U = torch.zeros(count, device=micro_batches[0].mask_U.device)
        for micro in micro_batches:
            assert micro.returns_U is not None, "an estimator that reads values fills the returns"
            if micro.scale:
                found_U = _finite(micro.returns_U, micro.mask_U != 0, "returns_U: slime_before_training left")
                micro.returns_U = returns_U[micro.places_U] = found_U
        if self._context_group is not None:
            dist.all_reduce(returns_U, group=self._context_group)
        return returns_U


def fill_advantages(
    estimation: TokenEstimation | None, shard: TrainBatch, micro_batches: Sequence[MicroBatch], *, normalizes: bool
) -> torch.Tensor | None:
    """Fill the advantages of every micro-batch, and the returns where a critic learns them. Collective.

    Arguments:
        estimation: the estimator of scope ``token``; None: the sampler estimated the advantages.
        normalizes: whiten the advantages over the trained tokens of all ranks.

    Returns:
        The critic's targets, float32 [u] in the order of the shard; None: there is no critic, or this is an earlier
        pipeline stage, which has no log-probabilities and computes no loss.
    """
    from megatron.core import parallel_state

    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    returns_U = None if estimation is None else estimation.fill(shard, micro_batches)
    if normalizes:
        # Context-parallel ranks hold other tokens of the same rows, so they count like data-parallel ones.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        whiten_advantages(micro_batches, DataParallelSums(group))
    return returns_U


def response_tokens(
    shard: TrainBatch,
    micro_batches: Sequence[MicroBatch],
    *,
    reads: AbstractSet[str],
    settings: AdvantageSettings | None = None,
    context_group: Any = None,
) -> ResponseTokens:
    """The estimator's input for ``shard``, in the shard's order; copies, on the device of ``micro_batches``.

    Collective over ``context_group`` if ``reads`` names a column that a model computed.
    """
    device = micro_batches[0].tokens_1T.device

    def known(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def computed(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        values_U = torch.zeros(len(shard.loss_mask_U), device=device)
        for micro, part_U in zip(micro_batches, parts, strict=True):
            assert part_U is not None, "log-probabilities and values are computed before advantages are estimated"
            values_U[micro.places_U] = part_U
        if context_group is not None:
            # Each token is held by one of the ranks; the others add a zero.
            dist.all_reduce(values_U, group=context_group)
        return values_U

    old, reference = "log_probs" in reads, "ref_log_probs" in reads
    lengths_B = known(shard.response_lengths_B, torch.int64)
    return ResponseTokens(
        lengths_B=lengths_B,
        samples_U=torch.arange(len(lengths_B), device=device).repeat_interleave(lengths_B),
        mask_U=known(shard.loss_mask_U, torch.float32),
        rewards_B=known(shard.columns_B["rewards"], torch.float32),
        log_probs_U=computed([micro.old_log_probs_U for micro in micro_batches]) if old else None,
        ref_log_probs_U=computed([micro.ref_log_probs_U for micro in micro_batches]) if reference else None,
        rollout_log_probs_U=known(shard.rollout_log_probs_U, torch.float32) if "rollout_log_probs" in reads else None,
        values_U=computed([micro.values_U for micro in micro_batches]) if "values" in reads else None,
        settings=settings or AdvantageSettings(),
        tokens_T=known(shard.tokens_T, torch.int64) if "tokens" in reads else None,
        total_lengths_B=known(shard.lengths_B, torch.int64) if "tokens" in reads else None,
    )


class DataParallelSums:
    """Sums over the data-parallel shards.

    Arguments:
        group: one rank of each shard: data-parallel ranks without context-parallel ones, which hold the same shard.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over shards, a new tensor of the same shape and dtype."""
        total = values.detach().clone()
        if self._group.size() > 1:
            dist.all_reduce(total, group=self._group)
        return total


def whiten_advantages(micro_batches: Sequence[MicroBatch], reduce: Reductions) -> None:
    """The advantages of ``micro_batches`` have mean 0 and variance 1 over the trained tokens of all ranks. Collective.

    Arguments:
        micro_batches: all of this rank, advantages known.
        reduce: sums over all ranks that hold other tokens, context-parallel ones included.
    """
    values_U = torch.cat([micro.advantages_U for micro in micro_batches])
    mask_U = torch.cat([micro.mask_U for micro in micro_batches])
    parts = whitened(values_U, mask_T=mask_U, total=reduce.sum).split([len(micro.mask_U) for micro in micro_batches])
    for micro, part_U in zip(micro_batches, parts, strict=True):
        micro.advantages_U = part_U


def _checked(
    found: TokenAdvantages, trained_U: torch.Tensor, label: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The advantages, float32, 0 where nothing is trained; and the metrics. All without gradient."""
    require_type(found, TokenAdvantages, label)
    columns = {"advantages_U": found.advantages_U}
    require_per_token(columns, found.metrics_U, metrics_name="metrics_U", count=len(trained_U), label=label)
    advantages_U = _finite(found.advantages_U, trained_U, f"{label} returned")
    return advantages_U, {name: values_U.detach().float() for name, values_U in found.metrics_U.items()}


def _checked_returns(found: TokenAdvantages, trained_U: torch.Tensor, label: str) -> torch.Tensor:
    """What the critic is to learn, float32, 0 where nothing is trained; without gradient."""
    if found.returns_U is None:
        raise RunError(
            f"{label} reads values, so a critic is trained, and returned no returns_U for it to learn; accepted is one "
            "number a response token. Report this to the plugin's author."
        )
    require_per_token({"returns_U": found.returns_U}, {}, metrics_name="metrics_U", count=len(trained_U), label=label)
    return _finite(found.returns_U, trained_U, f"returns_U: {label} returned")


def _finite(values_U: torch.Tensor, trained_U: torch.Tensor, what: str) -> torch.Tensor:
    """As float32, without gradient, 0 where nothing is trained."""
    values_U = values_U.detach().float().where(trained_U, 0.0)
    wrong = int((~values_U.isfinite()).sum())
    if wrong:
        raise RunError(
            f"{what} NaN or infinity for {wrong} of {int(trained_U.sum())} trained tokens; accepted are finite "
            "numbers. Look at the rewards of this rollout, or choose another estimator with --advantage-estimator."
        )
    return values_U
