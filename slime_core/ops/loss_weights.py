"""Every divisor of the loss, as one weight a sample and one factor a step (docs/architecture.md).

The learner sums weighted losses and divides by nothing, so that packing and the number of ranks cannot change a result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["loss_divisor", "loss_factor", "loss_weights"]


def loss_weights(
    rollouts_B: NDArray[np.int64], mask_sums_B: NDArray[np.int64], *, per_token: bool
) -> NDArray[np.float32]:
    """The weight of each sample's masked loss sum, so that the weighted sum over all samples is the average of the run.

    Per response (default): each rollout's mean over its trained tokens, then the mean over rollouts; siblings that
    share a rollout share one mean. Per token: the mean over all trained tokens (DAPO, 2503.14476, eq. 8).
    Rollouts without a trained token count in neither divisor; their own weights are finite, and meet only masks of 0.

    Arguments:
        rollouts_B: int64 [B], the number of each sample's rollout, from 0; siblings share one.
        mask_sums_B: int64 [B], trained tokens of each sample.

    Returns:
        float32 [B], with ``sum(weights * mask_sums) == 1`` unless nothing is trained.
    """
    divisor = loss_divisor(rollouts_B, mask_sums_B, per_token=per_token)
    if per_token:
        return np.full(len(mask_sums_B), 1.0 / divisor, np.float32)
    tokens = np.bincount(rollouts_B, weights=mask_sums_B)
    return np.asarray(1.0 / (divisor * np.maximum(tokens[rollouts_B], 1)), np.float32)


def loss_divisor(rollouts_B: NDArray[np.int64], mask_sums_B: NDArray[np.int64], *, per_token: bool) -> int:
    """The last divisor of :func:`loss_weights`: rollouts with a trained token, or trained tokens; at least 1."""
    if per_token:
        return max(int(mask_sums_B.sum()), 1)
    return max(int((np.bincount(rollouts_B, weights=mask_sums_B) > 0).sum()), 1)


def loss_factor(
    rollouts_B: NDArray[np.int64],
    mask_sums_B: NDArray[np.int64],
    *,
    token_divisor: float | None,
    counts_masked: bool = False,
) -> float:
    """The factor of the loss, and of no metric, after it was averaged with :func:`loss_weights`.

    Arguments:
        token_divisor: turns the mean over all trained tokens into a mean over rollouts of their summed losses, each
            divided by this constant instead of its own trained tokens (Dr. GRPO, 2503.20783, section 3.2). Siblings
            of a rollout share one sum. None: the mean of :func:`loss_weights` stays.
        counts_masked: means over rollouts divide by all of them. False: by those with a trained token.
    """
    trained = loss_divisor(rollouts_B, mask_sums_B, per_token=False)
    rollouts = max(len(np.unique(rollouts_B)), 1) if counts_masked else trained
    if token_divisor is None:
        return trained / rollouts
    return loss_divisor(rollouts_B, mask_sums_B, per_token=True) / (token_divisor * rollouts)
