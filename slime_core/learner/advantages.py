"""Fills the advantages of a rollout's micro-batches before its optimizer steps.

    TokenEstimation   an estimator of scope ``token``, and the columns that it reads
    fill_advantages   estimates if the sampler did not, then whitens over ranks

Micro-batches hold the tokens of a shard in the order of the packing, and a context-parallel rank holds a part of them.
An estimator does not see that: its columns have the order of the shard (:class:`~slime_core.types.TrainBatch`), sample
after sample, each response complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.contracts import (
    AdvantageSettings,
    Reductions,
    ResponseTokens,
    TokenAdvantageEstimator,
    TokenAdvantages,
)
from slime_core.errors import RunError
from slime_core.learner.checks import require_per_token, require_type
from slime_core.learner.micro_batches import PackedMicroBatch
from slime_core.ops.whitening import whitened
from slime_core.types import TrainBatch
from slime_core.user_code.failures import boundary


@dataclass(slots=True)
class TokenEstimation:
    """An estimator of scope ``token`` and the arguments of its calls.

    Arguments:
        estimator: the component.
        label: the component in messages, with its plugin.
        reads: the columns that the estimator reads in this run.
        settings: coefficients that the batch passes to the estimator.
        reduce: sums over data-parallel shards.
        context_group: the ranks that share every row; None if a rank holds complete rows.
    """

    estimator: TokenAdvantageEstimator
    _: KW_ONLY
    label: str
    reads: AbstractSet[str]
    settings: AdvantageSettings
    reduce: Reductions
    context_group: Any = None

    def fill(self, shard: TrainBatch, micro_batches: Sequence[PackedMicroBatch]) -> None:
        """Fill the advantages, returns and estimator metrics of every micro-batch.

        Collective over the ranks that hold the last pipeline stage. ``micro_batches`` are those of the whole shard,
        with the log-probabilities and values that the estimator reads.

        Raises:
            RunError: the estimator failed, returned a non-finite value for a trained token, or reads values and
                returned no targets for the critic.
        """
        batch = response_tokens(
            shard, micro_batches, reads=self.reads, settings=self.settings, context_group=self.context_group
        )
        trained_U = batch.mask_U != 0
        with torch.no_grad(), boundary(self.label, "estimating advantages", error=RunError):
            output = self.estimator.estimate(batch, self.reduce)
        advantages_U, returns_U = self._validate(output, trained_U)
        metrics_U = {name: values_U.detach().float() for name, values_U in output.metrics_U.items()}
        for micro in micro_batches:
            micro.advantages_U = advantages_U[micro.places_U]
            micro.returns_U = None if returns_U is None else returns_U[micro.places_U]
            micro.metrics_U = {name: values_U[micro.places_U] for name, values_U in metrics_U.items()}

    def _validate(self, output: TokenAdvantages, trained_U: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the advantages, and the critic's targets: float32, 0 at masked tokens, without gradient."""
        label = self.label
        require_type(output, TokenAdvantages, label)
        columns = {"advantages_U": output.advantages_U}
        if "values" in self.reads:
            if output.returns_U is None:
                raise RunError(
                    f"{label} reads values, so a critic is trained, and returned no returns_U for it to learn; "
                    "accepted: one number a response token. Report this to the plugin's author."
                )
            columns["returns_U"] = output.returns_U
        require_per_token(columns, output.metrics_U, metrics_name="metrics_U", count=len(trained_U), label=label)
        advantages_U = _require_finite(output.advantages_U, trained_U, f"{label} returned")
        if "values" not in self.reads or output.returns_U is None:
            return advantages_U, None
        return advantages_U, _require_finite(output.returns_U, trained_U, f"returns_U: {label} returned")

    def returns_of(self, micro_batches: Sequence[PackedMicroBatch], *, count: int) -> torch.Tensor | None:
        """Return the critic's targets that the micro-batches hold, float32 [u] in the order of the shard.

        Collective over the ranks that share the rows.

        Arguments:
            micro_batches: of the whole shard; idle ones, which repeat samples, are left out.
            count: response tokens of the shard.

        Returns:
            None without a critic, and on an earlier pipeline stage.

        Raises:
            RunError: a plugin left NaN or infinity in the targets.
        """
        if "values" not in self.reads or micro_batches[0].returns_U is None:
            return None
        active = [micro for micro in micro_batches if micro.scale]  # 0: an idle one
        for micro in active:
            assert micro.returns_U is not None, "an estimator that reads values fills the returns"
            micro.returns_U = _require_finite(
                micro.returns_U, micro.mask_U != 0, "returns_U: slime_before_training left"
            )
        returns = [micro.returns_U for micro in active]
        return in_shard_order(active, returns, count=count, context_group=self.context_group)


