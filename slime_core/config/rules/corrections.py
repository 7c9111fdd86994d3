"""The rules of off-policy corrections, and of how far the learner may stand from the engine.

What holds between the options of a correction, its plugin says (``slime_check``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from slime_core.config.learning import STRICT_PARITY_BOUNDS
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["CORRECTIONS"]


def _corrections_are_named_once(config: RunConfig) -> Iterator[str]:
    for name, count in Counter(config.algorithm.corrections).items():
        if count > 1:
            yield f"corrections: {name} is named {count} times, and its weights would be multiplied; name it once"


def _true_on_policy_is_possible(config: RunConfig) -> Iterator[str]:
    if not config.algorithm.true_on_policy_mode:
        return
    mode = "true_on_policy_mode"
    if config.steps_per_rollout > 1:
        yield (
            f"{mode} trains once on what the trained weights drew, and num_steps_per_rollout = "
            f"{config.steps_per_rollout}: every step after the first would be off-policy; give 1, or leave the mode out"
        )
    yield from _parity_is_strict(config, mode)


def _parity_is_strict(config: RunConfig, mode: str) -> Iterator[str]:
    weights = config.weights
    given = {
        "parity_mean_tolerance": weights.parity_mean_tolerance,
        "parity_max_tolerance": weights.parity_max_tolerance,
    }
    for (name, value), bound in zip(given.items(), STRICT_PARITY_BOUNDS, strict=True):
        if value is not None and value > bound:
            yield f"{mode} accepts at most {name} = {bound:g}, and {value:g} is given; lower it, or leave it out"


CORRECTIONS: tuple[Rule, ...] = (
    _corrections_are_named_once,
    _true_on_policy_is_possible,
)
