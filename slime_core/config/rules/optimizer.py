"""The rules of the optimizer: what it trains, and the schedules beside the plain ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["OPTIMIZER"]


def _names_are_regular_expressions(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    for setting in ("only_train_params_name_list", "freeze_params_name_list"):
        for expression in dict(settings)[setting]:
            try:
                re.compile(expression)
            except re.error as problem:
                yield f"{setting}: {expression!r} is no regular expression: {problem}; a dot is written \\."


def _warm_up_begins_below(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    start = settings.lr_warmup_init
    if start > settings.lr:
        yield f"lr_warmup_init = {start:g} is above lr = {settings.lr:g}; the learning rate rises from one to the other"


def _last_steps_are_there(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    last, style = settings.lr_wsd_decay_iters, settings.lr_decay_style
    if style != "WSD" or last is None:
        return
    alone = config.critic.num_critic_only_steps
    end = settings.lr_decay_iters or (config.rollout.num_rollout - alone) * config.steps_per_rollout
    left = end - settings.lr_warmup_iters
    if last > left:
        rollouts = "(num_rollout - num_critic_only_steps)" if alone else "num_rollout"
        name = "lr_decay_iters" if settings.lr_decay_iters else f"{rollouts} x steps a rollout"
        yield (
            f"lr_wsd_decay_iters = {last} is more than the steps after warm-up: {name} - lr_warmup_iters = {end} - "
            f"{settings.lr_warmup_iters} = {left}; give at most that"
        )


OPTIMIZER: dict[Rule, str] = {
    _names_are_regular_expressions: "only_train_params_name_list freeze_params_name_list",
    _warm_up_begins_below: "lr lr_warmup_init",
    _last_steps_are_there: (
        "lr_decay_style lr_wsd_decay_iters lr_decay_iters lr_warmup_iters num_rollout rollout_batch_size "
        "n_samples_per_prompt global_batch_size num_steps_per_rollout num_critic_only_steps"
    ),
}
"""Rule -> the settings it reads."""
