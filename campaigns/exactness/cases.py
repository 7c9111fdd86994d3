"""What is trained: model, loss, corrections, estimator and optimizer of each case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from campaigns.exactness.rollout import NUM_STEPS, TEMPERATURE, Rollout
from slime_core.config.learning import AlgorithmConfig, OptimizerConfig
from slime_core.config.schema import ClusterConfig, ModelConfig, RunConfig
from slime_core.contracts import (
    CorrectionOutput,
    CorrectionTerms,
    LossOutput,
    LossTerms,
    Reductions,
    ResponseTokens,
    TokenAdvantages,
)
from slime_core.ops.losses import clipped_surrogate
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import TrainBatch
from slime_offpolicy.options import OffPolicyOptions

__all__ = [
    "CASES",
    "CLIP",
    "Case",
    "Counting",
    "plugin_options",
    "run_config",
    "sequence_correction",
    "sequence_loss",
    "shards",
]

SGD_RATE, CLIP = 0.5, 0.5
LARGE = 1e4
SGD = {"lr": SGD_RATE * LARGE, "adam_eps": LARGE, "adam_beta1": 0.0, "weight_decay": 0.0, "clip_grad": CLIP}
"""Adam without a mean, and with an epsilon far above every gradient, is SGD: it moves by ``lr g / (|g| + epsilon)``.

Megatron's distributed optimizer knows no other optimizer than Adam, and this way clipping, sharding and gathering are
those of a run. Weights move by some thousandths, of which float32 keeps four digits.
"""
FAST = {**SGD, "lr": 16 * SGD_RATE * LARGE}
"""For gradients of some hundredths: the steps are as large as those of the others."""
ADAM = {"lr": 1e-4, "weight_decay": 0.1, "adam_beta2": 0.95, "adam_eps": 1e-5, "clip_grad": CLIP}
MAX_TOKENS = 100
TOKEN_DIVISOR = 7.0
"""Below the trained tokens of most rollouts: the factor of a step is far from 1, and another one in the other step."""
SMALLEST_WEIGHT = 0.05
USUAL = {"use_kl_loss": True, "kl_loss_coef": 0.05, "kl_loss_type": "k3", "entropy_coef": 0.02, "eps_clip": 0.1}
ESTIMATED = {
    "advantage_estimator": "reinforce_plus_plus",
    "gamma": 0.9,
    "kl_coef": 3.0,
    "corrections": ("tis",),
}
"""The policy loss alone, so that nothing else makes the gradients. Some ratios lie between the bounds, some beyond."""

BOUNDS = {"tis_clip": 0.2, "tis_clip_low": 0.05}
DISCOUNTED = {"gamma": 0.95, "lambd": 0.9, "corrections": ("tis",)}
CORRECTED = {
    **USUAL,
    "corrections": ("mis", "opsm", "veto"),
    "normalize_advantages": True,
    "use_unbiased_kl": True,
}
GEOMETRIC = {"mis_level": "geometric", "mis_mode": "clip", "mis_clip": 0.3, "mis_clip_low": 0.05}


@dataclass(frozen=True)
class Case:
    """One training of the rollout.

    Arguments:
        model: see :mod:`campaigns.exactness.models`.
        policy_loss: name of the component.
        plugins: what it and the estimator come from.
        algorithm: settings that differ from the defaults.
        optimizer: the same.
        offpolicy: options of plugin ``offpolicy`` that differ from the defaults.
        per_token: the loss is the mean over tokens instead of over rollouts.
        user_loss: the policy loss is :func:`sequence_loss`, as a user might write one.
        has_plain: whether :mod:`campaigns.exactness.plain` computes it as well.
    """

    name: str
    model: str = "fresh"
    policy_loss: str = "clipped"
    plugins: tuple[str, ...] = ()
    algorithm: Mapping[str, Any] = field(default_factory=lambda: dict(USUAL))
    optimizer: Mapping[str, Any] = field(default_factory=lambda: dict(SGD))
    offpolicy: Mapping[str, Any] = field(default_factory=dict)
    per_token: bool = False
    user_loss: bool = False
    has_plain: bool = True

    @property
    def estimated(self) -> bool:
        """Whether advantages are estimated on the ranks, token by token; a user's correction and metrics take part."""
        return "advantage_estimator" in self.algorithm

    @property
    def rate(self) -> float | None:
        """By which a step follows the gradient, clipped; None: it is one of Adam."""
        return self.optimizer["lr"] / LARGE if self.optimizer["adam_eps"] == LARGE else None