def fill_advantages(
    estimation: TokenEstimation | None,
    shard: TrainBatch,
    micro_batches: Sequence[PackedMicroBatch],
    *,
    normalizes: bool,
) -> None:
    """Fill the advantages of every micro-batch, and the returns if there is a critic. Collective.

    Does nothing on an earlier pipeline stage, which has no log-probabilities and computes no loss.

    Arguments:
        estimation: the estimator of scope ``token``; None if the sampler estimated the advantages.
        normalizes: whiten the advantages over the trained tokens of all ranks.
    """
    from megatron.core import parallel_state

    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return
    if estimation is not None:
        estimation.fill(shard, micro_batches)
    if normalizes:
        # Context-parallel ranks hold other tokens of the same rows, so they count like data-parallel ones.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        whiten_advantages(micro_batches, DataParallelSums(group))


def response_tokens(
    shard: TrainBatch,
    micro_batches: Sequence[PackedMicroBatch],
    *,
    reads: AbstractSet[str],
    settings: AdvantageSettings,
    context_group: Any = None,
) -> ResponseTokens:
    """Build the estimator's input for ``shard``, in the shard's order; copies, on the device of ``micro_batches``.

    Collective over ``context_group`` if ``reads`` names a column that a model computed.
    """
    device = micro_batches[0].tokens_1T.device

    def known(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def computed(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return in_shard_order(micro_batches, parts, count=len(shard.loss_mask_U), context_group=context_group)

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
        settings=settings,
        tokens_T=known(shard.tokens_T, torch.int64) if "tokens" in reads else None,
        total_lengths_B=known(shard.lengths_B, torch.int64) if "tokens" in reads else None,
    )


def in_shard_order(
    micro_batches: Sequence[PackedMicroBatch], parts: Sequence[torch.Tensor | None], *, count: int, context_group: Any
) -> torch.Tensor:
    """Join a column of ``micro_batches`` in the order of the shard, float32 [u]. Collective over ``context_group``.

    Arguments:
        parts: the column of each micro-batch, filled by a model or an estimator.
        count: response tokens of the shard.
        context_group: the ranks that share every row; None if a rank holds complete rows.
    """
    values_U = torch.zeros(count, device=micro_batches[0].mask_U.device)
    for micro, part_U in zip(micro_batches, parts, strict=True):
        assert part_U is not None, "log-probabilities and values are computed before advantages are estimated"
        values_U[micro.places_U] = part_U
    if context_group is not None:
        # Each token is held by one of the ranks; the other ranks add a zero.
        dist.all_reduce(values_U, group=context_group)
    return values_U


class DataParallelSums:
    """Sums over the data-parallel shards.

    Arguments:
        group: one rank of each shard: data-parallel ranks, without context-parallel ranks, which have the same shard.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over shards, a new tensor of the same shape and dtype."""
        total = values.detach().clone()
        if self._group.size() > 1:
            dist.all_reduce(total, group=self._group)
        return total


def whiten_advantages(micro_batches: Sequence[PackedMicroBatch], reduce: Reductions) -> None:
    """Whiten advantages to mean 0 and variance 1 over the trained tokens of all ranks. Collective.

    Arguments:
        micro_batches: all of this rank, with their advantages.
        reduce: sums over all ranks that hold other tokens, context-parallel ones included.
    """
    values_U = torch.cat([micro.advantages_U for micro in micro_batches])
    mask_U = torch.cat([micro.mask_U for micro in micro_batches])
    parts = whitened(values_U, mask_T=mask_U, total=reduce.sum).split([len(micro.mask_U) for micro in micro_batches])
    for micro, part_U in zip(micro_batches, parts, strict=True):
        micro.advantages_U = part_U


def _require_finite(values_U: torch.Tensor, trained_U: torch.Tensor, what: str) -> torch.Tensor:
    """Return ``values_U`` as float32, without gradient, 0 at masked tokens.

    Raises:
        RunError: the value of a trained token is NaN or infinite.
    """
    values_U = values_U.detach().float().where(trained_U, 0.0)
    num_bad = int((~values_U.isfinite()).sum())
    if num_bad:
        raise RunError(
            f"{what} NaN or infinity for {num_bad} of {int(trained_U.sum())} trained tokens; accepted: finite "
            "numbers. Look at the rewards of this rollout, or choose another estimator with --advantage-estimator."
        )
    return values_U
