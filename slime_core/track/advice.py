"""Warnings about metrics that show that a run will not learn, each once and with advice.

A sign must hold for several consecutive rows, because single rollouts are noisy; only a gradient of 0 and rewards that
time out count at once. The limits are rules of thumb: a warning does not end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ROWS = 3
"""Consecutive rows for which a sign must hold."""


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
    """Reads the rows of a run; each sign is reported once."""

    def __init__(self) -> None:
        self._open = list(SIGNS)
        self._first: dict[str, float] = {}
        self._held = dict.fromkeys((sign.metric for sign in SIGNS), 0)

    def of(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the warnings for the row of ``step``."""
        found = []
        for sign in [sign for sign in self._open if sign.metric in metrics]:
            value = metrics[sign.metric]
            first = self._first.setdefault(sign.metric, value)
            self._held[sign.metric] = self._held[sign.metric] + 1 if sign.holds(value, first) else 0
            if self._held[sign.metric] == sign.rows:
                self._open.remove(sign)
                found.append(sign.text.format(value=value, first=first, step=step, why=_why(metrics)))
        return found


def _why(metrics: Mapping[str, float]) -> str:
    """Return why the gradient is 0, if the row shows it."""
    if "rollout/raw_reward" not in metrics or metrics.get("rollout/zero_std_groups") != 1:
        return ""
    return f": all responses to a prompt got the same reward, on average {metrics['rollout/raw_reward']:.3f}"
