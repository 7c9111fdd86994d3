"""Rules of batches, optimizer steps, learning-rate schedules and staleness."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slime_core.config.learning import PARITY_BOUNDS, STRICT_PARITY_BOUNDS
from slime_core.config.rules import Rule
from slime_core.config.schema import RunConfig

__all__ = ["STEPS", "waits_warn_first"]


def _batches_add_up(config: RunConfig) -> Iterator[str]:
    prompts, responses = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    size, steps = config.learner.global_batch_size, config.learner.num_steps_per_rollout
    total = config.samples_per_rollout
    samples = f"rollout_batch_size x n_samples_per_prompt = {prompts} x {responses} = {total}"
    if size and steps and size * steps != total:
        product = f"global_batch_size x num_steps_per_rollout = {size} x {steps} = {size * steps}"
        yield f"{samples}, but {product}. They must be equal: leave out --global-batch-size or --num-steps-per-rollout"
    elif size and not steps and total % size:
        yield f"{samples}, which is not divisible by global_batch_size = {size}. Give a divisor of {total}"
    elif steps and not size and total % steps:
        yield f"{samples}, which is not divisible by num_steps_per_rollout = {steps}. Give a divisor of {total}"


def _over_sampling_starts_a_batch(config: RunConfig) -> Iterator[str]:
    started, batch = config.rollout.over_sampling_batch_size, config.rollout.rollout_batch_size
    if started is not None and started < batch:
        yield (
            f"over_sampling_batch_size = {started} prompts cannot fill rollout_batch_size = {batch}. Give at least "
            f"{batch}, or leave it out"
        )


def _ahead_within_staleness(config: RunConfig) -> Iterator[str]:
    bound, ahead = config.rollout.max_staleness, config.rollout.async_buffer_size
    if bound is not None and ahead > bound:
        yield (
            f"max_staleness = {bound}, but with async_buffer_size = {ahead} the staleness of samples reaches {ahead}. "
            f"Lower --async-buffer-size to {bound}, or raise --max-staleness to {ahead}"
        )


def _publications_within_staleness(config: RunConfig) -> Iterator[str]:
    bound, interval = config.rollout.max_staleness, config.weights.update_weights_interval
    oldest = (interval or config.rollout.num_rollout) - 1
    if bound is not None and bound < oldest:
        when = f"after every {interval} rollouts" if interval else "before the first rollout only"
        yield (
            f"max_staleness = {bound}, but update_weights_interval = {interval} publishes weights {when}, so that "
            f"the staleness of samples reaches {oldest}. Raise --max-staleness to {oldest}, or give "
            f"--update-weights-interval {bound + 1}"
        )


def _one_step_on_policy(config: RunConfig) -> Iterator[str]:
    if config.algorithm.true_on_policy_mode and config.steps_per_rollout > 1:
        yield (
            f"true_on_policy_mode takes one optimizer step a rollout, but num_steps_per_rollout = "
            f"{config.steps_per_rollout}: later steps change the weights that generated the samples. Give "
            "--num-steps-per-rollout 1, or leave out --true-on-policy-mode"
        )


def _parity_bounds(config: RunConfig) -> Iterator[str]:
    settings, number = config.weights, "bfloat16" if config.model.bf16 else "float32"
    names = ("parity_mean_tolerance", "parity_max_tolerance")
    given = (settings.parity_mean_tolerance, settings.parity_max_tolerance)
    if config.algorithm.true_on_policy_mode:
        for name, value, bound in zip(names, given, STRICT_PARITY_BOUNDS, strict=True):
            if value is not None and value > bound:
                yield (
                    f"{name} = {value:g} is above {bound:g}, the bound of true_on_policy_mode. Lower it, or leave it "
                    "out"
                )
    defaults = PARITY_BOUNDS[number]
    mean, largest = (value or default for value, default in zip(given, defaults, strict=True))
    if settings.parity_interval and mean > largest:
        yield (
            f"parity_mean_tolerance = {mean:g} is above parity_max_tolerance = {largest:g}, which bounds the mean, "
            f"too. Give both flags; in {number} the defaults are {defaults[0]:g} and {defaults[1]:g}"
        )


def _learning_rates(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    for name, bound in {"min_lr": settings.min_lr, "lr_warmup_init": settings.lr_warmup_init}.items():
        if bound > settings.lr:
            yield f"{name} = {bound:g} is above lr = {settings.lr:g}. Lower --{name.replace('_', '-')}, or raise --lr"
        if config.critic.critic_lr is not None and config.critic.critic_lr < bound:
            yield (
                f"critic_lr = {config.critic.critic_lr:g} is below {name} = {bound:g}, which holds for the "
                f"critic, too. Raise --critic-lr, or lower --{name.replace('_', '-')}"
            )


def _decay_after_warm_up(config: RunConfig) -> Iterator[str]:
    """The phases of the schedule: warm-up, then decay; with WSD the decay is the last ``lr_wsd_decay_iters`` steps."""
    optimizer, alone = config.optimizer, config.critic.num_critic_only_steps
    warm_ups = {"lr_warmup_iters": (optimizer.lr_warmup_iters, config.rollout.num_rollout - alone)}
    if config.critic.critic_lr_warmup_iters is not None:
        warm_ups["critic_lr_warmup_iters"] = (config.critic.critic_lr_warmup_iters, config.rollout.num_rollout)
    for name, (warm_up, rollouts) in warm_ups.items():
        end = optimizer.lr_decay_iters or rollouts * config.steps_per_rollout
        if optimizer.lr_decay_iters is not None and end <= warm_up:
            yield (
                f"lr_decay_iters = {end} must be above {name} = {warm_up}, because both count from the first step. "
                "Raise --lr-decay-iters"
            )
        elif optimizer.lr_decay_style == "WSD" and (optimizer.lr_wsd_decay_iters or 0) > end - warm_up:
            total = "lr_decay_iters" if optimizer.lr_decay_iters else f"optimizer steps of {rollouts} rollouts"
            yield (
                f"lr_wsd_decay_iters = {optimizer.lr_wsd_decay_iters} is more than the steps after warm-up: {total} - "
                f"{name} = {end} - {warm_up} = {end - warm_up}. Give --lr-wsd-decay-iters at most that"
            )


def _actor_is_trained(config: RunConfig) -> Iterator[str]:
    alone, total = config.critic.num_critic_only_steps, config.rollout.num_rollout
    if alone >= total:
        yield (
            f"num_critic_only_steps = {alone} leaves the actor no rollout of num_rollout = {total}. Lower "
            f"--num-critic-only-steps to at most {total - 1}, or raise --num-rollout"
        )


def _parameter_names_compile(config: RunConfig) -> Iterator[str]:
    for setting in ("only_train_params_name_list", "freeze_params_name_list"):
        for expression in dict(config.optimizer)[setting]:
            try:
                re.compile(expression)
            except re.error as problem:
                yield (
                    f"{setting}: {expression!r} is no regular expression: {problem}. Write a literal dot or bracket "
                    "with a backslash, as \\."
                )


def waits_warn_first(config: RunConfig) -> Iterator[str]:
    """A wait is reported before it fails; runs and evaluations wait."""
    warn, fail = config.watch.wait_warn_s, config.watch.wait_fail_s
    if warn > fail:
        yield (
            f"wait_warn_s = {warn:g} is above wait_fail_s = {fail:g}, so no wait would be reported. Lower "
            "--wait-warn-s, or raise --wait-fail-s"
        )


STEPS: tuple[Rule, ...] = (
    _batches_add_up,
    _over_sampling_starts_a_batch,
    _ahead_within_staleness,
    _publications_within_staleness,
    _one_step_on_policy,
    _parity_bounds,
    _learning_rates,
    _decay_after_warm_up,
    _actor_is_trained,
    _parameter_names_compile,
)
