"""Packs the samples of a shard into rows: micro-batches of tensors. A rank does it once per rollout, so that every pass
has the same packing.

    make_micro_batches   the micro-batches of every optimizer step of a shard
    PackedMicroBatch           one row; forward passes and the advantage estimator fill its columns
    PackedSequences      positions of a row's samples: each is a sequence, or several that samples share
    RowInputs            inputs of the model that samples carry in addition to tokens, such as images

If ranks share the tokens of a row (sequence or context parallelism), it is padded to a multiple of their number.
The padding is a separate sequence at the end: no token attends to it and nothing is predicted from it, so no loss, no
metric and no gradient contains it. A context-parallel rank holds the tokens of its part of the row and the response
tokens that these predict; a target token itself may be on another rank, but its id is known here. So every response
token is held by exactly one rank.

Samples of a micro-batch that start with the same tokens may share them (:func:`make_micro_batches`, ``share``): the row
holds them once, as a sequence that others continue, and its last token predicts the first token of each of these. A
response token that several samples share is computed once, and has a column in each of them. Only positions in the row
change: columns of response tokens are the same, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from slime_core.modeling.layout import ParallelLayout
from slime_core.modeling.rows import zigzag
from slime_core.opaque import Opaque, part
from slime_core.ops.log_probs import KeptTokens
from slime_core.ops.packing import pack, row_budget
from slime_core.ops.prefixes import Prefixes
from slime_core.types import StepPlan, TrainBatch

ALONE = ParallelLayout()
"""One rank holds the whole row."""


@dataclass(frozen=True, slots=True)
class RowInputs:
    """The inputs that the samples of a row carry in addition to tokens; false if there are none.

    Arguments:
        columns: of the shard.
        members: samples of the shard, in the order of the row.
    """

    columns: Mapping[str, Opaque] = field(default_factory=dict)
    members: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.columns)

    def tensors(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Return name -> [n, ...] in the dtype of the samples: the rows of every sample, one sample after the other."""
        return {
            name: torch.from_numpy(np.concatenate([part(column, member) for member in self.members])).to(device)
            for name, column in self.columns.items()
        }


