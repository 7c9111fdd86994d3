"""The rules of the critic. Whether there is one is for the advantage estimator to say, see ``plugins/selection.py``."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.layout_rules import Rule
from slime_core.config.schema import RunConfig

__all__ = ["CRITIC"]


def _actor_has_rollouts_left(config: RunConfig) -> Iterator[str]:
    alone, total = config.critic.num_critic_only_steps, config.rollout.num_rollout
    if alone >= total > 0:
        yield (
            f"num_critic_only_steps = {alone} leaves the actor no rollout: num_rollout = {total}; give at most "
            f"{total - 1}, or more rollouts"
        )


def _critic_rate_is_in_bounds(config: RunConfig) -> Iterator[str]:
    rate, optimizer = config.critic.critic_lr, config.optimizer
    for name, bound in {"min_lr": optimizer.min_lr, "lr_warmup_init": optimizer.lr_warmup_init}.items():
        if rate is not None and rate < bound:
            yield (
                f"critic_lr = {rate:g} is below {name} = {bound:g}, which the critic's schedule shares with the "
                f"actor's; raise critic_lr, or lower {name}"
            )


CRITIC: dict[Rule, str] = {
    _actor_has_rollouts_left: "num_critic_only_steps num_rollout",
    _critic_rate_is_in_bounds: "critic_lr min_lr lr_warmup_init",
}
"""Rule -> the settings it reads."""
