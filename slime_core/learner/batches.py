"""Cuts a shard into packed micro-batches of tensors, once a rollout, so that every pass sees the same packing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from slime_core.types import TrainBatch

__all__ = ["MicroBatch", "cut"]


@dataclass(slots=True)
class MicroBatch:
    """b samples packed into one row of t tokens, of which u are responses.

    Arguments:
        tokens_1T, position_ids_1T: int64 [1, t]; positions restart at 0 with every sample.
        cu_seqlens: int32 [b + 1], where samples start and end in the row.
        max_seqlen: tokens of the longest sample.
        rows_U: int64 [u], the row of the logits that predicts each response token.
        targets_U: int64 [u], the response tokens.
        samples_U: int64 [u], which of the b samples a response token belongs to.
        mask_U: float32 [u], 1 trains.
        weights_U: float32 [u], ``mask_U`` times the sample's loss weight.
        advantages_U, rollout_log_probs_U: float32 [u].
        old_log_probs_U: float32 [u] once annotated; None: the current ones stand in, detached.
        ref_log_probs_U: float32 [u] once annotated; None: nothing reads them.
    """

    tokens_1T: torch.Tensor
    position_ids_1T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    rows_U: torch.Tensor
    targets_U: torch.Tensor
    samples_U: torch.Tensor
    mask_U: torch.Tensor
    weights_U: torch.Tensor
    advantages_U: torch.Tensor
    rollout_log_probs_U: torch.Tensor
    temperature: float = 1.0
    old_log_probs_U: torch.Tensor | None = None
    ref_log_probs_U: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens in the row, prompts included."""
        return self.tokens_1T.size(1)


def cut(shard: TrainBatch, *, device: torch.device | str = "cpu") -> list[list[MicroBatch]]:
    """The micro-batches of every optimizer step of ``shard``, as tensors on ``device``.

    Raises:
        ValueError: a sample has no prompt token, so nothing predicts its first response token.
    """
    starts_T = np.concatenate([[0], np.cumsum(shard.lengths_B)])
    starts_U = np.concatenate([[0], np.cumsum(shard.response_lengths_B)])
    if bool((shard.lengths_B <= shard.response_lengths_B).any()):
        raise ValueError("a sample without a prompt token cannot be trained: nothing predicts its first response token")
    return [
        [_micro_batch(shard, np.asarray(members), starts_T, starts_U, device) for members in step.micro_batches]
        for step in shard.steps
    ]


def _micro_batch(
    shard: TrainBatch, members: np.ndarray, starts_T: np.ndarray, starts_U: np.ndarray, device: torch.device | str
) -> MicroBatch:
    lengths, responses = shard.lengths_B[members], shard.response_lengths_B[members]
    ends = np.cumsum(lengths)
    take_T = _ranges(starts_T[members], lengths)
    take_U = _ranges(starts_U[members], responses)
    targets_at = _ranges(ends - responses, responses)
    samples_U = np.repeat(np.arange(len(members)), responses)
    tokens_T, mask_U = shard.tokens_T[take_T], shard.loss_mask_U[take_U]

    def tensor(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    return MicroBatch(
        tokens_1T=tensor(tokens_T, torch.int64)[None],
        position_ids_1T=tensor(_ranges(np.zeros_like(lengths), lengths), torch.int64)[None],
        cu_seqlens=tensor(np.concatenate([[0], ends]), torch.int32),
        max_seqlen=int(lengths.max()),
        rows_U=tensor(targets_at - 1, torch.int64),
        targets_U=tensor(tokens_T[targets_at], torch.int64),
        samples_U=tensor(samples_U, torch.int64),
        mask_U=tensor(mask_U, torch.float32),
        weights_U=tensor(mask_U * shard.loss_weights_B[members][samples_U], torch.float32),
        advantages_U=tensor(shard.columns_B["advantages"][members][samples_U], torch.float32),
        rollout_log_probs_U=tensor(shard.rollout_log_probs_U[take_U], torch.float32),
        temperature=shard.temperature,
    )


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """``[s, s + 1, ..., s + n - 1]`` for every pair of ``starts`` and ``lengths``, one after the other."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    steps = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return np.asarray(np.repeat(starts, lengths) + steps, dtype=np.int64)


def boundaries(micro: MicroBatch) -> list[tuple[int, int]]:
    """Start and end of every sample in the row; for messages and tests."""
    return list(pairwise(micro.cu_seqlens.tolist()))


def packed_sequence(micro: MicroBatch) -> Any:
    """Megatron's description of the row: sequences in THD layout."""
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro.cu_seqlens,
        cu_seqlens_kv=micro.cu_seqlens,
        max_seqlen_q=micro.max_seqlen,
        max_seqlen_kv=micro.max_seqlen,
    )
