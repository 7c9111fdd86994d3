"""How the samples of a rollout are cut into optimizer steps, shards and micro-batches, and what the cut came to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slime_core.config.described import described
from slime_core.config.flops import ForwardFlops, forward_flops
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, RunError
from slime_core.ops.packing import pack, pack_by_count, row_budget
from slime_core.ops.prompts import same_prompts
from slime_core.types import TrainBatch

__all__ = ["BatchPlan", "batch_metrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """What decides the cut, and how the loss of a step is averaged.

    Example: with ``BatchPlan(num_ranks=2, max_tokens=100, context=2)`` a micro-batch holds at most 200 tokens, 100 on
    each of the two ranks that share it.

    Arguments:
        num_ranks: data-parallel shards.
        num_steps: optimizer steps; consecutive rollouts share a step, and a rollout's siblings are never apart.
        max_tokens: of one packed micro-batch on one rank; a longer sample runs alone.
        context: ranks that share every row.
        row_multiple: what a row is padded to.
        micro_batch_size: samples of one micro-batch, however long; None: as many as fit ``max_tokens``.
        hard: a sample that does not fit ends the run.
        flops: shards get equal work of this kind; None: equally many tokens.
        share_prompts: samples of a micro-batch with equal prompts share them, if that saves enough tokens.
        per_token, token_divisor: see :func:`slime_core.rollout.shards.loss_weights` and
            :func:`~slime_core.rollout.shards.loss_factor`.
    """

    num_ranks: int
    max_tokens: int
    num_steps: int = 1
    context: int = 1
    row_multiple: int = 1
    micro_batch_size: int | None = None
    hard: bool = False
    flops: ForwardFlops | None = None
    share_prompts: bool = False
    per_token: bool = False
    token_divisor: float | None = None

    @classmethod
    def of(cls, config: RunConfig, folder: Path) -> BatchPlan:
        """What the settings of a run ask for; ``folder`` describes the model.

        Raises:
            ConfigError: work is to be balanced and cannot be counted.
        """
        learner, algorithm, sizes = config.learner, config.algorithm, config.parallel
        return cls(
            num_ranks=config.num_data_ranks,
            num_steps=config.steps_per_rollout,
            max_tokens=learner.max_tokens_per_gpu,
            context=sizes.context_parallel_size,
            row_multiple=sizes.row_multiple,
            micro_batch_size=learner.micro_batch_size,
            hard=learner.hard_token_budget,
            flops=_flops(folder) if learner.balance_by_flops else None,
            share_prompts=_shares_prompts(config),
            per_token=algorithm.calculate_per_token_loss,
            token_divisor=algorithm.loss_token_divisor,
        )

    @property
    def budget(self) -> int:
        """Tokens of a row, over all ranks that share it, such that padding does not take it above the limit."""
        return row_budget(self.max_tokens, context=self.context, multiple=self.row_multiple)

    def cost(self, length: int) -> int:
        """What shards are balanced by: the work or the tokens of a sample."""
        return length if self.flops is None else self.flops.of(length)

    def pack(self, samples: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """The micro-batches of one rank and step."""
        if self.micro_batch_size is not None:
            return pack_by_count(samples, lengths, self.micro_batch_size)
        return pack(samples, lengths, self.budget)

    def warnings(self, lengths: Sequence[int]) -> list[str]:
        """What a person should read about samples of these lengths; at most one entry.

        Raises:
            RunError: one does not fit a budget that is hard.
        """
        limit = self.budget // (self.micro_batch_size or 1)
        long = [length for length in lengths if length > limit]
        if not long or (self.micro_batch_size is not None and not self.hard):
            return []
        size = f" / micro_batch_size = {self.micro_batch_size}" if self.micro_batch_size else ""
        found = (
            f"{len(long)} of {len(lengths)} samples are longer than max_tokens_per_gpu x context_parallel_size{size} = "
            f"{limit} tokens, the longest {max(long)}"
        )
        advice = "raise --max-tokens-per-gpu, or lower --rollout-max-response-len"
        if self.hard:
            raise RunError(f"{found}; with --hard-token-budget that ends the run: {advice}")
        return [f"{found}; each runs alone. If that takes too much memory, lower --rollout-max-response-len"]


def batch_metrics(shards: Sequence[TrainBatch], plan: BatchPlan) -> dict[str, float]:
    """How even the cut is, averaged over optimizer steps: the busiest rank over the mean one, 1 at best; the share of
    rows that is padding; and micro-batches a rank, without those that only fill a schedule up."""
    rows = [
        [[_lengths(shard, micro) for micro in shard.steps[step].micro_batches] for shard in shards]
        for step in range(plan.num_steps)
    ]
    tokens = [sum(row) for step in rows for rank in step for row in rank]
    padding = sum(-count % plan.row_multiple for count in tokens)
    counts = [float(len(rank)) for step in rows for rank in step]
    metrics = {
        "train/token_imbalance": statistics.fmean(_imbalance(step, sum) for step in rows),
        "train/padding_ratio": padding / (padding + sum(tokens)),
        "train/micro_batches_per_rank": statistics.fmean(counts),
    }
    if plan.flops is not None:
        metrics["train/flops_imbalance"] = statistics.fmean(
            _imbalance(step, lambda row: sum(map(plan.cost, row))) for step in rows
        )
    return metrics


def _lengths(shard: TrainBatch, members: Sequence[int]) -> list[int]:
    """Tokens of the samples of one row; where they share prompts, a prompt counts for the first of them."""
    lengths_b: list[int] = shard.lengths_B[list(members)].tolist()
    if not shard.shares_prompts:
        return lengths_b
    prompts_b = (shard.lengths_B - shard.response_lengths_B)[list(members)].tolist()
    starts_B = np.cumsum(shard.lengths_B) - shard.lengths_B
    prompts = [shard.tokens_T[starts_B[i] :][:count] for i, count in zip(members, prompts_b, strict=True)]
    for place in (place for group in same_prompts(prompts) for place in group[1:]):
        lengths_b[place] -= prompts_b[place]
    return lengths_b


def _shares_prompts(config: RunConfig) -> bool:
    """Whether rows of shared prompts are wanted and can be made: nothing else fixes what stands in a row."""
    learner = config.learner
    fixed = learner.micro_batch_size is not None or learner.balance_by_flops or learner.use_rollout_routing_replay
    return learner.shared_prompts == "auto" and config.parallel.context_parallel_size == 1 and not fixed


def _imbalance(ranks: Sequence[Sequence[list[int]]], cost: Callable[[list[int]], int]) -> float:
    """The largest over the mean of the ranks' costs; ``ranks`` holds the lengths of each row's samples."""
    loads = [sum(map(cost, rows)) for rows in ranks]
    return max(loads) / statistics.fmean(loads)


def _flops(folder: Path) -> ForwardFlops:
    try:
        return forward_flops(described(folder) or {})
    except ValueError as error:
        raise ConfigError(
            f"balance_by_flops: {folder / 'config.json'} {error}; leave it out, and ranks are balanced by tokens"
        ) from error
