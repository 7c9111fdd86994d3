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


def _the_loss_knows_the_cut(config: RunConfig) -> Iterator[str]:
    rollout, loss = config.rollout, config.custom.custom_loss_function_path
    asked = {"rollout_top_p": rollout.rollout_top_p < 1, "rollout_top_k": rollout.rollout_top_k != -1}
    for name in (name for name, cuts in asked.items() if cuts and loss is not None):
        yield (
            f"{name} = {getattr(rollout, name):g} draws tokens from a part of the vocabulary, and "
            f"custom_loss_function_path = {loss} gets the logits of all of it, so its log-probabilities would be those "
            "of another distribution; leave one of the two out"
        )


DRAWING: tuple[Rule, ...] = (
    _something_is_left_to_choose,
    _the_loss_knows_the_cut,
)
