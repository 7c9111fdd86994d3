"""The sample transforms ``drop_zero_std``, ``mask_truncated`` and ``punish_overlong`` of DAPO (2503.14476).

The paper filters groups by the correctness of the answers, so name ``drop_zero_std`` before ``punish_overlong``.
"""

from __future__ import annotations

from slime_core import RunView, Transformed
from slime_core.types import PromptGroup, Status, equal_rewards
from slime_grpo.options import GrpoOptions

__all__ = ["DropZeroStd", "MaskTruncated", "PunishOverlong"]


class DropZeroStd:
    """Drops a group whose rewards are all equal, because its group-relative advantages are 0 (DAPO, section 3.2).

    Rewards that differ only by the rounding of a sum are equal (:data:`~slime_core.types.REWARD_TOLERANCE`).

    A group of one sample is always dropped.

    If samples have several named rewards, the row's ``reward_key`` selects one, else the run's.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options
        self._key = run.reward_key

    def __call__(self, samples: PromptGroup) -> Transformed:
        """Return the group unchanged, kept or dropped with the reason ``zero_std``."""
        is_equal = equal_rewards(sample.reward_value(self._key) for sample in samples)
        return Transformed(samples, dropped="zero_std" if is_equal else None)


class MaskTruncated:
    """Keeps responses truncated at the length limit out of the loss (overlong filtering, DAPO, section 3.4).

    Their rewards are still part of the statistics of their group.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    def __call__(self, samples: PromptGroup) -> Transformed:
        """Return the group with its truncated samples masked; their number is the metric ``truncated``."""
        cut = [sample for sample in samples if sample.status is Status.TRUNCATED and not sample.remove_sample]
        for sample in cut:
            sample.remove_sample = True
        return Transformed(samples, changed={"truncated": len(cut)} if cut else {})


class PunishOverlong:
    """Lowers the reward of responses in the last interval before the length limit (DAPO, equation 13).

    With n response tokens, the limit L = ``rollout_max_response_len`` and the interval C = ``overlong_buffer_len``, a
    response loses factor x min(1, max(0, n - (L - C)) / C): nothing up to L - C, ``overlong_penalty_factor`` from L
    on. Every response that loses anything is counted in the metric ``overlong``.
    """

    def __init__(self, options: GrpoOptions, run: RunView) -> None:
        self._buffer = options.overlong_buffer_len or max(1, run.max_response_len // 5)
        self._free = run.max_response_len - self._buffer
        self._factor = options.overlong_penalty_factor
        self._key = run.reward_key

    def __call__(self, samples: PromptGroup) -> Transformed:
        """Return the group with the penalty subtracted from the rewards of overlong responses."""
        overlong = [sample for sample in samples if sample.response_length > self._free]
        for sample in overlong:
            loss = self._factor * min((sample.response_length - self._free) / self._buffer, 1.0)
            worth = sample.reward_value(self._key) - loss
            key = str(sample.reward_key(self._key))
            sample.reward = {**sample.reward, key: worth} if isinstance(sample.reward, dict) else worth
        return Transformed(samples, changed={"overlong": len(overlong)} if overlong else {})
