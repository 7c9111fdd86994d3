"""The parity gate: learner and engines must give the same tokens the same log-probabilities.

Policy gradients compare the learner's log-probabilities with those of the engines that sampled the tokens. Where the
two compute another function (stale weights, another temperature, other positions), the run learns from noise or not at
all, and nothing else notices. Comparing costs no generation and no forward pass: the first optimizer step of a rollout
computes, before it changes anything, the log-probabilities under the weights that were published last.

    published      the engines hold this version, and so does the learner
    mark           in a rollout that is due: which response tokens that version alone sampled (they are *fresh*)
    compare        in the loss, once a micro-batch: sums over fresh tokens
    check          after the backward pass, before the optimizer: raises, or stores the metrics
    weights_changed  the learner trained; until the next publication no token is fresh

Left out: responses that an update interrupted, because the learner no longer holds the weights that sampled
their beginning; and masked tokens, because nothing trains on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime_core.config.learning import PARITY_BOUNDS, STRICT_PARITY_BOUNDS, WeightsConfig
from slime_core.errors import ParityError
from slime_core.learner.micro_batches import MicroBatch
from slime_core.types import TrainBatch

__all__ = ["BFLOAT16", "FLOAT32", "STRICT", "Bounds", "ParityGate", "compare"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that differences must stay below, in nats.

    Arguments:
        mean: of the absolute differences of all fresh tokens.
        largest: of any of them.
    """

    mean: float
    largest: float


FLOAT32 = Bounds(*PARITY_BOUNDS["float32"])
BFLOAT16 = Bounds(*PARITY_BOUNDS["bfloat16"])
STRICT = Bounds(*STRICT_PARITY_BOUNDS)

TOKENS, SUM, LARGEST = "parity_tokens", "parity_sum", "parity_largest"
"""Metrics of :func:`compare`, which :meth:`ParityGate.check` takes out of a step's metrics."""

CAUSES = (
    "The engines serve other weights than the learner holds. Repeat with --check-weight-update-equal.",
    "Learner and engines see other tokens or positions: a generate function that encodes text again, or a model spec "
    "whose rotary embedding is not that of config.json. Compare a short response, then a long one.",
    "Other scaling: the learner divided its logits by {temperature:g} (--rollout-temperature). A generate function "
    "that asks for another temperature, or for a penalty or a bias, must not. --rollout-top-p and --rollout-top-k are "
    "innocent: both sides take the tokens that they kept for all there are.",
    "Other dtypes: learner and engines must both compute in {dtype}.",
    "Other kernels, of attention above all: try another --sglang-attention-backend.",
    "A mixture of experts that chooses other experts where scores nearly tie.",
)


