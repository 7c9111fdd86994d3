"""The rules of rewards."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.layout_rules import Rule
from slime_core.config.reward_sum import reward_terms
from slime_core.config.schema import RunConfig

__all__ = ["REWARDS"]


def _sums_can_be_read(config: RunConfig) -> Iterator[str]:
    try:
        reward_terms(config.rollout.rm_type)
    except ValueError as error:
        yield f"rm_type = {error}"


REWARDS: dict[Rule, str] = {
    _sums_can_be_read: "rm_type",
}
"""Rule -> the settings it reads."""