_ALL = (
    Case("clipped", algorithm={**USUAL, "eps_clip_high": 0.15, "eps_clip_c": 1.2}),
    Case("gspo", policy_loss="gspo", plugins=("grpo",), algorithm={**USUAL, "kl_loss_type": "k2", "eps_clip": 0.03}),
    Case(
        "divisor",
        policy_loss="gspo",
        plugins=("grpo",),
        algorithm={**USUAL, "eps_clip": 0.03, "loss_token_divisor": TOKEN_DIVISOR},
        user_loss=True,
    ),
    Case("cispo", policy_loss="cispo", plugins=("grpo",), algorithm={**USUAL, "kl_loss_type": "k1"}, per_token=True),
    Case("sft", policy_loss="sft", algorithm={}, per_token=True),
    Case("tokens", plugins=("ppo", "offpolicy"), algorithm=ESTIMATED, optimizer=FAST, offpolicy=BOUNDS),
    Case("adam", optimizer=ADAM),
    Case("corrected", plugins=("offpolicy",), algorithm=CORRECTED, offpolicy=GEOMETRIC, has_plain=False),
    Case(
        "ppo",
        plugins=("ppo", "offpolicy"),
        algorithm={"advantage_estimator": "ppo", **DISCOUNTED},
        offpolicy=BOUNDS,
        has_plain=False,
    ),
    Case("tied", model="tied", algorithm={**USUAL, "kl_loss_type": "low_var_kl"}),
    Case("experts", model="experts"),
    Case("experts, gspo", model="experts", policy_loss="gspo", plugins=("grpo",), algorithm={"eps_clip": 0.03}),
    Case(
        "experts, tokens",
        model="experts",
        plugins=("ppo", "offpolicy"),
        algorithm=ESTIMATED,
        optimizer=FAST,
        offpolicy=BOUNDS,
    ),
    Case("trained", model="trained"),
)
CASES = {case.name: case for case in _ALL}


def run_config(case: Case, folder: Path) -> RunConfig:
    """The settings of a run; ``folder`` holds the case's models."""
    return RunConfig(
        cluster=ClusterConfig(device="cpu"),
        algorithm=AlgorithmConfig(**case.algorithm),
        model=ModelConfig(ref_load=folder / "reference"),
        optimizer=OptimizerConfig(**case.optimizer),
    )


def plugin_options(case: Case) -> dict[str, Any]:
    """Plugin -> its options object, where the case gives options."""
    return {"offpolicy": OffPolicyOptions(**case.offpolicy)} if case.offpolicy else {}


def shards(case: Case, rollout: Rollout, num_ranks: int) -> list[TrainBatch]:
    """Where the learner estimates advantages, what is the advantage elsewhere is the reward."""
    return make_shards(
        rollout.samples,
        None if case.estimated else rollout.advantages_B,
        BatchPlan(
            num_ranks=num_ranks,
            num_steps=NUM_STEPS,
            max_tokens=MAX_TOKENS,
            per_token=case.per_token,
            token_divisor=case.algorithm.get("loss_token_divisor"),
        ),
        rewards_B=rollout.advantages_B,
        rollout=0,
        temperature=TEMPERATURE,
    )


# --- What a user might add --------------------------------------------------------------------------------------------


def sequence_correction(terms: CorrectionTerms) -> CorrectionOutput:
    """Weighs a sequence by the geometric mean of its ratios, and leaves out those where it is smallest."""
    assert terms.segments is not None
    counts_b = terms.segments.sums(terms.mask_T).clamp(min=1)
    logs_b = terms.segments.sums(terms.mask_T * (terms.log_probs_T - terms.rollout_log_probs_T)) / counts_b
    ratio_T = terms.segments.spread(logs_b.exp())
    mask_T = terms.mask_T.where(ratio_T >= SMALLEST_WEIGHT, 0.0)
    return CorrectionOutput(ratio_T, mask_T, {"sequence_weight": ratio_T, "left": mask_T})


def sequence_loss(terms: LossTerms) -> LossOutput:
    """GSPO (2507.18071, equation 5) with one ratio a sequence, whose gradient reaches all of its tokens."""
    assert terms.segments is not None
    counts_b = terms.segments.sums(terms.mask_T).clamp(min=1)
    means_b = terms.segments.sums(terms.mask_T * (terms.log_probs_T - terms.old_log_probs_T)) / counts_b
    log_ratio_T = terms.segments.spread(means_b)
    surrogate = clipped_surrogate(
        log_ratio_T,
        advantages_T=terms.advantages_T,
        eps_clip=terms.settings.eps_clip,
        eps_clip_high=terms.settings.eps_clip_high,
    )
    return LossOutput(surrogate.loss_T, surrogate.metrics(log_ratio_T))


class Counting:
    """An estimator that also reports how many tokens the batch trains, and whose advantages are 1 on average.

    Whitening divides one sum by another, so a shard that is counted twice alike would not show; and its loss is a
    difference of nearly equal sums, of which rounding would take a large share.
    """

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def estimate(self, batch: ResponseTokens, reduce: Reductions) -> TokenAdvantages:
        found: TokenAdvantages = self._estimator.estimate(batch, reduce)
        count_U = reduce.sum(batch.mask_U.sum()).expand_as(batch.mask_U)
        metrics_U = {**found.metrics_U, "batch_tokens": count_U}
        trained_U = torch.ones_like(found.advantages_U)
        return replace(found, advantages_U=found.advantages_U + trained_U, metrics_U=metrics_U)
