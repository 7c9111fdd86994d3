"""Warnings about metrics that show that a run will not learn, each once and with advice.

A sign must hold for several consecutive rows, because single rollouts are noisy; only a gradient of 0 and rewards that
time out count at once. The limits are rules of thumb: a warning does not end the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core import RunView

_LOG = logging.getLogger(__name__)

ROWS = 3
"""Consecutive rows for which a sign must hold."""

SLOW = 1.5
"""Ratio to the median of the other ranks' seconds for the same work, above which a rank is slow."""

LOST_S = 1.0
"""Seconds of a rollout that the other ranks wait for a slow rank; a shorter wait is not reported."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A metric whose values can show that something is wrong.

    Arguments:
        metric: name of the metric; rows without it are skipped.
        holds: condition on the value and the first value of the run.
        text: the warning; ``{value}``, ``{first}`` and ``{step}`` are replaced by numbers.
        rows: consecutive rows for which it must hold.
    """

    metric: str
    holds: Callable[[float, float], bool]
    text: str
    rows: int = ROWS


SIGNS = (
    Sign(
        "train/grad_norm",
        lambda value, _: value == 0,
        "the gradient is 0, so nothing was learnt{why}. Read samples/train-{step:06}.jsonl; often "
        "--apply-chat-template is missing, or the reward looks for another answer than the responses give (--rm-type, "
        "--label-key)",
        rows=1,
    ),
    Sign(
        "rollout/reward_failures/timeout",
        lambda value, _: value > 0,
        "rewards timed out, {value:.0f} in rollout {step}; these samples are not trained on. Raise "
        "--reward-timeout-s, or read logs/rewards.log",
        rows=1,
    ),
    Sign(
        "rollout/raw_reward",
        lambda value, first: value == 0 and first == 0,
        "no response of the first rollouts got a reward. Compare a response in samples/train-{step:06}.jsonl with its "
        "label; the reward may expect another form (--rm-type)",
    ),
    Sign(
        "rollout/truncated_ratio",
        lambda value, _: value > 0.5,
        "{value:.0%} of the responses are cut before their end. Raise --rollout-max-response-len",
    ),
    Sign(
        "rollout/zero_std_groups",
        lambda value, _: value > 0.9,
        "in {value:.0%} of the groups all responses have the same reward, so a group-relative estimator learns nothing "
        "from them: the prompts are too easy or too hard. Select others, or drop such groups (--sample-transforms "
        "drop_zero_std)",
    ),
    Sign(
        "train/entropy_loss",
        lambda value, first: value < 0.02 * first,
        "the entropy fell from {first:.3g} to {value:.3g} nats: responses to a prompt are nearly the same. Lower --lr, "
        "or keep the policy wide (--entropy-coef, --eps-clip-high)",
    ),
    Sign(
        "train/kl_loss",
        lambda value, _: value > 1,
        "the policy is {value:.2g} nats a token from its reference. Lower --lr, or raise --kl-loss-coef",
    ),
    Sign(
        "train/ppo_kl",
        lambda value, _: abs(value) > 0.2,
        "one rollout moves the policy by {value:.2g} nats a token. Lower --lr, or take fewer optimizer steps a rollout "
        "(--num-steps-per-rollout)",
    ),
    *(
        Sign(
            f"rollout/staleness/{treatment}",
            lambda value, _: value > 0,
            f"samples are older than --max-staleness and {fate}, {{value:.0f}} in rollout {{step}}: generation is "
            "slower than training. Add engines, or lower --async-buffer-size",
        )
        for treatment, fate in (("requeued", "generated again"), ("evicted", "dropped"))
    ),
    Sign(
        "train/token_imbalance",
        lambda value, _: value > 1.5,
        "the busiest rank trains {value:.1f} times the tokens of the mean rank, and the others wait for it: one "
        "sample is as long as those of several ranks. Take more samples an optimizer step (--rollout-batch-size, "
        "--num-steps-per-rollout)",
    ),
)


class Advice:
    """Tracker that logs each warning once.

    Attributes:
        messages: the warnings logged so far.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._signs = list(SIGNS)
        self._first_values: dict[str, float] = {}
        self._rows = dict.fromkeys((sign.metric for sign in SIGNS), 0)
        self._slow_rank = SlowRank()

    def start(self, run: RunView) -> None:
        """Do nothing: advice needs rows only."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the warnings for the row of ``step``."""
        messages = list(self._sign_warnings(step, metrics))
        if (slow := self._slow_rank.warning(metrics)) is not None:
            messages.append(slow)
        for message in messages:
            _LOG.warning("warning: %s", message)
        self.messages += messages

    def close(self, error: BaseException | None) -> None:
        """Do nothing: every warning is logged at once."""

    def _sign_warnings(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        for sign in [sign for sign in self._signs if sign.metric in metrics]:
            value = metrics[sign.metric]
            first = self._first_values.setdefault(sign.metric, value)
            self._rows[sign.metric] = self._rows[sign.metric] + 1 if sign.holds(value, first) else 0
            if self._rows[sign.metric] == sign.rows:
                self._signs.remove(sign)
                yield sign.text.format(value=value, first=first, step=step, why=_why(metrics))


def _why(metrics: Mapping[str, float]) -> str:
    """Return why the gradient is 0, if the row shows it."""
    if "rollout/raw_reward" not in metrics or metrics.get("rollout/zero_std_groups") != 1:
        return ""
    return f": all responses to a prompt got the same reward, on average {metrics['rollout/raw_reward']:.3f}"


class SlowRank:
    """Warns once of a learner rank that is slow in :data:`ROWS` consecutive rows.

    Ranks that share a copy of the model wait for each other inside a pass, so all of them look as slow as the slowest;
    a run with one copy has no ranks to compare.
    """

    def __init__(self) -> None:
        self._rank = -1
        self._rows = 0
        self._has_warned = False

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """Return the warning after a row of metrics; None if there is none."""
        if self._has_warned or "perf/slowest_rank" not in metrics:
            return None
        rank, ratio = int(metrics["perf/slowest_rank"]), metrics["perf/slowest_rank_ratio"]
        lost_s = metrics["perf/slowest_rank_lost_time"]
        is_slow = ratio > SLOW and lost_s > LOST_S
        self._rows = (self._rows + 1 if rank == self._rank else 1) if is_slow else 0
        self._rank = rank
        self._has_warned = self._rows == ROWS
        if not self._has_warned:
            return None
        return (
            f"learner rank {rank} takes {ratio:.1f} times as long as the others for the same work, {ROWS} rollouts in "
            f"a row, and they wait {lost_s:.0f} s for it in each. Look for other programs and low clocks on its node "
            "(top, nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE), or leave the node out"
        )