@dataclass(slots=True)
class PackedMicroBatch:
    """b samples packed into one row; this rank holds t tokens of it and predicts u response tokens.

    Arguments:
        tokens_1T, position_ids_1T: int64 [1, t]; positions are those in the samples.
        cu_seqlens: int32, where samples start and end in the *whole* row: [b + 1], one entry more if it is padded. With
            ``continues``, where sequences do, of which a sample has several.
        max_seqlen: tokens of the longest sample, or of the padding.
        num_samples: b.
        rows_U: int64 [u], the row of this rank's logits that predicts each response token.
        targets_U: int64 [u], the response tokens.
        samples_U: int64 [u], which of the b samples a response token belongs to.
        places_U: int64 [u], index of a response token among all response tokens of the shard.
        members: numbers of the b samples in the shard.
        mask_U: float32 [u], 1 trains.
        weights_U: float32 [u], ``mask_U`` times the sample's loss weight.
        advantages_U: float32 [u]; NaN until an estimator of scope ``token`` has run, so that nothing trains before it.
        rollout_log_probs_U: float32 [u].
        old_log_probs_U: float32 [u] after the log-prob pass; if None, the loss uses the current ones, detached.
        ref_log_probs_U: float32 [u] after the log-prob pass; None if unused.
        values_U: float32 [u], the critic's before its first optimizer step; None if unused.
        returns_U: float32 [u], the critic's targets, once estimated; None without a critic.
        teacher_log_probs_U: float32 [u] after the log-prob pass; None without a teacher.
        scale: factor of a sum of means over samples (of a sum over tokens, if tokens are averaged), with which
            micro-batches and ranks add up to the step's loss; 0 in an idle one.
        loss_factor: factor of the loss, and of no other metric.
        extra: name -> one entry per sample, which ``slime_before_training`` passes on to a loss of logits.
        fresh_U: bool [u], sampled by the weights that the learner holds; None if parity is not compared.
        parity_bound: differences of at least this many nats are counted.
        learner_log_probs_U: float32 [u], NaN until the loss fills it; None if parity is not compared.
        metrics_U: float32 [u] by name, to be averaged as the loss is.
        lengths: tokens of each sample with its prompt; shared tokens count in every sample.
        continues: int32, for each sequence of the row the number of the one that it continues; -1: none. None: every
            sequence is a sample. Example: prompt 5 14 with the responses 7 1 and 8, and the sample 20 21 22, make the
            row 5 14 7 1 8 20 21 22 with ``cu_seqlens = [0, 2, 4, 5, 8]``, ``continues = [-1, 0, 0, -1]`` and
            ``lengths = [4, 3, 3]``.
        routes: int16 [n, k] by the number of a layer, from 1: the k experts that its router takes for each of its n
            tokens; a layer that is missing chooses. See :mod:`slime_core.learner.routing_replay`.
        given_routes_TLK: int8 or int16 [t, layers, k], those of the engine, -1 if missing; None without routes.
        kept_tokens: truncated-sampling mask: the tokens that top-p and top-k kept for each response token; None if they
            kept all.
        engine_columns_U: name -> float32 [u, width], data of the engine for each response token.
        inputs: inputs of the model that the samples carry in addition to tokens.
    """

    tokens_1T: torch.Tensor
    position_ids_1T: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    num_samples: int
    rows_U: torch.Tensor
    targets_U: torch.Tensor
    samples_U: torch.Tensor
    places_U: torch.Tensor
    mask_U: torch.Tensor
    weights_U: torch.Tensor
    advantages_U: torch.Tensor
    rollout_log_probs_U: torch.Tensor
    members: tuple[int, ...] = ()
    temperature: float = 1.0
    old_log_probs_U: torch.Tensor | None = None
    ref_log_probs_U: torch.Tensor | None = None
    values_U: torch.Tensor | None = None
    returns_U: torch.Tensor | None = None
    teacher_log_probs_U: torch.Tensor | None = None
    scale: float = 1.0
    loss_factor: float = 1.0
    extra: dict[str, list[object]] = field(default_factory=dict)
    fresh_U: torch.Tensor | None = None
    parity_bound: float = math.inf
    learner_log_probs_U: torch.Tensor | None = None
    metrics_U: dict[str, torch.Tensor] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    continues: torch.Tensor | None = None
    routes: dict[int, torch.Tensor] = field(default_factory=dict)
    given_routes_TLK: torch.Tensor | None = None
    kept_tokens: KeptTokens | None = None
    inputs: RowInputs = field(default_factory=RowInputs)
    engine_columns_U: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def packed_sequence(self) -> Any:
        """Megatron's description of the row: sequences in THD layout, and the sequence that each of them continues."""
        from slime_core.modeling.layers import PackedRow

        return PackedRow(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            continues=self.continues,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the row that this rank holds, prompts and padding included."""
        return self.tokens_1T.size(1)


def make_micro_batches(
    shard: TrainBatch,
    *,
    device: torch.device | str = "cpu",
    layout: ParallelLayout = ALONE,
    context_rank: int = 0,
    share: bool = False,
    max_tokens: int | None = None,
) -> list[list[PackedMicroBatch]]:
    """Build the micro-batches of every optimizer step of ``shard``, as tensors on ``device``.

    Arguments:
        layout: decides the multiple to which a row is padded and which rank holds which part of it.
        context_rank: of this process among those that share its rows.
        share: whether the model supports rows of shared prefixes. They are built if the plan of ``shard`` assumes them.
        max_tokens: if the plan assumes shared prefixes and the model does not support them, split micro-batches of
            more tokens. None: do not split.

    Raises:
        ValueError: a sample has no prompt token, so nothing predicts its first response token.
    """
    if bool((shard.lengths_B <= shard.response_lengths_B).any()):
        raise ValueError("a sample without a prompt token cannot be trained: nothing predicts its first response token")
    shared = Prefixes.of_columns(shard.prefix_order_B, shard.prefix_lengths_B, lengths_B=shard.lengths_B)
    rows = _Rows(shard, layout, context_rank, device, shared if share else None)
    budget = None
    if max_tokens is not None and shared is not None and not share:
        budget = row_budget(max_tokens, context=layout.context, multiple=layout.row_multiple)
    return [
        [
            rows.micro_batch(np.asarray(members), step)
            for planned in step.micro_batches
            for members in _split(planned, shard.lengths_B, budget)
        ]
        for step in shard.steps
    ]


def _split(planned: Sequence[int], lengths_B: np.ndarray, budget: int | None) -> Sequence[Sequence[int]]:
    """Split ``planned`` into parts that make rows of at most ``budget`` tokens."""
    if budget is None or int(lengths_B[list(planned)].sum()) <= budget:
        return [planned]
    return pack(planned, lengths_B.tolist(), budget)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of ``shard`` on the context-parallel rank ``rank``; without ``shared`` prefixes they have all tokens."""

    shard: TrainBatch
    layout: ParallelLayout
    rank: int
    device: torch.device | str
    shared: Prefixes | None

    def micro_batch(self, members: np.ndarray, step: StepPlan) -> PackedMicroBatch:
        """Build one row of ``step`` from the samples ``members`` of the shard."""
        shard, tensor = self.shard, self._tensor
        row = lay_out(shard, members, _starts(shard.lengths_B)[members], shared=self.shared)
        responses = shard.response_lengths_B[members]
        padding = -len(row.places_T) % self.layout.row_multiple
        sequences, continues = row.lengths, row.continues
        if padding:
            sequences, continues = np.append(sequences, padding), np.append(continues, -1)
        row_T = np.pad(shard.tokens_T[row.places_T], (0, padding))
        held_T = zigzag(len(row_T), rank=self.rank, size=self.layout.context)
        rows_U, mine = _held(row.predictors_U, held_T, len(row_T))
        take_U = ranges(_starts(shard.response_lengths_B)[members], responses)[mine]
        samples_U = np.repeat(np.arange(len(members)), responses)[mine]
        # If the learner estimates the advantages, they are NaN until then, so that nothing trains before.
        advantages_B = shard.columns_B.get("advantages", np.full(len(shard), np.nan, np.float32))
        mask_U = shard.loss_mask_U[take_U]
        return PackedMicroBatch(
            tokens_1T=tensor(row_T[held_T], torch.int64)[None],
            position_ids_1T=tensor(np.append(row.positions_T, np.arange(padding))[held_T], torch.int64)[None],
            cu_seqlens=tensor(np.concatenate([[0], np.cumsum(sequences)]), torch.int32),
            max_seqlen=max(int(shard.lengths_B[members].max()), padding),
            num_samples=len(members),
            rows_U=tensor(rows_U, torch.int64),
            targets_U=tensor(row_T[row.targets_U[mine]], torch.int64),
            samples_U=tensor(samples_U, torch.int64),
            places_U=tensor(take_U, torch.int64),
            mask_U=tensor(mask_U, torch.float32),
            weights_U=tensor(mask_U * shard.loss_weights_B[members][samples_U], torch.float32),
            advantages_U=tensor(advantages_B[members][samples_U], torch.float32),
            rollout_log_probs_U=tensor(shard.rollout_log_probs_U[take_U], torch.float32),
            members=tuple(members.tolist()),
            temperature=shard.temperature,
            scale=1 / step.divisor,
            loss_factor=step.loss_factor,
            lengths=shard.lengths_B[members].tolist(),
            continues=tensor(continues, torch.int32) if (continues >= 0).any() else None,
            given_routes_TLK=self._given_routes(row.places_T, padding, held_T),
            kept_tokens=self._kept_tokens(take_U),
            inputs=RowInputs(shard.inputs, tuple(members.tolist())),
            engine_columns_U={
                name: tensor(column_U[take_U], torch.float32) for name, column_U in shard.engine_columns_U.items()
            },
        )

    def _given_routes(self, places_T: np.ndarray, padding: int, held_T: np.ndarray) -> torch.Tensor | None:
        if self.shard.routes_TLK is None:
            return None
        row_TLK = np.pad(self.shard.routes_TLK[places_T], ((0, padding), (0, 0), (0, 0)), constant_values=-1)
        return self._tensor(row_TLK[held_T], torch.int8 if row_TLK.dtype == np.int8 else torch.int16)

    def _kept_tokens(self, take_U: np.ndarray) -> KeptTokens | None:
        all_U, ids_S = self.shard.kept_counts_U, self.shard.kept_ids_S
        if all_U is None or ids_S is None:
            return None
        kept_S = ids_S[ranges(_starts(all_U)[take_U], all_U[take_U])]
        return KeptTokens(self._tensor(kept_S, torch.int64), self._tensor(all_U[take_U], torch.int64))

    def _tensor(self, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=self.device)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.asarray(np.cumsum(lengths) - lengths)


def _held(places: np.ndarray, held_T: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of ``places`` among the tokens that this rank holds, and which of ``places`` it holds."""
    index = np.full(num_tokens, -1)
    index[held_T] = np.arange(len(held_T))
    held = index[places]
    return held[held >= 0], np.flatnonzero(held >= 0)


def idle_micro_batch(micro: PackedMicroBatch) -> PackedMicroBatch:
    """Copy the row with nothing to train: the copy completes the schedule of a step and changes no sum.

    See :func:`~slime_core.learner.trained_model.micro_batches_of_rank`.
    """
    nothing_U = torch.zeros_like(micro.mask_U)
    return replace(micro, mask_U=nothing_U, weights_U=torch.zeros_like(micro.weights_U), scale=0.0)


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """b samples as s sequences of a row of t tokens, which predict u response tokens.

    Example: the prompt 5 14 with the responses 7 1 and 8, shared, make the row 5 14 7 1 8: ``lengths = [2, 2, 1]``,
    ``continues = [-1, 0, 0]``, ``positions_T = [0, 1, 2, 3, 2]``, ``predictors_U = [1, 2, 1]``,
    ``targets_U = [2, 3, 4]``.

    Arguments:
        places_T: int64 [t], index of each token among those of the shard; of a shared one, that of its first sample.
        positions_T: int64 [t], place of each token in its sample.
        lengths: int64 [s].
        continues: int64 [s], the number of the sequence that each one continues; -1: none.
        predictors_U, targets_U: int64 [u], place in the row of the token before each response token, and of the
            response token; sample after sample in the order of the micro-batch.
    """

    places_T: np.ndarray
    positions_T: np.ndarray
    lengths: np.ndarray
    continues: np.ndarray
    predictors_U: np.ndarray
    targets_U: np.ndarray


def lay_out(shard: TrainBatch, members: np.ndarray, starts: np.ndarray, *, shared: Prefixes | None) -> PackedSequences:
    """Lay the samples ``members`` of ``shard`` out as sequences.

    Arguments:
        starts: int64 [b], index of each sample's first token in the shard.
        shared: common prefixes of the shard's samples, which the row holds once; if None, it repeats them.
    """
    tree = None if shared is None else shared.take(members)
    if tree is None or not tree.common.any():
        tree = Prefixes(members, shard.lengths_B[members], np.zeros(len(members), np.int64))
    numbers = {sample: number for number, sample in enumerate(members.tolist())}
    order = np.array([numbers[sample] for sample in tree.samples.tolist()])
    counts, nodes = tree.lengths - tree.common, tree.nodes()
    prompts = (shard.lengths_B - shard.response_lengths_B)[tree.samples]
    path, responses = np.zeros(0, np.int64), [np.zeros(0, np.int64)] * len(members)
    places = zip(order, tree.common, _starts(counts), counts, prompts, strict=True)
    for member, common, start, count, prompt in places:
        path = np.concatenate([path[:common], np.arange(start, start + count)])
        responses[member] = path[prompt - 1 :]
    return PackedSequences(
        places_T=ranges(starts[order] + tree.common, counts),
        positions_T=ranges(tree.common, counts),
        lengths=nodes.lengths,
        continues=nodes.parents,
        predictors_U=np.concatenate([path[:-1] for path in responses]),
        targets_U=np.concatenate([path[1:] for path in responses]),
    )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return ``[s, s + 1, ..., s + n - 1]`` for every pair of ``starts`` and ``lengths``, one after the other."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    steps = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    return np.asarray(np.repeat(starts, lengths) + steps, dtype=np.int64)
