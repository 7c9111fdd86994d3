"""What the targets of components implement: one Protocol a kind, and the records they take and return.

Every target is called once with the plugin's options object (None where the plugin has no options) and the result is
used for the whole run. numpy and torch appear in annotations only, so that importing this module stays cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime_core.types import PromptGroup, Sample

Prompt = str | list[dict[str, Any]]

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = [
    "AdvantageEstimator",
    "DataSource",
    "GenerateFunction",
    "GroupGenerateFunction",
    "GroupedRewards",
    "LossOutput",
    "LossSettings",
    "LossTerms",
    "ModelSpec",
    "PolicyLoss",
    "PromptRequest",
    "RewardModel",
    "Segments",
    "Tracker",
]


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """The rewards of B samples and which prompt group each belongs to; samples of a group may stand anywhere.

    Example, two groups of two::

        GroupedRewards(rewards_B=np.float32([1, 0, 1, 1]), groups_B=np.int64([7, 7, 9, 9]),
                       lengths_B=np.int64([12, 30, 8, 9]), mask_sums_B=np.int64([12, 18, 8, 9]))

    Arguments:
        rewards_B: float32, finite.
        groups_B: int64, the samples' ``group_index``; any integers.
        lengths_B: int64, response tokens.
        mask_sums_B: int64, response tokens that are trained.

    Raises:
        ValueError: the columns differ in shape, or a reward is NaN or infinite.
    """

    rewards_B: NDArray[np.float32]
    groups_B: NDArray[np.int64]
    lengths_B: NDArray[np.int64]
    mask_sums_B: NDArray[np.int64]

    def __post_init__(self) -> None:
        shapes = {
            "rewards_B": self.rewards_B.shape,
            "groups_B": self.groups_B.shape,
            "lengths_B": self.lengths_B.shape,
            "mask_sums_B": self.mask_sums_B.shape,
        }
        if set(shapes.values()) != {(len(self.rewards_B),)}:
            raise ValueError(f"every column holds one number a sample; found the shapes {shapes}")
        if len(self) and not math.isfinite(float(abs(self.rewards_B).max())):
            raise ValueError("a reward is NaN or infinite; the reward model must return finite numbers")

    def __len__(self) -> int:
        return len(self.rewards_B)


class AdvantageEstimator(Protocol):
    """Turns the rewards of a whole rollout into one advantage a sample (scope ``sample``)."""

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Advantages, float32 [B], in the order of ``batch``; permuting the samples permutes them alike."""
        ...


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
        old_log_probs_T: float32, of the actor before the first optimizer step of the rollout; no gradient.
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


class RewardModel(Protocol):
    """Scores finished responses."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[float | dict[str, float]]:
        """One reward a sample, in the order of ``samples``; changes none of them."""
        ...


class GenerateFunction(Protocol):
    """Makes the response to one sample's prompt (scope ``sample``)."""

    async def __call__(self, context: Any, sample: Sample, sampling: Any) -> Sample | list[Sample]:
        """The finished sample, or several that one generation fanned out into and that share a ``rollout_id``."""
        ...


class GroupGenerateFunction(Protocol):
    """Makes the responses to one prompt group (scope ``group``)."""

    async def __call__(self, context: Any, samples: PromptGroup, sampling: Any) -> list[Sample]:
        """The finished samples of the group."""
        ...


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """What a data source is asked for.

    Arguments:
        path: the file.
        input_key, label_key, metadata_key: fields of a row.
        n_samples_per_prompt: samples of a group.
        shuffle: a new order each epoch, by ``seed``; False: file order.
        keeps: prompts it says no to are left out; None: all are kept.
    """

    path: Path
    input_key: str = "prompt"
    label_key: str | None = "label"
    metadata_key: str = "metadata"
    n_samples_per_prompt: int = 1
    shuffle: bool = True
    seed: int = 0
    keeps: Callable[[Prompt], bool] | None = None


class DataSource(Protocol):
    """Hands out prompt groups, and can be put back to where it was.

    Its target is called with the plugin's options and ``request=``, a :class:`PromptRequest`.
    """

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` prompt groups, of pending samples."""
        ...

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Take unfinished groups back; they are handed out first."""
        ...

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs, as JSON-ready values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from where ``state()`` was taken."""
        ...

    def __len__(self) -> int:
        """Number of prompts in one pass over the data."""
        ...


class ModelSpec(Protocol):
    """Describes one family of models; what the learner asks of it stands in ``slime_core.learner.spec``."""


class Tracker(Protocol):
    """Sends metrics somewhere."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and let go; called once, also when the run failed."""
        ...
