"""Advantage estimators, policy losses, corrections, model specs, and replacements of parts of a learner's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from slime_core.types import GroupedRewards, JsonValue

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from slime_core.modeling.layout import ParallelLayout

__all__ = [
    "AdvantageEstimator",
    "AdvantageSettings",
    "Correction",
    "CorrectionOutput",
    "CorrectionTerms",
    "GroupedRewards",
    "LogitsLoss",
    "LossCorrection",
    "LossOutput",
    "LossParts",
    "LossReducer",
    "LossSettings",
    "LossTerms",
    "MicroBatch",
    "ModelSpec",
    "PolicyLoss",
    "Reductions",
    "ResponseTokens",
    "Segments",
    "TokenAdvantageEstimator",
    "TokenAdvantages",
    "WrappedModel",
]

NamedTensors: TypeAlias = Iterator[tuple[str, "torch.Tensor"]]
"""Pairs of a name and a tensor."""

WriteTensors: TypeAlias = Callable[[Path, Sequence[tuple[str, "torch.Tensor"]]], None]
"""Creates a folder and writes named tensors into it."""


class AdvantageEstimator(Protocol):
    """Turns the rewards of a whole rollout into one advantage a sample (scope ``sample``)."""

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Return the advantages, float32 [B], in the order of ``batch``. Permuted samples give permuted advantages."""
        ...


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """The settings that every estimator of scope ``token`` shares.

    Arguments:
        gamma: discount for the reward of a later token, 0 to 1.
        lambd: decay of generalised advantage estimation, 0 to 1.
        kl_coef: weight of the divergence from the reference, which is subtracted from the rewards. 0 disables it.
    """

    gamma: float = 1.0
    lambd: float = 1.0
    kl_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class ResponseTokens:
    """The responses of one data-parallel shard: b samples, u response tokens, every response whole and in order.

    It has the samples of all optimizer steps of a rollout. Log-probabilities and values are None unless the estimator
    ``reads`` them. Those that only the divergence uses are None if ``settings.kl_coef`` is 0.

    Example with two samples of 2 and 1 response tokens, and no column that needs a model::

        ResponseTokens(lengths_B=torch.tensor([2, 1]), samples_U=torch.tensor([0, 0, 1]),
                       mask_U=torch.ones(3), rewards_B=torch.tensor([1.0, 0.0]))

    Arguments:
        lengths_B: int64 [b], number of response tokens of each sample, 0 or more. The sum is u.
        samples_U: int64 [u], index of the token's sample, ascending from 0 to b - 1.
        mask_U: float32 [u], 1 for trained tokens, 0 for others.
        rewards_B: float32 [b].
        log_probs_U: float32 [u], of the actor before the first optimizer step of the rollout. With
            ``use_rollout_logprobs``, of the engine.
        ref_log_probs_U: float32 [u], of the reference.
        rollout_log_probs_U: float32 [u], of the engine.
        values_U: float32 [u], of the critic.
        settings: see :class:`AdvantageSettings`.
        tokens_T: int64 [t], prompts and responses, sample after sample, for estimators that read ``tokens``.
        total_lengths_B: int64 [b], number of prompt and response tokens of each sample.
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
    """The result of an estimator of scope ``token`` for u response tokens.

    Arguments:
        advantages_U: float [u], finite for trained tokens. The core converts them to float32.
        returns_U: float [u], the target of the critic. None if no critic reads it.
        metrics_U: name -> one number for each token, [u]. The core averages them like the loss.
    """

    advantages_U: torch.Tensor
    returns_U: torch.Tensor | None = None
    metrics_U: dict[str, torch.Tensor] = field(default_factory=dict)


class Reductions(Protocol):
    """Sums over all data-parallel ranks. Every rank must call the same reductions in the same order.

    Ranks that share one copy of the model have the same shard, which counts once.
    """

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum over shards: a new tensor of the same shape and dtype, without gradient."""
        ...


class TokenAdvantageEstimator(Protocol):
    """Computes one advantage for each response token (scope ``token``).

    It is called once for each rollout on every learner rank that computes a loss, with the shard of that rank. The
    split of samples over ranks must not change the result: compute sums over the batch with ``reduce``.
    """

    def estimate(self, batch: ResponseTokens, reduce: Reductions) -> TokenAdvantages:
        """Return the advantage of every response token, in the order of ``batch``. Do not change ``batch``.

        Masked tokens may have any value: the core sets them to 0.
        """
        ...


