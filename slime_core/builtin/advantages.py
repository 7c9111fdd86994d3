"""The advantage estimator ``sft``, for runs whose policy loss reads no advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core import GroupedRewards, RunView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["NoAdvantage"]


class NoAdvantage:
    """0 for every sample, whatever its reward."""

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    def estimate(self, batch: GroupedRewards) -> NDArray[np.float32]:
        """Zeros, float32 [B]."""
        import numpy as np

        return np.zeros(len(batch), np.float32)
