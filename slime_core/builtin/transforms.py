"""The sample transforms ``drop_zero_std`` and ``mask_truncated``, both of DAPO (2503.14476).

Left out of the paper's overlong handling: the soft punishment by length (section 3.4), which shapes the reward.
"""

from __future__ import annotations

from typing import Any

from slime_core import Transformed
from slime_core.types import PromptGroup, Status

__all__ = ["DropZeroStd", "MaskTruncated"]


class DropZeroStd:
    """Drops a group whose rewards are all equal, because group-relative advantages of it are 0 (DAPO, section 3.2).

    A group of one sample is always dropped.

    Arguments:
        options: the settings of the run, of which ``rollout.reward_key`` says which of several rewards trains; None:
            rewards are plain numbers.
    """

    def __init__(self, options: Any = None) -> None:
        self._key: str | None = None if options is None else options.rollout.reward_key

    def __call__(self, samples: PromptGroup) -> Transformed:
        """The group as it is, kept or dropped for ``zero_std``."""
        rewards = {sample.reward_value(self._key) for sample in samples}
        return Transformed(samples, dropped="zero_std" if len(rewards) == 1 else None)


class MaskTruncated:
    """Keeps samples that were cut at the length limit out of the loss (overlong filtering, DAPO, section 3.4).

    Their rewards still count in the statistics of their group.
    """

    def __init__(self, options: object | None = None) -> None:
        del options

    def __call__(self, samples: PromptGroup) -> Transformed:
        """The group with its truncated samples masked, counted as ``truncated``."""
        cut = [sample for sample in samples if sample.status is Status.TRUNCATED and not sample.remove_sample]
        for sample in cut:
            sample.remove_sample = True
        return Transformed(samples, changed={"truncated": len(cut)} if cut else {})