class MicroBatch(Protocol):
    """b samples packed into one row. A rank has t tokens of the row and predicts u response tokens.

    Response tokens are in order, sample after sample. ``slime_before_training`` may set the attributes that are not
    properties.

    Arguments:
        mask_U: float32 [u], 1 for trained tokens. A new mask may only exclude tokens, because the divisors in
            ``weights_U`` are already computed.
        advantages_U: float32 [u].
        rollout_log_probs_U: float32 [u], of the engine that sampled the tokens.
        old_log_probs_U: float32 [u], of the actor before the first optimizer step of the rollout. If None, the detached
            current log-probabilities are used.
        ref_log_probs_U: float32 [u], of the reference. None if nothing reads them.
        returns_U: float32 [u], the target of the critic. None without a critic.
        fresh_U: bool [u], whether the weights that the learner has now sampled the token. Engine and learner are
            compared at these tokens. None if they are not compared.
        extra: name -> one entry for each sample, for a :class:`LogitsLoss`. The core does not read them.
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
        """Token ids of the row, prompts and padding included, int64 [1, t]."""
        ...

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sample, including its prompt."""
        ...

    @property
    def num_samples(self) -> int:
        """Number of samples, b."""
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the b samples in the rank's shard."""
        ...

    @property
    def samples_U(self) -> torch.Tensor:
        """Index of each response token's sample, int64 [u], from 0 to b - 1."""
        ...

    @property
    def weights_U(self) -> torch.Tensor:
        """The mask times the sample's loss weight, float32 [u]. A sum with these weights is part of the step's loss."""
        ...

    @property
    def scale(self) -> float:
        """Factor of a sum of means over samples (with ``calculate_per_token_loss``, of a sum over tokens), with which
        micro-batches and ranks add up to the step's loss. 0 if the micro-batch trains no token."""
        ...

    @property
    def temperature(self) -> float:
        """Sampling temperature of the tokens."""
        ...

    @property
    def packed_sequence(self) -> object:
        """Megatron's ``PackedSeqParams`` of the row."""
        ...


