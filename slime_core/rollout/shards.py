"""From finished samples to one shard a data-parallel rank: loss weights, balance and packing are decided once, here.

BatchPlan        the division of samples into optimizer steps, shards and micro-batches
batch_metrics    measures the balance of that division
loss_masks       tokens that train; rollout_numbers: samples that share a mean
grouped_rewards  rewards as an advantage estimator receives them
make_shards      builds the shards
TrainInputs      columns of inputs other than text, such as pixels
mask_columns     columns of the truncated-sampling mask
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from slime_core.config.model_config import ForwardFlops, described, forward_flops
from slime_core.config.schema import RunConfig
from slime_core.contracts import GroupedRewards
from slime_core.errors import ConfigError, RunError
from slime_core.opaque import Opaque, array_of, column
from slime_core.ops.groups import loss_divisor, loss_factor, loss_weights
from slime_core.ops.packing import balance, pack, pack_by_count, row_budget, split_steps
from slime_core.ops.prefixes import LEAST_SAVED, Prefixes
from slime_core.types import EngineColumn, Sample, StepPlan, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The division of samples into steps, ranks and micro-batches, and the mean of the loss of a step.

    Example: with ``BatchPlan(num_ranks=2, max_tokens=100, context=2)`` a micro-batch holds at most 200 tokens, 100 on
    each of the two ranks that share it.

    Arguments:
        num_ranks: data-parallel shards.
        num_steps: optimizer steps; consecutive rollouts share a step, and siblings of a rollout are in the same one.
        max_tokens: of one packed micro-batch on one rank; a longer sample runs alone.
        context: ranks that share every row.
        row_multiple: rows are padded to a multiple of it.
        micro_batch_size: samples of one micro-batch, of any length. None: as many as fit ``max_tokens``.
        hard: a sample that does not fit ends the run.
        flops: shards get equal work of this kind. None: equal numbers of tokens.
        share_prompts: samples of a micro-batch share the tokens with which they all start, if that saves enough.
        per_token, token_divisor, counts_masked: see :mod:`slime_core.ops.groups`.
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
    counts_masked: bool = False

    @classmethod
    def of(cls, config: RunConfig, folder: Path) -> BatchPlan:
        """Return the plan of a run whose model is in ``folder``.

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
            counts_masked=algorithm.count_masked_rollouts,
        )

    @property
    def budget(self) -> int:
        """Tokens of a row, over all ranks that share it, such that padding does not take it above the limit."""
        return row_budget(self.max_tokens, context=self.context, multiple=self.row_multiple)

    def cost(self, length: int) -> int:
        """Return the cost by which shards are balanced: a sample's work, or its tokens."""
        return length if self.flops is None else self.flops.of(length)

    def pack(self, samples: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Return the micro-batches of one rank and step."""
        if self.micro_batch_size is not None:
            return pack_by_count(samples, lengths, self.micro_batch_size)
        return pack(samples, lengths, self.budget)

    def warnings(self, lengths: Sequence[int]) -> list[str]:
        """Return at most one warning for people about samples of these lengths.

        Raises:
            RunError: a sample exceeds a hard budget.
        """
        limit = self.budget // (self.micro_batch_size or 1)
        long = [length for length in lengths if length > limit]
        if not long or (self.micro_batch_size is not None and not self.hard):
            return []
        size = f" / micro_batch_size = {self.micro_batch_size}" if self.micro_batch_size else ""
        problem = (
            f"{len(long)} of {len(lengths)} samples are longer than max_tokens_per_gpu x context_parallel_size{size} = "
            f"{limit} tokens, the longest {max(long)}"
        )
        advice = "raise --max-tokens-per-gpu, or lower --rollout-max-response-len"
        if self.hard:
            raise RunError(f"{problem}; with --hard-token-budget that ends the run: {advice}")
        return [f"{problem}; each runs alone. If that takes too much memory, lower --rollout-max-response-len"]


def batch_metrics(shards: Sequence[TrainBatch], plan: BatchPlan) -> dict[str, float]:
    """Measure the balance of the batch plan, averaged over optimizer steps: the load of the busiest rank over the mean
    load, 1 at best; the share of padding in rows; micro-batches per rank, without those that only fill a schedule."""
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
    """Return the tokens of the samples of one row; a shared prefix counts for the first sample."""
    shared = Prefixes.of_columns(shard.prefix_order_B, shard.prefix_lengths_B, lengths_B=shard.lengths_B)
    if shared is None:
        lengths_b: list[int] = shard.lengths_B[list(members)].tolist()
        return lengths_b
    row = shared.take(members)
    separate_b: list[int] = (row.lengths - row.common).tolist()
    return separate_b


def _shares_prompts(config: RunConfig) -> bool:
    """Return whether rows may share prefixes: no other setting determines the samples of a row."""
    learner = config.learner
    fixed = learner.micro_batch_size is not None or learner.balance_by_flops or learner.use_rollout_routing_replay
    return learner.shared_prompts == "auto" and config.parallel.context_parallel_size == 1 and not fixed


def _imbalance(ranks: Sequence[Sequence[list[int]]], cost: Callable[[list[int]], int]) -> float:
    """Return the largest over the mean of the ranks' costs; ``ranks`` holds the lengths of each row's samples."""
    loads = [sum(map(cost, rows)) for rows in ranks]
    return max(loads) / statistics.fmean(loads)


def _flops(folder: Path) -> ForwardFlops:
    try:
        return forward_flops(described(folder) or {})
    except ValueError as error:
        raise ConfigError(
            f"balance_by_flops: {folder / 'config.json'} {error}; leave it out, and ranks are balanced by tokens"
        ) from error


def loss_masks(samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """Return one float32 mask [response length] per sample: its mask, all ones without, all zeros if it is removed.

    Raises:
        ValueError: a mask and its response differ in length, or a mask holds something else than 0 and 1.
    """
    return [_mask(sample) for sample in samples]


def _mask(sample: Sample) -> NDArray[np.float32]:
    if sample.remove_sample:
        return np.zeros(sample.response_length, np.float32)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, np.float32)
    if len(sample.loss_mask) != sample.response_length:
        raise ValueError(
            f"sample {sample.index}: the loss mask has {len(sample.loss_mask)} entries, the response "
            f"{sample.response_length} tokens; give one entry a response token"
        )
    mask_T = np.asarray(sample.loss_mask, np.float32)
    if not ((mask_T == 0) | (mask_T == 1)).all():
        value = mask_T[(mask_T != 0) & (mask_T != 1)][0]
        raise ValueError(
            f"sample {sample.index}: the loss mask holds {value:g}; accepted: 1 (the token trains) and 0. To weigh "
            "tokens, use a policy loss or a correction"
        )
    return mask_T


def rollout_numbers(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Return the number of each sample's rollout, from 0 in the order of first occurrence; siblings share one.

    A ``rollout_id`` is a number within a prompt group: the same number in two groups means two rollouts.
    """
    keys = [
        ("alone", place) if sample.rollout_id is None else (sample.group_index, sample.rollout_id)
        for place, sample in enumerate(samples)
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)


def grouped_rewards(
    samples: Sequence[Sample], masks: Sequence[NDArray[np.float32]], *, key: str | None
) -> GroupedRewards:
    """Return the rewards of ``samples`` as a sample-scope advantage estimator gets them."""
    return GroupedRewards(
        rewards_B=np.array([sample.reward_value(key) for sample in samples], np.float32),
        groups_B=np.array([sample.group_index for sample in samples], np.int64),
        lengths_B=np.array([sample.response_length for sample in samples], np.int64),
        mask_sums_B=np.array([mask.sum() for mask in masks], np.int64),
        rollouts_B=rollout_numbers(samples),
    )


def make_shards(
    samples: Sequence[Sample],
    advantages_B: NDArray[np.float32] | None,
    plan: BatchPlan,
    *,
    rollout: int,
    temperature: float,
    rewards_B: NDArray[np.float32] | None = None,
    with_routes: bool = False,
    cuts: bool = False,
    columns: Mapping[str, EngineColumn] = MappingProxyType({}),
) -> list[TrainBatch]:
    """Return one shard a data-parallel rank, in rank order; together they hold every sample exactly once.

    Arguments:
        samples: completed or truncated, in the order in which steps take them.
        advantages_B: one a sample. None: the learner estimates them from ``rewards_B``.
        with_routes: shards hold the experts that the engine chose for each token.
        cuts: top-p or top-k left tokens out, so every trained token needs its truncated-sampling mask.
        columns: the columns of the engine that every sample needs, by name.

    Raises:
        ValueError: there are fewer rollouts than steps, or fewer samples than ranks in a step, so that a rank would
            have no work; or a sample lacks routes, a column of the engine, or a valid truncated-sampling mask; or its
            inputs for the model are no arrays, or differ from those of other samples.
    """
    masks, inputs = loss_masks(samples), TrainInputs(samples)
    # Samples with equal tokens may have different images, and a row has the images of all its samples.
    shared = _shared(samples) if plan.share_prompts and not inputs else None
    weights_B, ranks = _planned(samples, np.array([mask.sum() for mask in masks], np.int64), shared, plan)
    per_sample = {"advantages": advantages_B, "rewards": rewards_B}
    columns_B = {name: values_B for name, values_B in per_sample.items() if values_B is not None}

    def shard(steps: Sequence[StepPlan]) -> TrainBatch:
        """Return the shard of ``steps``, whose members are positions in ``samples``."""
        places = sorted(place for step in steps for micro in step.micro_batches for place in micro)
        members, member_masks = [samples[i] for i in places], [masks[i] for i in places]
        kept_counts_U, kept_ids_S = mask_columns(members, member_masks, cuts=cuts)
        prefixes = None if shared is None else shared.take(places)
        routes = [_routes(sample, like=members[0]) for sample in members] if with_routes else None
        return TrainBatch(
            rollout=rollout,
            tokens_T=np.concatenate([np.asarray(sample.tokens, np.int32) for sample in members]),
            lengths_B=np.array([len(sample.tokens) for sample in members], np.int64),
            response_lengths_B=np.array([sample.response_length for sample in members], np.int64),
            loss_mask_U=np.concatenate(member_masks).astype(np.int8),
            loss_weights_B=weights_B[places],
            rollout_log_probs_U=np.concatenate(list(map(_log_probs, members))),
            columns_B={name: values_B[places] for name, values_B in columns_B.items()},
            steps=_renumbered(steps, {place: position for position, place in enumerate(places)}),
            indices_B=np.array([sample.index for sample in members], np.int64),
            groups_B=_groups(members),
            temperature=temperature,
            weight_version_B=np.array(list(map(_weight_version, members)), np.int64),
            routes_TLK=None if routes is None else np.concatenate(routes),
            kept_counts_U=kept_counts_U,
            kept_ids_S=kept_ids_S,
            inputs=inputs.columns(places),
            engine_columns_U={
                name: np.concatenate([_engine_column(sample, name, engine_column) for sample in members])
                for name, engine_column in columns.items()
            },
            prefix_order_B=None if prefixes is None else np.searchsorted(places, prefixes.samples),
            prefix_lengths_B=None if prefixes is None else prefixes.common,
        )

    return [shard(steps) for steps in ranks]


def _groups(samples: Sequence[Sample]) -> NDArray[np.int64] | None:
    indices = [sample.group_index for sample in samples]
    return None if None in indices else np.array(indices, np.int64)


def _renumbered(steps: Sequence[StepPlan], positions: Mapping[int, int]) -> tuple[StepPlan, ...]:
    return tuple(
        replace(step, micro_batches=tuple(tuple(positions[place] for place in micro) for micro in step.micro_batches))
        for step in steps
    )


def _planned(
    samples: Sequence[Sample], sums_B: NDArray[np.int64], shared: Prefixes | None, plan: BatchPlan
) -> tuple[NDArray[np.float32], list[list[StepPlan]]]:
    """Return the loss weight of every sample, float32 [B], and the steps of each rank."""
    lengths, weights_B = [len(sample.tokens) for sample in samples], np.zeros(len(samples), np.float32)
    # With a constant divisor all tokens have the same weight; the factor has its value.
    per_token = plan.per_token or plan.token_divisor is not None
    ranks: list[list[StepPlan]] = [[] for _ in range(plan.num_ranks)]
    rollouts_B = rollout_numbers(samples)
    for step in _steps(rollouts_B, plan):
        of_step = rollouts_B[step], sums_B[step]
        weights_B[step] = loss_weights(*of_step, per_token=per_token)
        divisor = loss_divisor(*of_step, per_token=per_token)
        factor = loss_factor(*of_step, token_divisor=plan.token_divisor, counts_masked=plan.counts_masked)
        for steps, micro_batches in zip(ranks, _make_micro_batches(step, lengths, shared, plan), strict=True):
            steps.append(StepPlan(tuple(map(tuple, micro_batches)), divisor, factor))
    return weights_B, ranks


def _steps(rollouts_B: NDArray[np.int64], plan: BatchPlan) -> list[list[int]]:
    """Return the positions of each optimizer step's samples; siblings share a step, or their rollout would count in
    two."""
    parts = split_steps(range(int(rollouts_B.max(initial=-1)) + 1), plan.num_steps)
    steps = [np.flatnonzero(np.isin(rollouts_B, part)).tolist() for part in parts]
    for step, part in zip(steps, parts, strict=True):
        if len(step) < plan.num_ranks:
            raise ValueError(
                f"{len(step)} samples in an optimizer step cannot feed {plan.num_ranks} data-parallel ranks; "
                f"num_steps_per_rollout = {plan.num_steps} leaves a step {len(part)} rollouts, and a rollout is never "
                "split. Lower --num-steps-per-rollout, or raise --rollout-batch-size"
            )
    return steps


def _shared(samples: Sequence[Sample]) -> Prefixes | None:
    """Return the prefixes that samples share, or None if sharing would save too little."""
    shared = Prefixes.of([np.asarray(sample.tokens, np.int64) for sample in samples])
    return shared if shared.saved >= LEAST_SAVED else None


def _make_micro_batches(
    step: list[int], lengths: list[int], shared: Prefixes | None, plan: BatchPlan
) -> list[list[list[int]]]:
    """Divide the samples of one optimizer step into each rank's micro-batches."""
    if shared is not None:
        return shared.plan(step, num_ranks=plan.num_ranks, max_tokens=plan.budget)
    return [plan.pack(members, lengths) for members in balance(step, list(map(plan.cost, lengths)), plan.num_ranks)]


def _routes(sample: Sample, *, like: Sample) -> NDArray[np.int8 | np.int16]:
    """Return int8 or int16 [tokens, layers, k]: the engine's routes, and -1 for the last token, which it never read."""
    routes, others = sample.rollout_routed_experts, like.rollout_routed_experts
    shape, like_shape = (() if array is None else np.shape(array) for array in (routes, others))
    count = len(sample.tokens)
    if len(shape) != 3 or shape != (count - 1, *like_shape[1:]):
        raise ValueError(
            f"sample {sample.index}: use_rollout_routing_replay needs the experts of all {count} tokens except the "
            f"last, an array [{count - 1}, layers, experts a token] with equal layers and experts in all samples; the "
            f"sample has {list(shape) if shape else 'none'}. A generate function copies routed_experts from the "
            "engine's last answer to rollout_routed_experts of its sample"
        )
    is_small = isinstance(routes, np.ndarray) and routes.dtype == np.int8
    return np.pad(np.asarray(routes, np.int8 if is_small else np.int16), ((0, 1), (0, 0), (0, 0)), constant_values=-1)


def _engine_column(sample: Sample, name: str, column: EngineColumn) -> NDArray[np.float32]:
    values, expected = sample.engine_columns.get(name), (sample.response_length, column.width)
    if values is None or values.shape != expected:
        raise ValueError(
            f"sample {sample.index}: the loss or a correction reads engine column {name!r}, float32 {list(expected)}; "
            f"the sample has {'none' if values is None else list(values.shape)}. Generate with a Trajectory, or copy "
            "Generation.columns to Sample.engine_columns"
        )
    return np.asarray(values, np.float32)


UNKNOWN = -1


def version_number(version: str) -> int:
    """Return the number of a published version, which counts training steps from 0; -1 if no run has published it."""
    return int(version) if version.isdecimal() else UNKNOWN


def _weight_version(sample: Sample) -> int:
    """Return the version that sampled the whole response; -1 if several did, or none is recorded as a number."""
    versions = set(sample.weight_versions)
    return version_number(versions.pop() if len(versions) == 1 else "")


def _log_probs(sample: Sample) -> NDArray[np.float32]:
    log_probs = sample.rollout_log_probs
    if log_probs is None or len(log_probs) != sample.response_length:
        count = "none" if log_probs is None else len(log_probs)
        raise ValueError(
            f"sample {sample.index}: {sample.response_length} response tokens need as many log-probs of the engine; "
            f"it has {count}"
        )
    return np.asarray(log_probs, np.float32)


class TrainInputs:
    """``Sample.multimodal_train_inputs`` of a rollout; false if no sample has any.

    Raises:
        ValueError: they are no arrays by name, or differ between samples in dtype or in shape after the first
            dimension.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        inputs = [_named(sample) for sample in samples]
        names = sorted({name for arrays in inputs for name in arrays})
        like = {name: next(arrays[name] for arrays in inputs if name in arrays)[:0] for name in names}
        self._parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for sample, arrays in zip(samples, inputs, strict=True):
            for name in names:
                array = arrays.get(name, like[name])
                if (array.dtype, array.shape[1:]) != (like[name].dtype, like[name].shape[1:]):
                    difference = f"{_shape(array)}, and another sample's is {_shape(like[name])}"
                    raise _refusal(sample, f"{name} is {difference}")
                self._parts[name].append(array)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def columns(self, members: Sequence[int]) -> dict[str, Opaque]:
        """Return the inputs of ``members``, by name; a name that none of them has gets a column without rows."""
        return {name: column([parts[i] for i in members]) for name, parts in self._parts.items()}


def _named(sample: Sample) -> dict[str, np.ndarray]:
    inputs: object = sample.multimodal_train_inputs
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
        raise _refusal(sample, f"{inputs!r:.60}")
    try:
        return {name: array_of(value) for name, value in inputs.items() if value is not None}
    except (ValueError, TypeError) as problem:
        raise _refusal(sample, str(problem)) from None


def _shape(array: np.ndarray) -> str:
    return f"{array.dtype} [n{''.join(f', {size}' for size in array.shape[1:])}]"


def _refusal(sample: Sample, problem: str) -> ValueError:
    return ValueError(
        f"sample {sample.index}: multimodal_train_inputs: {problem}; accepted: a table of names and arrays or tensors "
        "of numbers, [n, ...], equal in all samples except for n"
    )


Ints = NDArray[np.int64]


def mask_columns(
    samples: Sequence[Sample], masks: Sequence[NDArray[np.float32]], *, cuts: bool
) -> tuple[Ints | None, Ints | None]:
    """Return how many tokens each response token was sampled from, int64 [u], and their ids, int64 [s].

    Returns None for both if no sample has a truncated-sampling mask and none needs it.

    Arguments:
        masks: the loss mask of each sample, float32 [response length].
        cuts: top-p or top-k left tokens out, so every trained token needs its mask.

    Raises:
        ValueError: a trained token lacks its mask, or its mask leaves it out; or a mask has a wrong length.
    """
    if not cuts and all(sample.rollout_top_p_token_offsets is None for sample in samples):
        return None, None
    columns = [_sample_mask(sample, mask_T, cuts) for sample, mask_T in zip(samples, masks, strict=True)]
    counts, ids = zip(*columns, strict=True)
    return np.concatenate(counts), np.concatenate(ids)


def _sample_mask(sample: Sample, mask_T: NDArray[np.float32], cuts: bool) -> tuple[Ints, Ints]:
    ids_S, counts_T = _read_mask(sample)
    trained_T = mask_T != 0
    if cuts and bool((trained_T & (counts_T == 0)).any()):
        raise ValueError(
            f"sample {sample.index}: rollout_top_p and rollout_top_k leave tokens out, and place "
            f"{int(np.flatnonzero(trained_T & (counts_T == 0))[0])} of the response has no list of the tokens "
            "that it was sampled from, so its log-probability is unknown. A generate function must pass the kept of "
            "each answer of context.client to slime_core.generation.keep; or leave --rollout-top-p and "
            "--rollout-top-k out"
        )
    places_S = np.repeat(np.arange(len(counts_T)), counts_T)
    targets_T = np.asarray(sample.tokens, np.int64)[sample.prompt_length :]
    has_T = np.bincount(places_S[ids_S == targets_T[places_S]], minlength=len(counts_T)) > 0
    missing_T = trained_T & (counts_T > 0) & ~has_T
    if missing_T.any():
        place = int(np.flatnonzero(missing_T)[0])
        raise ValueError(
            f"sample {sample.index}: token {targets_T[place]} at place {place} of the response is not among the "
            f"{counts_T[place]} rollout_top_p_token_ids that it was sampled from; copy both lists of ids from the "
            "engine unchanged"
        )
    return counts_T, ids_S


def _read_mask(sample: Sample) -> tuple[Ints, Ints]:
    """Return the ids, and their number at each place of the response."""
    if sample.rollout_top_p_token_offsets is None:
        return np.zeros(0, np.int64), np.zeros(sample.response_length, np.int64)
    ids_S = np.asarray(sample.rollout_top_p_token_ids or (), np.int64)
    offsets = np.asarray(sample.rollout_top_p_token_offsets, np.int64)
    counts_T = np.diff(offsets)
    if len(counts_T) != sample.response_length or offsets[0] != 0 or offsets[-1] != len(ids_S) or (counts_T < 0).any():
        raise ValueError(
            f"sample {sample.index}: rollout_top_p_token_offsets needs {sample.response_length + 1} entries for "
            f"{sample.response_length} response tokens, rising from 0 to the {len(ids_S)} rollout_top_p_token_ids; "
            f"it is {offsets[:6].tolist()}{' ...' if len(offsets) > 6 else ''}"
        )
    return ids_S, counts_T
