"""Advantage estimators, and what they see: rewards of whole groups, or the tokens of a learner rank's responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from slime_core.types import GroupedRewards

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = [
    "AdvantageEstimator",
    "AdvantageSettings",
    "GroupedRewards",
    "Reductions",
    "ResponseTokens",
    "TokenAdvantageEstimator",
    "TokenAdvantages",
]


class AdvantageEstimator(Protocol):
    """Turns the rewards of a whole rollout into one advantage a sample (scope ``sample``)."""

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Advantages, float32 [B], in the order of ``batch``; permuting the samples permutes them alike."""
        ...


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """The settings that every estimator of scope ``token`` shares.

    Arguments:
        gamma: discount of a later token's reward, 0 to 1.
        lambd: decay of generalised advantage estimation, 0 to 1.
        kl_coef: weight of the divergence from the reference that is taken off the rewards; 0: none.
    """

    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """The responses of one data-parallel shard: b samples, u response tokens, every response whole and in order.

    All optimizer steps of a rollout are in it. Log-probabilities and values that the estimator's traits do not read are
    None, and so is what they read for the divergence only where ``settings.kl_coef`` is 0.

    Example, two samples of 2 and 1 response tokens, nothing of which needs a model::

        ResponseTokens(lengths_B=torch.tensor([2, 1]), samples_U=torch.tensor([0, 0, 1]),
                       mask_U=torch.ones(3), rewards_B=torch.tensor([1.0, 0.0]))

    Arguments:
        lengths_B: int64 [b], response tokens of each sample, perhaps 0; they add up to u.
        samples_U: int64 [u], which of the b samples a token belongs to; ascending.
        mask_U: float32 [u], 1 where the token is trained.
        rewards_B: float32 [b].
        log_probs_U: float32 [u], of the actor before the first optimizer step of the rollout, or with
            ``use_rollout_logprobs`` of the engine.
        ref_log_probs_U: float32 [u], of the reference.
        rollout_log_probs_U: float32 [u], of the engine.
        values_U: float32 [u], of the critic.
        settings: see :class:`AdvantageSettings`.
        tokens_T: int64 [t], prompts and responses, one sample after the other; for estimators that read ``tokens``.
        total_lengths_B: int64 [b], how many of them are each sample's.
    """

    lengths_B: torch.Tensor
    samples_U: torch.Tensor
    mask_U: torch.Tensor
    rewards_B: torch.Tensor
    log_probs_U: torch.Tensor | None = None
    ref_log_probs_U: torch.Tensor | None = None
    rollout_log_probs_U: torch.Tensor | None = None
    values_U: torch.Tensor | None = None
    settings: AdvantageSettings = AdvantageSettings()
    tokens_T: torch.Tensor | None = None
    total_lengths_B: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """What an estimator of scope ``token`` makes of u response tokens.

    Arguments:
        advantages_U: float [u], finite where the token is trained; the core trains them as float32.
        returns_U: float [u], what a critic is to learn; None: no critic reads it.
        metrics_U: a number a token by name, each [u]; averaged by the core as it averages the loss.
    """

    advantages_U: torch.Tensor
    returns_U: torch.Tensor | None = None
    metrics_U: dict[str, torch.Tensor] = field(default_factory=dict)


class Reductions(Protocol):
    """Sums over all data-parallel ranks; every rank must call the same reductions in the same order.

    Ranks that share one copy of the model see the same shard; it counts once.
    """

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over shards, a new tensor of the same shape and dtype; without gradient."""
        ...


class TokenAdvantageEstimator(Protocol):
    """Turns what is known of each response token into one advantage a token (scope ``token``).

    Runs once a rollout on every learner rank that computes a loss, over the shard of that rank. How samples are split
    over ranks must not change the result: whatever is taken over the batch goes through ``reduce``.
    """

    def estimate(self, batch: ResponseTokens, reduce: Reductions) -> TokenAdvantages:
        """Advantages of every response token, in the order of ``batch``, which is left as it is.

        Masked tokens may get anything: the core puts 0 there.
        """
        ...
