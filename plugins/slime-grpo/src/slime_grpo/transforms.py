"""The sample transforms ``drop_zero_std``, ``mask_truncated`` and ``punish_overlong`` of DAPO (2503.14476).

The paper filters groups by the correctness of the answers, so name ``drop_zero_std`` before ``punish_overlong``. If
samples have several named rewards, the row's ``reward_key`` selects one, else the run's.
"""

from __future__ import annotations

from slime_core import PromptGroup, RunView, Status, Transformed
from slime_core.types import equal_rewards
from slime_grpo.options import GrpoOptions

__all__ = ["drop_zero_std", "mask_truncated", "punish_overlong"]


def drop_zero_std(samples: PromptGroup, run: RunView) -> Transformed:
    """Drop a group whose rewards are all equal (dynamic sampling, DAPO, 2503.14476).

    Its group-relative advantages are 0. Rewards that differ only by the rounding of a sum are equal
    (:data:`~slime_core.types.REWARD_TOLERANCE`), and a group of one sample is always dropped; the reason is
    ``zero_std``. Source: section 3.2.
    """
    is_equal = equal_rewards(sample.reward_value(run.reward_key) for sample in samples)
    return Transformed(samples, dropped="zero_std" if is_equal else None)


def mask_truncated(samples: PromptGroup) -> Transformed:
    """Leave truncated responses out of the loss (overlong filtering, DAPO, 2503.14476).

    Their rewards are still part of the statistics of their group. The metric ``truncated`` counts them. Source:
    section 3.4.
    """
    truncated = [sample for sample in samples if sample.status is Status.TRUNCATED and not sample.remove_sample]
    for sample in truncated:
        sample.remove_sample = True
    return Transformed(samples, changed={"truncated": len(truncated)} if truncated else {})


def punish_overlong(samples: PromptGroup, options: GrpoOptions, run: RunView) -> Transformed:
    """Lower the reward of responses near the length limit (soft overlong punishment, DAPO, 2503.14476).

    With n response tokens, the limit L = ``rollout_max_response_len`` and the interval C = ``overlong_buffer_len``, a
    response loses factor x min(1, max(0, n - (L - C)) / C): nothing up to L - C, ``overlong_penalty_factor`` from L
    on. The metric ``overlong`` counts the responses that lose anything. Source: equation 13.
    """
    buffer = options.overlong_buffer_len or max(1, run.max_response_len // 5)
    free = run.max_response_len - buffer
    overlong = [sample for sample in samples if sample.response_length > free]
    for sample in overlong:
        penalty = options.overlong_penalty_factor * min((sample.response_length - free) / buffer, 1.0)
        reward = sample.reward_value(run.reward_key) - penalty
        key = str(sample.reward_key(run.reward_key))
        sample.reward = {**sample.reward, key: reward} if isinstance(sample.reward, dict) else reward
    return Transformed(samples, changed={"overlong": len(overlong)} if overlong else {})
