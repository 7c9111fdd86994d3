"""The parity gate: learner and engines must give the same tokens the same log-probabilities.

Policy gradients compare the two. If they compute different functions (stale weights, another temperature, other
positions), the run learns from noise or not at all, and nothing else reports it. The comparison costs no generation and
no forward pass: the first optimizer step of a rollout computes the log-probabilities under the weights that were
published last, before it changes them.

    published        records the version that engines and learner hold
    mark             in a rollout that is due, marks the response tokens that only this version sampled (*fresh* tokens)
    compare          in the loss (``objective.py``), once per micro-batch: sums over fresh tokens
    check            after the backward pass, before the optimizer step: stores the metrics, or writes what was compared
                     to a file and raises an error that names the worst token
    weights_changed  the learner trained; until the next publication no token is fresh

The gate leaves out responses that an update interrupted, because the learner no longer holds the weights that sampled
their first tokens, and masked tokens, because they are not trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.config.learning import PARITY_BOUNDS, STRICT_PARITY_BOUNDS, WeightsConfig
from slime_core.errors import ComparedToken, ParityError, RunError
from slime_core.learner.micro_batches import PackedMicroBatch
from slime_core.learner.objective import BEYOND, LARGEST, SUM, TOKENS
from slime_core.types import TrainBatch


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that differences must stay below, in nats.

    Arguments:
        mean: bound of the mean absolute difference of all fresh tokens.
        largest: bound of the absolute difference of each fresh token.
        outliers: one token in every thousand, or part of a thousand, may exceed ``largest``: the 99.9th percentile is
            bounded. In bfloat16 the largest of a million differences says little; in a mixture, learner and engine take
            different experts for a token whose scores nearly tie.
    """

    mean: float
    largest: float
    outliers: bool = False

    def allowed(self, tokens: float) -> int:
        """Return the number of ``tokens`` that may reach ``largest``."""
        return math.ceil(tokens / TOKENS_PER_OUTLIER) if self.outliers else 0


TOKENS_PER_OUTLIER = 1000
FLOAT32 = Bounds(*PARITY_BOUNDS["float32"])
BFLOAT16 = Bounds(*PARITY_BOUNDS["bfloat16"], outliers=True)
MIXTURE = Bounds(*PARITY_BOUNDS["mixture"], outliers=True)
STRICT = Bounds(*STRICT_PARITY_BOUNDS)

OTHER_CLIENT = (
    "Another client changed the engine's weights, which is possible where engines are external or SLIME_ENGINE_KEY is "
    "empty. Start external engines with an --api-key that only this run knows, and export it as SLIME_ENGINE_KEY."
)
"""A possible cause only if other clients can reach the engines."""

CAUSES = (
    "The engines serve other weights than the learner holds. Repeat with --check-weight-update-equal.",
    "Learner and engines see other tokens or positions: a generate function that encodes text again, or a model spec "
    "whose rotary embedding is not that of config.json. Compare a short response, then a long one.",
    "Other scaling: the learner divided its logits by {temperature:g} (--rollout-temperature). A generate function "
    "must not set another temperature, a penalty or a bias. --rollout-top-p and --rollout-top-k are "
    "innocent: both sides take the tokens that they kept for all there are.",
    "Other dtypes: learner and engines must both compute in {dtype}.",
    "Other kernels, of attention above all: try another --sglang-attention-backend.",
    "A mixture of experts that chooses other experts where scores nearly tie.",
)


