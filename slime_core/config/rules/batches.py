"""The rules of optimizer steps, micro-batches, the learning rate and what is trained."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slime_core.config.described import context_length, described, start_weights
from slime_core.config.flops import forward_flops
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["BATCHES", "OPTIMIZER"]


def _batches_add_up(config: RunConfig) -> Iterator[str]:
    prompts, responses = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    size, steps = config.learner.global_batch_size, config.learner.num_steps_per_rollout
    total = config.samples_per_rollout
    left = f"rollout_batch_size x n_samples_per_prompt = {prompts} x {responses} = {total}"
    if size and steps and size * steps != total:
        right = f"global_batch_size x num_steps_per_rollout = {size} x {steps} = {size * steps}"
        yield f"{left}, but {right}; they must be equal, or leave one of the latter two out"
    elif size and not steps and total % size:
        yield f"{left}, which global_batch_size = {size} does not divide; choose a divisor of {total}"
    elif steps and not size and total % steps:
        yield f"{left}, which num_steps_per_rollout = {steps} does not divide; choose a divisor of {total}"


def _schedule_is_possible(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    if settings.min_lr > settings.lr:
        yield f"min_lr = {settings.min_lr} is above lr = {settings.lr}; the learning rate falls from lr to min_lr"
    if settings.lr_decay_iters is not None and settings.lr_decay_iters <= settings.lr_warmup_iters:
        decay, warmup = settings.lr_decay_iters, settings.lr_warmup_iters
        yield f"lr_decay_iters = {decay} must be above lr_warmup_iters = {warmup}; both count from the first step"


def _hard_budget_holds_the_longest(config: RunConfig) -> Iterator[str]:
    settings, (context, name) = config.learner, _smallest_context(config)
    if not settings.hard_token_budget:
        return
    longest, sum_ = _longest(config)
    if longest is None:
        yield (
            "hard_token_budget = true, but nothing says how long a prompt may be; add --rollout-max-prompt-len, or "
            "leave the hard budget out"
        )
        return
    count = settings.micro_batch_size or 1
    needed, budget = count * longest, settings.max_tokens_per_gpu * context
    if needed > budget:
        times = f"micro_batch_size = {count} x {sum_} = {needed}" if count > 1 else sum_
        yield (
            f"hard_token_budget: {times} tokens do not fit max_tokens_per_gpu x {name} = "
            f"{settings.max_tokens_per_gpu} x {context} = {budget}; give max_tokens_per_gpu at least "
            f"{-(-needed // context)}, or shorten prompts or responses"
        )


def _smallest_context(config: RunConfig) -> tuple[int, str]:
    """Ranks that share a row, of the actor or of a critic apart, whichever has fewer; and the setting that says so."""
    actor, name = config.parallel.context_parallel_size, "context_parallel_size"
    critic = config.critic_parallel.context_parallel_size
    return (critic, f"critic_{name}") if config.num_critic_ranks and critic < actor else (actor, name)


def _longest(config: RunConfig) -> tuple[int | None, str]:
    """Tokens of the longest sequence, and how that comes about: prompt and response, or what is read at most."""
    prompt, response = config.data.rollout_max_prompt_len, config.rollout.rollout_max_response_len
    found = {}
    if prompt is not None:
        total = f"rollout_max_prompt_len + rollout_max_response_len = {prompt} + {response} = {prompt + response}"
        found[total] = prompt + response
    if (asked := config.engine.sglang_context_length) is not None:
        found[f"sglang_context_length = {asked}"] = asked
    if (read := context_length(start_weights(config))) is not None:
        found[f"max_position_embeddings = {read}"] = read
    shortest = min(found, key=lambda name: found[name], default="")
    return found.get(shortest), shortest


def _work_can_be_counted(config: RunConfig) -> Iterator[str]:
    folder = start_weights(config)
    content = described(folder)
    if not config.learner.balance_by_flops or content is None:
        return
    try:
        forward_flops(content)
    except ValueError as error:
        yield f"balance_by_flops: {folder / 'config.json'} {error}; leave it out, and ranks are balanced by tokens"


BATCHES: tuple[Rule, ...] = (
    _batches_add_up,
    _hard_budget_holds_the_longest,
    _work_can_be_counted,
    _schedule_is_possible,
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


OPTIMIZER: tuple[Rule, ...] = (
    _names_are_regular_expressions,
    _warm_up_begins_below,
    _last_steps_are_there,
)
