"""Policy losses and off-policy corrections, and the packed response tokens that both work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = [
    "Correction",
    "CorrectionOutput",
    "CorrectionTerms",
    "LossOutput",
    "LossSettings",
    "LossTerms",
    "PolicyLoss",
    "Segments",
]


class Segments(Protocol):
    """Sums over the sequences of a packed micro-batch; a policy loss that needs them never indexes tokens itself."""

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """The sum over each of the b sequences, [b]; differentiable."""
        ...

    def spread(self, values_b: torch.Tensor) -> torch.Tensor:
        """Each sequence's value at each of its tokens, [T]; differentiable."""
        ...


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The settings that every policy loss shares.

    Arguments:
        eps_clip: how far below 1 the importance ratio may count.
        eps_clip_high: how far above 1; None: as far as below.
        eps_clip_c: largest ratio that counts for a negative advantage (dual clip), above 1; None: no such bound.
    """

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What a policy loss sees of one packed micro-batch: T response tokens.

    Arguments:
        log_probs_T: float32, of the actor that trains; carries the gradient.
        old_log_probs_T: float32, of the actor before the first optimizer step of the rollout, or with
            ``use_rollout_logprobs`` of the engine; no gradient.
        advantages_T: float32, no gradient.
        mask_T: float32, 1 where the token is trained.
        settings: see :class:`LossSettings`.
        segments: which tokens form a sequence; None where the caller has no use for sequences.
    """

    log_probs_T: torch.Tensor
    old_log_probs_T: torch.Tensor
    advantages_T: torch.Tensor
    mask_T: torch.Tensor
    settings: LossSettings = field(default_factory=LossSettings)
    segments: Segments | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Loss per token (with gradient, 0 where masked) and metrics per token (without); the core does the averaging."""

    loss_T: torch.Tensor
    metrics_T: dict[str, torch.Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """Turns log-probabilities and advantages into a loss per token."""

    def __call__(self, terms: LossTerms) -> LossOutput:
        """The loss of each token; never averages."""
        ...


@dataclass(frozen=True, slots=True)
class CorrectionTerms:
    """What an off-policy correction sees of one packed micro-batch: T response tokens, nothing with a gradient.

    Arguments:
        log_probs_T: float32, of the trainer: the actor before the first optimizer step of the rollout. With
            ``use_rollout_logprobs`` the engine's, for corrections that do not compare the two.
        rollout_log_probs_T: float32, of the engine that drew the tokens.
        mask_T: float32, 1 where the token is trained, as earlier corrections left it.
        segments: which tokens form a sequence; under context parallelism some of them are on other ranks, so a
            correction calls it as often on every rank. None where the caller has no use for sequences.
        current_log_probs_T: float32, of the actor that trains, as it is in this optimizer step.
        advantages_T: float32.
    """

    log_probs_T: torch.Tensor
    rollout_log_probs_T: torch.Tensor
    mask_T: torch.Tensor
    segments: Segments | None = None
    current_log_probs_T: torch.Tensor | None = None
    advantages_T: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CorrectionOutput:
    """What a correction makes of each token.

    Arguments:
        weights_T: float32, finite and at least 0 where the token is trained; multiplies its policy loss.
        mask_T: float32, 0 or 1; trains at most the tokens of ``CorrectionTerms.mask_T``. A token that it leaves out
            takes no part in any term of the loss.
        metrics_T: a number a token by name; averaged by the core over all tokens that the rollout trains.
    """

    weights_T: torch.Tensor
    mask_T: torch.Tensor
    metrics_T: dict[str, torch.Tensor] = field(default_factory=dict)


class Correction(Protocol):
    """Weighs and masks tokens by how far the trainer stands from the engine that drew them.

    A run names corrections in order; each sees the mask that those before it left, and the weights are multiplied. What
    the loss is divided by stays what it was before them: the tokens that the rollout trains.
    """

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Weight and mask of each token; changes nothing in place."""
        ...
