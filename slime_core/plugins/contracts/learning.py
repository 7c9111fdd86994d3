"""What a plugin may put into a learner's step besides components, and the packed micro-batches that it sees there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["LogitsLoss", "LossCorrection", "LossParts", "LossReducer", "MicroBatch"]


class MicroBatch(Protocol):
    """b samples packed into one row; a rank holds t tokens of it and predicts u response tokens.

    Response tokens lie sample after sample. ``slime_before_training`` may set the attributes that are no properties.

    Arguments:
        mask_U: float32 [u], 1 trains; may only leave tokens out, because ``weights_U`` holds divisors counted before.
        advantages_U: float32 [u].
        rollout_log_probs_U: float32 [u], of the engine that drew the tokens.
        old_log_probs_U: float32 [u], of the actor before the first optimizer step of the rollout; None: the current
            ones stand in, detached.
        ref_log_probs_U: float32 [u], of the reference; None: nothing reads them.
        returns_U: float32 [u], what the critic learns; None: there is no critic.
        fresh_U: bool [u], drawn by the weights that the learner holds, so that engine and learner are compared there;
            None: they are not.
        extra: one entry a sample by name; a :class:`LogitsLoss` may read them, the core does not.
    """

    mask_U: torch.Tensor
    advantages_U: torch.Tensor
    rollout_log_probs_U: torch.Tensor
    old_log_probs_U: torch.Tensor | None
    ref_log_probs_U: torch.Tensor | None
    returns_U: torch.Tensor | None
    fresh_U: torch.Tensor | None
    extra: dict[str, list[object]]

    @property
    def tokens_1T(self) -> torch.Tensor:
        """int64 [1, t], prompts and padding included."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, its prompt included."""
        ...

    @property
    def num_samples(self) -> int:
        """b."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """Which samples of the rank's shard the b samples are."""
        ...

    @property
    def samples_U(self) -> torch.Tensor:
        """int64 [u], which of the b samples a response token belongs to."""
        ...

    @property
    def weights_U(self) -> torch.Tensor:
        """float32 [u], the mask times the sample's loss weight: a sum with these is the part of the step's loss."""
        ...

    @property
    def scale(self) -> float:
        """What a sum of means over samples (a sum over tokens, with ``calculate_per_token_loss``) is multiplied by, so
        that micro-batches and ranks add up to the step's loss; 0 in a micro-batch that trains nothing."""
        ...

    @property
    def temperature(self) -> float:
        """At which the tokens were drawn."""
        ...

    @property
    def packed_sequence(self) -> object:
        """Megatron's ``PackedSeqParams`` of the row."""
        ...


class LogitsLoss(Protocol):
    """A loss that is computed from logits, in place of policy loss, corrections, divergence and entropy bonus."""

    def __call__(self, logits_1TV: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The micro-batch's part of the step's loss, a scalar with gradient, and of its metrics, without.

        Arguments:
            logits_1TV: float32 [1, t, v], not divided by the temperature; where ranks share tensors, v is this rank's
                part of the vocabulary.
        """
        ...


class LossCorrection(Protocol):
    """Changes the policy loss of each token, after the run's corrections; a :class:`Correction` may only weigh it."""

    def __call__(
        self, loss_U: torch.Tensor, log_probs_U: torch.Tensor, mask_U: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
        """Another policy loss, another mask (float32 [u], 0 or 1, within ``mask_U``), and metrics, one number a token.

        Arguments:
            loss_U: float32 [u], with gradient.
            log_probs_U: float32 [u], the trainer's before the first optimizer step of the rollout, without gradient.
            mask_U: float32 [u], what the run's corrections left.
        """
        ...


class LossReducer(Protocol):
    """Makes one number of the policy losses of a micro-batch, in place of their weighted sum."""

    def __call__(self, loss_U: torch.Tensor, mask_U: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """The policy loss's part of the step's loss, a scalar with gradient.

        Arguments:
            loss_U: float32 [u], after corrections, with gradient.
            mask_U: float32 [u], what corrections left.
        """
        ...


@dataclass(frozen=True, slots=True)
class LossParts:
    """What a plugin puts in place of parts of a rank's loss; None: the core's own.

    Example: ``LossParts(reduce=MeanOfSamples())`` sums the policy loss in another way and leaves the rest as it is.

    Arguments:
        of_logits: the whole loss, from logits.
        correct: what changes the policy loss of each token after the run's corrections.
        reduce: what sums the policy loss.
    """

    of_logits: LogitsLoss | None = None
    correct: LossCorrection | None = None
    reduce: LossReducer | None = None

    @property
    def given(self) -> frozenset[str]:
        """The names of the parts that are not the core's own."""
        return frozenset(field.name for field in fields(self) if getattr(self, field.name) is not None)
