"""Divides the shards of the actor's data-parallel ranks over those of a separate critic.

Every optimizer step keeps its samples and their loss weights, so its loss is the same sum for every division. Per-token
numbers are sent as :class:`TokenValues`, which names the shard and the sample of its tokens. ``critic.py`` and the
learner's actors call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime_core.errors import RunError
from slime_core.opaque import column, part
from slime_core.ops.packing import balance, pack, pack_by_count
from slime_core.types import TrainBatch

SampleIndex = tuple[int, int]
"""Number of a shard, and of a sample in it."""

PER_SAMPLE = ("lengths_B", "response_lengths_B", "loss_weights_B", "indices_B")
PER_TOKEN = ("loss_mask_U", "rollout_log_probs_U")
"""Columns that a critic reads. Routes, masks and data of the engine concern the actor's logits alone."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """One number per response token of the samples at ``places``, one sample after the other.

    Arguments:
        lengths_B: int64 [b], response tokens of each.
        values_U: float32 [u].
    """

    places: list[SampleIndex]
    lengths_B: np.ndarray
    values_U: np.ndarray

    def samples(self) -> Iterator[tuple[SampleIndex, np.ndarray]]:
        """Iterate over the samples, with the numbers of each."""
        return zip(self.places, np.split(self.values_U, np.cumsum(self.lengths_B)[:-1]), strict=True)


def reshard(
    shards: Sequence[TrainBatch],
    *,
    num_ranks: int,
    max_tokens: int,
    micro_batch_size: int | None = None,
    cost: Callable[[int], int] = int,
) -> list[tuple[TrainBatch, list[SampleIndex]]]:
    """Build the shard of each of ``num_ranks`` data-parallel ranks; return it with the indices of its samples.

    Arguments:
        shards: of all data-parallel ranks of the other group, in rank order.
        max_tokens: of one packed micro-batch.
        micro_batch_size: samples of one micro-batch, of any length. None for as many as fit ``max_tokens``.
        cost: number of tokens of a sample -> its cost, by which ranks are balanced.

    Raises:
        RunError: an optimizer step has fewer samples than there are ranks.
    """
    lengths = {(k, i): int(length) for k, shard in enumerate(shards) for i, length in enumerate(shard.lengths_B)}
    plans: list[list[list[list[SampleIndex]]]] = [[] for _ in range(num_ranks)]
    for number in range(len(shards[0].steps)):
        members = sorted(
            (k, i) for k, shard in enumerate(shards) for micro in shard.steps[number].micro_batches for i in micro
        )
        if len(members) < num_ranks:
            raise RunError(
                f"an optimizer step of {len(members)} samples cannot feed the {num_ranks} data-parallel ranks of the "
                "critic; lower --critic-num-gpus, or raise --global-batch-size"
            )
        tokens = [lengths[place] for place in members]
        costs = [cost(count) for count in tokens]
        for plan, mine in zip(plans, balance(range(len(members)), costs, num_ranks), strict=True):
            micro_batches = (
                pack(mine, tokens, max_tokens)
                if micro_batch_size is None
                else pack_by_count(mine, tokens, micro_batch_size)
            )
            plan.append([[members[at] for at in micro] for micro in micro_batches])
    return [_batch(shards, plan) for plan in plans]


def _batch(shards: Sequence[TrainBatch], plan: list[list[list[SampleIndex]]]) -> tuple[TrainBatch, list[SampleIndex]]:
    places = sorted(place for step in plan for micro in step for place in micro)
    at = {place: position for position, place in enumerate(places)}
    first = shards[0]
    steps = tuple(
        replace(first_step, micro_batches=tuple(tuple(at[place] for place in micro) for micro in step))
        for step, first_step in zip(plan, first.steps, strict=True)
    )
    columns: dict[str, Any] = {
        **{name: _per_sample([getattr(shard, name) for shard in shards], places) for name in PER_SAMPLE},
        **{name: gather_tokens([getattr(shard, name) for shard in shards], shards, places) for name in PER_TOKEN},
    }
    batch = TrainBatch(
        rollout=first.rollout,
        temperature=first.temperature,
        steps=steps,
        tokens_T=_per_token([shard.tokens_T for shard in shards], [shard.lengths_B for shard in shards], places),
        columns_B={name: _per_sample([shard.columns_B[name] for shard in shards], places) for name in first.columns_B},
        inputs={name: column([part(shards[k].inputs[name], i) for k, i in places]) for name in first.inputs},
        **columns,
    )
    return batch, places


def gather_tokens(
    columns_U: Sequence[np.ndarray], shards: Sequence[TrainBatch], places: Sequence[SampleIndex]
) -> np.ndarray:
    """Gather the numbers of the samples at ``places`` from ``columns_U``, one column per shard."""
    return _per_token(columns_U, [shard.response_lengths_B for shard in shards], places)


def values_of_shard(columns: Sequence[TokenValues], shard: TrainBatch, *, number: int) -> np.ndarray:
    """Gather the numbers of ``shard``, which has the index ``number``: float32 [u] in its order.

    Raises:
        RunError: a sample is missing.
    """
    parts = {place: part for column in columns for place, part in column.samples() if place[0] == number}
    missing = len(shard) - len(parts)
    if missing:
        raise RunError(f"{missing} of {len(shard)} samples of a shard have no values; a rank of the critic is missing")
    return np.concatenate([parts[number, i] for i in range(len(shard))])


def _per_sample(columns_B: Sequence[np.ndarray], places: Sequence[SampleIndex]) -> np.ndarray:
    return np.array([columns_B[k][i] for k, i in places], columns_B[0].dtype)


def _per_token(
    columns: Sequence[np.ndarray], lengths: Sequence[np.ndarray], places: Sequence[SampleIndex]
) -> np.ndarray:
    parts = [np.split(column, np.cumsum(of_samples)[:-1]) for column, of_samples in zip(columns, lengths, strict=True)]
    return np.concatenate([parts[k][i] for k, i in places])
