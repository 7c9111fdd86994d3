"""The rules of the optimizer: what it trains, and the schedules beside the plain ones."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["OPTIMIZER"]


def _training_and_freezing_exclude_each_other(config: RunConfig) -> Iterator[str]:
    trained, frozen = config.optimizer.only_train_params_name_list, config.optimizer.freeze_params_name_list
    if trained and frozen:
        yield (
            f"only_train_params_name_list = {' '.join(trained)} freezes everything else, and freeze_params_name_list = "
            f"{' '.join(frozen)} trains everything else; give one of them"
        )


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
    if start and not settings.lr_warmup_iters:
        yield f"lr_warmup_init = {start:g} has no effect with lr_warmup_iters = 0; add --lr-warmup-iters N"
    if start > settings.lr:
        yield f"lr_warmup_init = {start:g} is above lr = {settings.lr:g}; the learning rate rises from one to the other"


def _what_falls_is_asked_to_fall(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    style, default = settings.lr_decay_style, type(settings).model_fields["lr_wsd_decay_style"].default
    ends = {"min_lr": settings.min_lr, "lr_decay_iters": settings.lr_decay_iters}
    for name, value in ends.items() if style == "constant" else ():
        if value:
            yield (
                f"{name} = {value:g} has no effect with lr_decay_style = constant; add --lr-decay-style linear or "
                "cosine, or leave it out"
            )
    if style != "WSD" and settings.lr_wsd_decay_style != default:
        yield (
            f"lr_wsd_decay_style = {settings.lr_wsd_decay_style} has no effect with lr_decay_style = {style}; add "
            "--lr-decay-style WSD, or leave it out"
        )


def _last_steps_are_there(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    last, style = settings.lr_wsd_decay_iters, settings.lr_decay_style
    if style != "WSD":
        if last is not None:
            yield (
                f"lr_wsd_decay_iters = {last} has no effect with lr_decay_style = {style}; add --lr-decay-style WSD, "
                "or leave it out"
            )
        return
    if last is None:
        yield "lr_decay_style = WSD needs the number of steps over which it falls; add --lr-wsd-decay-iters N"
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
    _training_and_freezing_exclude_each_other: "only_train_params_name_list freeze_params_name_list",
    _names_are_regular_expressions: "only_train_params_name_list freeze_params_name_list",
    _warm_up_begins_below: "lr lr_warmup_init lr_warmup_iters",
    _what_falls_is_asked_to_fall: "lr_decay_style lr_wsd_decay_style min_lr lr_decay_iters",
    _last_steps_are_there: (
        "lr_decay_style lr_wsd_decay_iters lr_decay_iters lr_warmup_iters num_rollout rollout_batch_size "
        "n_samples_per_prompt global_batch_size num_steps_per_rollout num_critic_only_steps"
    ),
}
"""Rule -> the settings it reads."""