class ParityGate:
    """Decides which rollouts are compared, and ends the run where learner and engines differ.

    Arguments:
        weights: interval and bounds.
        bf16: whether learner and engines compute in bfloat16, which sets the bounds that were not given.
        strict: every trained token has to be fresh, within the bounds :data:`STRICT` unless tighter ones are given.
    """

    def __init__(self, weights: WeightsConfig, *, bf16: bool, strict: bool = False) -> None:
        default = STRICT if strict else BFLOAT16 if bf16 else FLOAT32
        self._strict = strict
        self._dtype = "bfloat16" if bf16 else "float32"
        self._interval = weights.parity_interval
        self._bounds = Bounds(
            mean=weights.parity_mean_tolerance or default.mean, largest=weights.parity_max_tolerance or default.largest
        )
        self._has_engines = False
        self._is_first = True
        self._version: int | None = None
        self._measured: dict[str, float] = {}

    def published(self, version: int) -> None:
        """The engines hold the learner's weights, as ``version``."""
        self._has_engines, self._version = True, version

    def weights_changed(self) -> None:
        """The learner's weights are no longer those that were published."""
        self._version = None

    def mark(self, shard: TrainBatch, micro_batches: Sequence[MicroBatch]) -> None:
        """Fill ``fresh_U`` of the first optimizer step's micro-batches if the rollout is due; else leave them alone.

        Due are every ``parity_interval``-th rollout and the first one with a step of the actor in this process, once
        engines were given weights.

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
        fresh_U = torch.from_numpy(np.repeat(self._fresh(shard), shard.response_lengths_B))
        for micro in micro_batches:
            micro.fresh_U = fresh_U.to(micro.places_U.device)[micro.places_U]

    def check(self, metrics: dict[str, float], *, rollout: int, temperature: float) -> None:
        """Take what :func:`compare` measured out of a step's ``metrics``; in every step of the actor.

        Raises:
            ParityError: a bound is reached.
        """
        self._is_first = False
        if TOKENS not in metrics:
            return
        tokens, total, largest = (metrics.pop(name) for name in (TOKENS, SUM, LARGEST))
        self._measured = {"parity/tokens": tokens}
        if not tokens:
            return
        mean = total / tokens
        self._measured |= {"parity/mean": mean, "parity/max": largest}
        if not (mean < self._bounds.mean and largest < self._bounds.largest):
            raise ParityError(self._explanation(rollout, temperature))

    def report(self) -> dict[str, float]:
        """The ``parity/...`` metrics of the last rollout, once; empty if it was not due."""
        measured, self._measured = self._measured, {}
        return measured

    def _fresh(self, shard: TrainBatch) -> np.ndarray:
        if self._version is None or shard.weight_version_B is None:
            return np.zeros(len(shard), bool)
        return np.asarray(shard.weight_version_B == self._version)

    def _refuse_stale(self, shard: TrainBatch) -> None:
        samples_U = np.repeat(np.arange(len(shard)), shard.response_lengths_B)
        trained_B = np.bincount(samples_U, weights=shard.loss_mask_U, minlength=len(shard)) > 0
        stale_B = trained_B & ~self._fresh(shard)
        if stale_B.any():
            held = "nothing" if self._version is None else f"weights {self._version}"
            raise ParityError(
                f"rollout {shard.rollout}: true_on_policy_mode trains only on what the weights drew that are trained; "
                f"the learner holds what was published as {held}, and {stale_B.sum()} of {trained_B.sum()} responses "
                "of this rank were drawn by others, by several, or by a generate function that records no "
                "weight_versions. Nothing of this rollout was trained on. Let each rollout be generated after the "
                "publication before it, or leave --true-on-policy-mode out."
            )

    def _explanation(self, rollout: int, temperature: float) -> str:
        found, bounds = self._measured, self._bounds
        causes = (cause.format(temperature=temperature, dtype=self._dtype) for cause in CAUSES)
        listed = "\n".join(f"  {number}. {cause}" for number, cause in enumerate(causes, start=1))
        return (
            f"rollout {rollout}: learner and engines give the same tokens other log-probabilities. Over "
            f"{found['parity/tokens']:.0f} response tokens of weights {self._version}, their difference is "
            f"{found['parity/mean']:.3g} on average and {found['parity/max']:.3g} at most; accepted in {self._dtype} "
            f"is below {bounds.mean:g} and below {bounds.largest:g}. Nothing of this rollout was trained on, saved or "
            f"published.\nLikely causes, the likeliest first:\n{listed}\n"
            "Repeat a few rollouts in float32 to tell a mistake from rounding. If the difference is known and wanted, "
            "raise --parity-mean-tolerance and --parity-max-tolerance, or switch the gate off with --parity-interval 0."
        )


def compare(difference_U: torch.Tensor, micro: MicroBatch) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Number and sum of the fresh, trained tokens' absolute differences, and the largest; empty unless marked.

    Arguments:
        difference_U: absolute differences of log-probabilities in nats, without gradient.

    Returns:
        What is to be added up over micro-batches and ranks, and what the maximum is to be taken of.
    """
    if micro.fresh_U is None:
        return {}, {}
    # The mask too: a function that the run names by path may leave out tokens that have a weight.
    counted_U = micro.fresh_U & (micro.mask_U != 0) & (micro.weights_U != 0)
    # Never selected by the mask: on a GPU that would wait for the device.
    found_U = difference_U.double().where(counted_U, 0.0)
    largest = found_U.max() if found_U.numel() else found_U.sum()
    return {TOKENS: counted_U.sum().double(), SUM: found_U.sum()}, {LARGEST: largest}