class ParityGate:
    """Decides which rollouts are compared, and ends the run if learner and engines differ.

    Arguments:
        weights: settings of the interval and the bounds.
        bf16: whether learner and engines compute in bfloat16; selects the default bounds.
        mixture: whether the model is a mixture of experts; selects the default bounds.
        strict: every trained token has to be fresh, within the bounds :data:`STRICT` unless others are given.
        is_alone: whether only this run can call the engines.
        write: writes a shard and its compared micro-batches to a file, and returns its path; None to write nothing.
    """

    def __init__(
        self,
        weights: WeightsConfig,
        *,
        bf16: bool,
        mixture: bool = False,
        strict: bool = False,
        is_alone: bool = True,
        write: Callable[[TrainBatch, Sequence[PackedMicroBatch]], Path] | None = None,
    ) -> None:
        default = STRICT if strict else BFLOAT16 if bf16 else MIXTURE if mixture else FLOAT32
        self._strict = strict
        self._causes = CAUSES if is_alone else (OTHER_CLIENT, *CAUSES)
        self._dtype = "bfloat16" if bf16 else "float32"
        self._interval = weights.parity_interval
        self._bounds = Bounds(
            mean=weights.parity_mean_tolerance or default.mean,
            largest=weights.parity_max_tolerance or default.largest,
            outliers=default.outliers,
        )
        self._has_engines = False
        self._is_first = True
        self._version: int | None = None
        self._measured: dict[str, float] = {}
        self._write = write
        self._marked: tuple[TrainBatch, Sequence[PackedMicroBatch]] | None = None

    def published(self, version: int) -> None:
        """Record that the engines hold the learner's weights, as ``version``."""
        self._has_engines, self._version = True, version

    def weights_changed(self) -> None:
        """Record that the learner's weights are no longer the published ones."""
        self._version = None

    def mark(self, shard: TrainBatch, micro_batches: Sequence[PackedMicroBatch]) -> None:
        """Fill ``fresh_U`` of the first optimizer step's micro-batches if the rollout is due.

        After the first publication, every ``parity_interval``-th rollout is due, and the first rollout in this process
        in which the actor trains.

        Raises:
            ParityError: the mode is strict, and a response with a trained token was not sampled by the published
                weights alone.
        """
        if self._strict:
            self._refuse_stale(shard)
        if not (self._has_engines and self._interval):
            return
        if not (self._is_first or shard.rollout % self._interval == 0):
            return
        fresh_U = torch.from_numpy(np.repeat(self._is_fresh(shard), shard.response_lengths_B))
        for micro in micro_batches:
            micro.fresh_U = fresh_U.to(micro.places_U.device)[micro.places_U]
            micro.parity_bound = self._bounds.largest
            micro.learner_log_probs_U = torch.full_like(micro.rollout_log_probs_U, math.nan)
        self._marked = shard, micro_batches

    def check(self, metrics: dict[str, float], *, rollout: int, temperature: float) -> None:
        """Remove the sums of :func:`compare` from a step's ``metrics``, and check them; in every step of the actor.

        Collective over all ranks if a bound is reached; they all raise the same error.

        Raises:
            ParityError: a bound is reached.
        """
        self._is_first = False
        marked, self._marked = self._marked, None
        if TOKENS not in metrics:
            return
        tokens, total, beyond, largest = (metrics.pop(name) for name in (TOKENS, SUM, BEYOND, LARGEST))
        self._measured = {"parity/tokens": tokens}
        if not tokens:
            return
        mean = total / tokens
        self._measured |= {"parity/mean": mean, "parity/max": largest, "parity/beyond": beyond}
        if not (mean < self._bounds.mean and beyond <= self._bounds.allowed(tokens)):
            worst, file = _over_ranks(*self._written(marked))
            raise ParityError(self._explanation(rollout, temperature, _place(worst, file)), file, worst)

    def report(self) -> dict[str, float]:
        """Return the ``parity/...`` metrics of the last rollout, once; empty if it was not due."""
        measured, self._measured = self._measured, {}
        return measured

    def _written(
        self, marked: tuple[TrainBatch, Sequence[PackedMicroBatch]] | None
    ) -> tuple[ComparedToken | None, Path | None]:
        """Write what this rank compared; return its worst token and the file, if there are any."""
        worst = None if marked is None else worst_token(*marked)
        if marked is None or worst is None or self._write is None:
            return worst, None
        try:
            return worst, self._write(*marked)
        except (OSError, RunError):  # a full disk must not hide the error, or let the other ranks wait
            return worst, None

    def _is_fresh(self, shard: TrainBatch) -> np.ndarray:
        if self._version is None or shard.weight_version_B is None:
            return np.zeros(len(shard), bool)
        return np.asarray(shard.weight_version_B == self._version)

    def _refuse_stale(self, shard: TrainBatch) -> None:
        samples_U = np.repeat(np.arange(len(shard)), shard.response_lengths_B)
        trained_B = np.bincount(samples_U, weights=shard.loss_mask_U, minlength=len(shard)) > 0
        stale_B = trained_B & ~self._is_fresh(shard)
        if stale_B.any():
            held = "nothing" if self._version is None else f"weights {self._version}"
            raise ParityError(
                f"rollout {shard.rollout}: true_on_policy_mode trains only on samples of the weights that are trained; "
                f"the learner holds what was published as {held}, and {stale_B.sum()} of {trained_B.sum()} responses "
                "of this rank were sampled by other weights, by several, or by a generate function that records no "
                "weight_versions. Nothing of this rollout was trained on. Let each rollout be generated after the "
                "publication before it, or leave --true-on-policy-mode out."
            )

    def _explanation(self, rollout: int, temperature: float, place: str) -> str:
        measured, bounds = self._measured, self._bounds
        causes = (cause.format(temperature=temperature, dtype=self._dtype) for cause in self._causes)
        listed = "\n".join(f"  {number}. {cause}" for number, cause in enumerate(causes, start=1))
        return (
            f"rollout {rollout}: learner and engines give the same tokens other log-probabilities. Over "
            f"{measured['parity/tokens']:.0f} response tokens of weights {self._version}, their difference is "
            f"{measured['parity/mean']:.3g} on average and {measured['parity/max']:.3g} at most; accepted in "
            f"{self._dtype} is below {bounds.mean:g} and below {bounds.largest:g}{self._outliers()}. Nothing of this "
            f"rollout was trained on, saved or published.{place}\nLikely causes, the likeliest first:\n{listed}\n"
            "Repeat a few rollouts in float32 to tell a mistake from rounding. If you accept the difference, "
            "raise --parity-mean-tolerance and --parity-max-tolerance, or switch the gate off with --parity-interval 0."
        )

    def _outliers(self) -> str:
        if not self._bounds.outliers:
            return ""
        allowed = self._bounds.allowed(self._measured["parity/tokens"])
        return f" for all but {allowed} tokens, and {self._measured['parity/beyond']:.0f} reach that"