class LogitsLoss(Protocol):
    """A loss that is computed from logits. It replaces policy loss, corrections, divergence and entropy bonus."""

    def __call__(self, logits_1TV: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the micro-batch's part of the step's loss, a scalar with gradient, and of its metrics, without
        gradient.

        Arguments:
            logits_1TV: float32 [1, t, v], not divided by the temperature. With tensor parallelism, v is this rank's
                part of the vocabulary.
        """
        ...


class LossCorrection(Protocol):
    """Changes the policy loss of each token, after the run's corrections. (A :class:`Correction` only weights it.)"""

    def __call__(
        self, loss_U: torch.Tensor, log_probs_U: torch.Tensor, mask_U: torch.Tensor, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the new policy loss, the new mask (float32 [u], 0 or 1, at most ``mask_U``), and metrics with one
        number for each token.

        Arguments:
            loss_U: float32 [u], with gradient.
            log_probs_U: float32 [u], of the actor before the first optimizer step of the rollout, without gradient.
            mask_U: float32 [u], the mask after the run's corrections.
        """
        ...


class LossReducer(Protocol):
    """Reduces the policy losses of a micro-batch to one number. It replaces the weighted sum."""

    def __call__(self, loss_U: torch.Tensor, mask_U: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """Return the part of the policy loss in the step's loss, a scalar with gradient.

        Arguments:
            loss_U: float32 [u], after corrections, with gradient.
            mask_U: float32 [u], the mask after corrections.
        """
        ...


@dataclass(frozen=True, slots=True)
class LossParts:
    """Replacements for parts of a rank's loss. The core computes the parts that are None.

    Example: ``LossParts(reduce=MeanOfSamples())`` replaces the sum of the policy loss.

    Arguments:
        of_logits: computes the complete loss from logits.
        correct: changes the policy loss of each token after the run's corrections.
        reduce: sums the policy loss.
    """

    of_logits: LogitsLoss | None = None
    correct: LossCorrection | None = None
    reduce: LossReducer | None = None

    @property
    def given(self) -> frozenset[str]:
        """The names of the parts that are set."""
        return frozenset(field.name for field in fields(self) if getattr(self, field.name) is not None)


@dataclass(frozen=True, slots=True)
class WrappedModel:
    """Replacements by a plugin that wraps the actor's model. Fields that are None replace nothing.

    Functions that return tensors are collective: all ranks iterate to the end.

    Arguments:
        published: returns the weights for engines: all weights of the model, with Hugging Face names.
        saved: returns the tensors for the folder ``hf`` of a checkpoint. If None, those of ``published`` are saved.
        write: creates the folder ``hf`` and writes these tensors, on rank 0, in a background thread.
        original: context in which the model computes as before the plugin wrapped it; the reference then needs no copy
            of the start weights.
        stores: returns whether a checkpoint holds the parameter or buffer with this name in a chunk. Others must not
            change during the run. None: it holds all of them.
    """

    published: Callable[[], NamedTensors] | None = None
    saved: Callable[[], NamedTensors] | None = None
    write: WriteTensors | None = None
    original: Callable[[], AbstractContextManager[None]] | None = None
    stores: Callable[[str], bool] | None = None

    @property
    def replaced(self) -> frozenset[str]:
        """The names of the fields that are set."""
        return frozenset(field.name for field in fields(self) if getattr(self, field.name) is not None)


class Segments(Protocol):
    """Sums over the sequences of a packed micro-batch, so that a policy loss does not need to index tokens."""

    def sums(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the sum over each of the b sequences, [b]; differentiable."""
        ...

    def spread(self, values_b: torch.Tensor) -> torch.Tensor:
        """Return the value of its sequence for each token, [T]; differentiable."""
        ...


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The settings that every policy loss shares.

    Arguments:
        eps_clip: the importance ratio is clipped below 1 - ``eps_clip``.
        eps_clip_high: the ratio is clipped above 1 + ``eps_clip_high``. None means ``eps_clip``.
        eps_clip_c: bound on the ratio for negative advantages (dual clip), above 1. None means no bound.
    """

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The input of a policy loss, one packed micro-batch of T response tokens.

    Arguments:
        log_probs_T: float32, of the trained actor, with gradient.
        old_log_probs_T: float32, of the actor before the first optimizer step of the rollout, without gradient. With
            ``use_rollout_logprobs``, of the engine.
        advantages_T: float32, without gradient.
        mask_T: float32, 1 for trained tokens, 0 for others.
        settings: see :class:`LossSettings`.
        segments: the sequences of the tokens. None if the caller does not need sequences.
        engine_columns_T: name -> float32 [T, width], the engine data that the component requests with ``reads_engine``.
            0 for tokens that no engine sampled.
    """

    log_probs_T: torch.Tensor
    old_log_probs_T: torch.Tensor
    advantages_T: torch.Tensor
    mask_T: torch.Tensor
    settings: LossSettings = field(default_factory=LossSettings)
    segments: Segments | None = None
    engine_columns_T: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Loss of each token (with gradient, 0 if masked) and metrics of each token (without). The core averages them."""

    loss_T: torch.Tensor
    metrics_T: dict[str, torch.Tensor] = field(default_factory=dict)


class PolicyLoss(Protocol):
    """Turns log-probabilities and advantages into a loss per token."""

    def __call__(self, terms: LossTerms) -> LossOutput:
        """Return the loss of each token. Do not average."""
        ...


@dataclass(frozen=True, slots=True)
class CorrectionTerms:
    """The input of an off-policy correction: one packed micro-batch of T response tokens, without gradients.

    Arguments:
        log_probs_T: float32, of the actor before the first optimizer step of the rollout. With
            ``use_rollout_logprobs``, of the engine, for corrections that do not compare the two.
        rollout_log_probs_T: float32, of the engine that sampled the tokens.
        mask_T: float32, 1 for trained tokens, after the earlier corrections.
        segments: the sequences of the tokens. With context parallelism other ranks have some tokens of a sequence, so
            every rank must call it equally often. None if the caller does not need sequences.
        current_log_probs_T: float32, of the trained actor in this optimizer step.
        advantages_T: float32.
        engine_columns_T: name -> float32 [T, width], the engine data that the component requests with ``reads_engine``.
            0 for tokens that no engine sampled.
    """

    log_probs_T: torch.Tensor
    rollout_log_probs_T: torch.Tensor
    mask_T: torch.Tensor
    segments: Segments | None = None
    current_log_probs_T: torch.Tensor | None = None
    advantages_T: torch.Tensor | None = None
    engine_columns_T: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CorrectionOutput:
    """The result of a correction for each token.

    Arguments:
        weights_T: float32, factor of the token's policy loss, finite and at least 0 for trained tokens.
        mask_T: float32, 0 or 1, at most ``CorrectionTerms.mask_T``. No term of the loss includes a token that it
            excludes.
        metrics_T: name -> one number for each token. The core averages them over all trained tokens of the rollout.
    """

    weights_T: torch.Tensor
    mask_T: torch.Tensor
    metrics_T: dict[str, torch.Tensor] = field(default_factory=dict)


class Correction(Protocol):
    """Weights and masks tokens by the difference between the trainer and the engine that sampled them.

    A run applies corrections in the order in which it names them: each gets the mask of the previous ones, and the
    weights are multiplied. Corrections do not change the divisor of the loss, the number of trained tokens.
    """

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Return weight and mask of each token. Change nothing in place."""
        ...


class ModelSpec(Protocol):
    """A family of models: builds them in Megatron, and loads and exports weights with Hugging Face names.

    ``slime_core.modeling.MBridgeSpec`` implements it for every family that mbridge maps.
    """

    def build(
        self,
        config: Mapping[str, JsonValue],
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, JsonValue] | None = None,
    ) -> list[torch.nn.Module]:
        """Return this rank's part of the model, one module for each chunk of layers.

        Arguments:
            config: the unchanged object of the checkpoint's ``config.json``. Fields may be missing.
            dtype: of the parameters.
            parallel: the split of the model over ranks, with which Megatron was initialised.
            overrides: fields of Megatron's ``TransformerConfig`` that the run sets.
        """
        ...

    def load_weights(self, chunks: list[torch.nn.Module], folder: Path) -> None:
        """Fill ``chunks`` from the Hugging Face folder. Use every weight in it, and fill every parameter."""
        ...

    def export_weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights, unsharded, with their Hugging Face names, on every rank: the inverse of
        :meth:`load_weights`.

        Collective: all ranks of the learner must iterate together.
        """
        ...
