"""The rules of rewards."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.reward_sum import reward_terms
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["REWARDS"]


def _sums_can_be_read(config: RunConfig) -> Iterator[str]:
    try:
        reward_terms(config.rollout.rm_type)
    except ValueError as error:
        yield f"rm_type = {error}"


def _sums_of_evaluation_sets_can_be_read(config: RunConfig) -> Iterator[str]:
    for one in config.eval.eval_datasets:
        try:
            reward_terms(one.rm_type or "")
        except ValueError as error:
            yield f"evaluation set {one.name}: rm_type = {error}"


REWARDS: dict[Rule, str] = {
    _sums_can_be_read: "rm_type",
    _sums_of_evaluation_sets_can_be_read: "eval_datasets",
}
"""Rule -> the settings it reads."""