def worst_token(shard: TrainBatch, micro_batches: Sequence[PackedMicroBatch]) -> ComparedToken | None:
    """Return the compared token of this rank whose log-probabilities differ most, if it compared any."""
    tokens = [token for micro in micro_batches if (token := _worst_of(shard, micro)) is not None]
    return max(tokens, key=lambda token: token.difference, default=None)


def _worst_of(shard: TrainBatch, micro: PackedMicroBatch) -> ComparedToken | None:
    if micro.fresh_U is None or micro.learner_log_probs_U is None:
        return None
    counted_U = micro.fresh_U & (micro.mask_U != 0) & (micro.weights_U != 0) & micro.learner_log_probs_U.isfinite()
    if not counted_U.any():
        return None
    difference_U = (micro.learner_log_probs_U - micro.rollout_log_probs_U).abs()
    at = int(difference_U.where(counted_U, -1.0).argmax())
    place = int(micro.places_U[at])
    ends_B = np.cumsum(shard.response_lengths_B)
    number = int(np.searchsorted(ends_B, place, side="right"))
    length = int(shard.response_lengths_B[number])
    position = place - int(ends_B[number]) + length
    return ComparedToken(
        sample=int(shard.indices_B[number]),
        group=None if shard.groups_B is None else int(shard.groups_B[number]),
        position=position,
        response_length=length,
        token=int(shard.tokens_T[int(shard.lengths_B[: number + 1].sum()) - length + position]),
        learner_log_prob=float(micro.learner_log_probs_U[at]),
        engine_log_prob=float(micro.rollout_log_probs_U[at]),
    )


def _over_ranks(worst: ComparedToken | None, file: Path | None) -> tuple[ComparedToken | None, Path | None]:
    """Return the worst token of all ranks with the file of its rank. Collective."""
    ranks: list[Any] = [(worst, file)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (worst, file))
    worst_rank: tuple[ComparedToken | None, Path | None] = max(
        ranks, key=lambda rank: -1.0 if rank[0] is None else rank[0].difference
    )
    return worst_rank


def _place(worst: ComparedToken | None, file: Path | None) -> str:
    if worst is None:
        return ""
    group = "" if worst.group is None else f" of group {worst.group}"
    text = (
        f" They differ most at sample {worst.sample}{group}, response token {worst.position} of "
        f"{worst.response_length} (from 0), id {worst.token}: learner {worst.learner_log_prob:.6g}, engine "
        f"{worst.engine_log_prob:.6g}."
    )
    return text if file is None else f"{text} {file} has every compared token with both."
