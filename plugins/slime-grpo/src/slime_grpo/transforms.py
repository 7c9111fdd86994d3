"""The sample transforms ``drop_zero_std``, ``mask_truncated`` and ``punish_overlong``, all of DAPO (2503.14476).

The paper filters groups by what the answers are worth, so ``drop_zero_std`` is named before ``punish_overlong``.
"""

from __future__ import annotations

from slime_core import RunView, Transformed
from slime_core.types import PromptGroup, Status
from slime_grpo.options import GrpoOptions

__all__ = ["DropZeroStd", "MaskTruncated", "PunishOverlong"]


class DropZeroStd:
    """Drops a group whose rewards are all equal, because group-relative advantages of it are 0 (DAPO, section 3.2).

    A group of one sample is always dropped.

    Which of several rewards counts, the row's ``reward_key`` says, or else the run's.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options
        self._key = run.reward_key

    def __call__(self, samples: PromptGroup) -> Transformed:
        """The group as it is, kept or dropped for ``zero_std``."""
        rewards = {sample.reward_value(self._key) for sample in samples}
        return Transformed(samples, dropped="zero_std" if len(rewards) == 1 else None)


class MaskTruncated:
    """Keeps samples that were cut at the length limit out of the loss (overlong filtering, DAPO, section 3.4).

    Their rewards still count in the statistics of their group.
    """

    def __init__(self, options: object, run: RunView) -> None:
        del options, run

    def __call__(self, samples: PromptGroup) -> Transformed:
        """The group with its truncated samples masked, counted as ``truncated``."""
        cut = [sample for sample in samples if sample.status is Status.TRUNCATED and not sample.remove_sample]
        for sample in cut:
            sample.remove_sample = True
        return Transformed(samples, changed={"truncated": len(cut)} if cut else {})


class PunishOverlong:
    """Takes ever more off the reward of responses in the last stretch before the length limit (DAPO, equation 13).

    With n response tokens, the limit L = ``rollout_max_response_len`` and the stretch C = ``overlong_buffer_len``, a
    response loses factor x min(1, max(0, n - (L - C)) / C): nothing up to L - C, ``overlong_penalty_factor`` from L
    on. It counts as ``overlong`` where it loses anything.
    """

    def __init__(self, options: GrpoOptions, run: RunView) -> None:
        self._buffer = options.overlong_buffer_len or max(1, run.max_response_len // 5)
        self._free = run.max_response_len - self._buffer
        self._factor = options.overlong_penalty_factor
        self._key = run.reward_key

    def __call__(self, samples: PromptGroup) -> Transformed:
        """The group with lower rewards where responses are overlong."""
        overlong = [sample for sample in samples if sample.response_length > self._free]
        for sample in overlong:
            loss = self._factor * min((sample.response_length - self._free) / self._buffer, 1.0)
            worth = sample.reward_value(self._key) - loss
            key = str(sample.reward_key(self._key))
            sample.reward = {**sample.reward, key: worth} if isinstance(sample.reward, dict) else worth
        return Transformed(samples, changed={"overlong": len(overlong)} if overlong else {})
