"""The estimator, in a file of its own because it imports numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from acme_baseline import BaselineOptions
from slime_core import GroupedRewards


class FixedBaseline:
    """Reward minus ``level``."""

    def __init__(self, options: BaselineOptions) -> None:
        self._level = np.float32(options.level)

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Return the advantages, float32 [B]."""
        return (batch.rewards_B - self._level).astype(np.float32)
