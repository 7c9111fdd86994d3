"""Advantage estimators, policy losses, corrections, model specs, and what plugins may replace in a learner's step."""

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
"""Names and tensors."""

WriteTensors: TypeAlias = Callable[[Path, Sequence[tuple[str, "torch.Tensor"]]], None]
"""Creates a folder and writes named tensors into it."""


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
    """The result of an estimator of scope ``token`` for u response tokens.

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


class MicroBatch(Protocol):
    """b samples packed into one row; a rank holds t tokens of it and predicts u response tokens.

    Response tokens lie sample after sample. ``slime_before_training`` may set the attributes that are no properties.

    Arguments:
        mask_U: float32 [u], 1 trains; may only leave tokens out, because ``weights_U`` holds divisors counted before.
        advantages_U: float32 [u].
        rollout_log_probs_U: float32 [u], of the engine that sampled the tokens.
        old_log_probs_U: float32 [u], of the actor before the first optimizer step of the rollout; None: the current
            ones stand in, detached.
        ref_log_probs_U: float32 [u], of the reference; None: nothing reads them.
        returns_U: float32 [u], what the critic learns; None: there is no critic.
        fresh_U: bool [u], sampled by the weights that the learner holds, so that engine and learner are compared there;
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
        """The factor of a sum of means over samples (a sum over tokens, with ``calculate_per_token_loss``), so
        that micro-batches and ranks add up to the step's loss; 0 in a micro-batch that trains nothing."""
        ...

    @property
    def temperature(self) -> float:
        """At which the tokens were sampled."""
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
    """Replacements of parts of a rank's loss by a plugin; None: the core's own.

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


@dataclass(frozen=True, slots=True)
class WrappedModel:
    """What a plugin that wrapped the actor's model replaces; fields that are None stay as without the plugin.

    Functions that return tensors are collective: all ranks iterate to the end.

    Arguments:
        published: returns the weights for engines: all weights of the model, with Hugging Face names.
        saved: returns the tensors for the folder ``hf`` of a checkpoint; None: those of ``published``.
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
    """The input of a policy loss, one packed micro-batch of T response tokens.

    Arguments:
        log_probs_T: float32, of the actor that trains; carries the gradient.
        old_log_probs_T: float32, of the actor before the first optimizer step of the rollout, or with
            ``use_rollout_logprobs`` of the engine; no gradient.
        advantages_T: float32, no gradient.
        mask_T: float32, 1 where the token is trained.
        settings: see :class:`LossSettings`.
        segments: which tokens form a sequence; None where the caller has no use for sequences.
        engine_columns_T: name -> float32 [T, width], what the component declared with ``reads_engine``; 0 at tokens
            that no engine sampled.
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
    """The input of an off-policy correction, one packed micro-batch of T response tokens, nothing with a gradient.

    Arguments:
        log_probs_T: float32, of the trainer: the actor before the first optimizer step of the rollout. With
            ``use_rollout_logprobs`` the engine's, for corrections that do not compare the two.
        rollout_log_probs_T: float32, of the engine that sampled the tokens.
        mask_T: float32, 1 where the token is trained, as earlier corrections left it.
        segments: which tokens form a sequence; under context parallelism some of them are on other ranks, so a
            correction calls it as often on every rank. None where the caller has no use for sequences.
        current_log_probs_T: float32, of the actor that trains, as it is in this optimizer step.
        advantages_T: float32.
        engine_columns_T: name -> float32 [T, width], what the component declared with ``reads_engine``; 0 at tokens
            that no engine sampled.
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
        weights_T: float32, finite and at least 0 where the token is trained; multiplies its policy loss.
        mask_T: float32, 0 or 1; trains at most the tokens of ``CorrectionTerms.mask_T``. A token that it leaves out
            takes no part in any term of the loss.
        metrics_T: a number a token by name; averaged by the core over all tokens that the rollout trains.
    """

    weights_T: torch.Tensor
    mask_T: torch.Tensor
    metrics_T: dict[str, torch.Tensor] = field(default_factory=dict)


class Correction(Protocol):
    """Weighs and masks tokens by how far the trainer stands from the engine that sampled them.

    A run names corrections in order; each sees the mask that those before it left, and the weights are multiplied. What
    the loss is divided by stays what it was before them: the tokens that the rollout trains.
    """

    def __call__(self, terms: CorrectionTerms) -> CorrectionOutput:
        """Weight and mask of each token; changes nothing in place."""
        ...


class ModelSpec(Protocol):
    """Describes one family of models: builds it in Megatron, and knows its weights by their Hugging Face names.

    ``slime_core.modeling.MBridgeSpec`` is this for every family that mbridge maps.
    """

    def build(
        self,
        config: Mapping[str, JsonValue],
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, JsonValue] | None = None,
    ) -> list[torch.nn.Module]:
        """This rank's part of the model, one module a chunk of layers that it holds.

        Arguments:
            config: the object in the checkpoint's ``config.json``, as it stands there; fields may be missing.
            dtype: of the parameters.
            parallel: how the model is cut over ranks; Megatron was initialised with it.
            overrides: fields of Megatron's ``TransformerConfig`` that the run sets.
        """
        ...

    def load_weights(self, chunks: list[torch.nn.Module], folder: Path) -> None:
        """Fill ``chunks`` from the Hugging Face folder; every weight there is used, every parameter here is filled."""
        ...

    def export_weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights, whole, under their Hugging Face names, on every rank; the inverse of :meth:`load_weights`.

        Collective: every rank of the learner iterates in step.
        """
        ...
