"""The rules of how tokens are drawn."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["DRAWING"]


def _something_is_left_to_choose(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.rollout_top_k == 1:
        yield (
            "rollout_top_k = 1 leaves one token to draw at every place; its probability is 1, so nothing can be "
            "learnt from it; accepted is 2 and more, or -1 for all"
        )
    if rollout.rollout_top_k == -1 and rollout.rollout_top_p < 1 and rollout.rollout_max_kept_tokens == 1:
        yield (
            f"rollout_max_kept_tokens = 1 leaves one of the tokens that rollout_top_p = {rollout.rollout_top_p:g} "
            "keeps; its probability is 1, so nothing can be learnt from it; accepted is 2 and more"
        )


DRAWING: tuple[Rule, ...] = (_something_is_left_to_choose,)
