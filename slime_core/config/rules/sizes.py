"""Rules of sizes: batches, optimizer steps, schedules, staleness; prompts, responses, the context of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slime_core.config.learning import PARITY_BOUNDS, STRICT_PARITY_BOUNDS
from slime_core.config.model_config import context_length, is_mixture, start_weights
from slime_core.config.rules import Rule
from slime_core.config.schema import RunConfig


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
    settings = config.weights
    number = "bfloat16" if config.model.bf16 else "mixture" if is_mixture(config.model.hf_checkpoint) else "float32"
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
    kind = "for mixtures of experts in float32" if number == "mixture" else f"in {number}"
    if settings.parity_interval and mean > largest:
        yield (
            f"parity_mean_tolerance = {mean:g} is above parity_max_tolerance = {largest:g}, which bounds the mean, "
            f"too. Give both flags; {kind} the defaults are {defaults[0]:g} and {defaults[1]:g}"
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


def _responses_fit_the_context(config: RunConfig) -> Iterator[str]:
    context = config.engine.sglang_context_length
    longest = max(config.rollout.rollout_max_response_len, config.eval.eval_max_response_len or 0)
    if context is not None and longest >= context:
        yield (
            f"sglang_context_length = {context} has no room for a prompt and a response of {longest} tokens; "
            "raise --sglang-context-length, or lower --rollout-max-response-len or --eval-max-response-len"
        )


def _context_fits_the_model(config: RunConfig) -> Iterator[str]:
    requested, context = config.engine.sglang_context_length, context_length(start_weights(config))
    if requested is not None and context is not None and requested > context:
        yield (
            f"sglang_context_length = {requested}, but the model reads at most max_position_embeddings = {context} "
            f"tokens; give at most {context}, or leave it out"
        )


def _responses_fit_the_model(config: RunConfig) -> Iterator[str]:
    yield from _too_long(config, "rollout_max_response_len", config.rollout.rollout_max_response_len)
    yield from _too_long(config, "eval_max_response_len", config.eval.eval_max_response_len)


def _evaluated_responses_fit_the_model(config: RunConfig) -> Iterator[str]:
    if config.eval.eval_max_response_len is None:
        yield from _too_long(config, "rollout_max_response_len", config.rollout.rollout_max_response_len)
    yield from _too_long(config, "eval_max_response_len", config.eval.eval_max_response_len)


def _too_long(config: RunConfig, name: str, longest: int | None) -> Iterator[str]:
    context = context_length(start_weights(config))
    if longest is not None and context is not None and longest >= context:
        yield (
            f"{name} = {longest}, but the model reads at most max_position_embeddings = {context} tokens, "
            f"prompt and response together; give less than {context}"
        )


def _hard_budget_holds_the_longest(config: RunConfig) -> Iterator[str]:
    settings, (context, name) = config.learner, _smallest_context(config)
    if not settings.hard_token_budget:
        return
    longest, sum_ = _longest(config)
    if longest is None:
        yield (
            "hard_token_budget = true, but the length of prompts has no limit; add --rollout-max-prompt-len, or "
            "leave out --hard-token-budget"
        )
        return
    count = settings.micro_batch_size or 1
    needed, budget = count * longest, settings.max_tokens_per_gpu * context
    if needed > budget:
        times = f"micro_batch_size = {count} samples of {sum_} tokens = {needed}" if count > 1 else sum_
        yield (
            f"hard_token_budget: {times} tokens do not fit max_tokens_per_gpu x {name} = "
            f"{settings.max_tokens_per_gpu} x {context} = {budget}; raise --max-tokens-per-gpu to at "
            f"least {-(-needed // context)}, or shorten prompts or responses"
        )


def _smallest_context(config: RunConfig) -> tuple[int, str]:
    """The smaller context-parallel size of the actor and a separate critic, and the name of its setting."""
    actor, name = config.parallel.context_parallel_size, "context_parallel_size"
    critic = config.critic_parallel.context_parallel_size
    return (critic, f"critic_{name}") if config.num_critic_ranks and critic < actor else (actor, name)


def _longest(config: RunConfig) -> tuple[int | None, str]:
    """Tokens of the longest sequence, and the sum or setting that gives it."""
    prompt, response = config.data.rollout_max_prompt_len, config.rollout.rollout_max_response_len
    found = {}
    if prompt is not None:
        total = f"rollout_max_prompt_len + rollout_max_response_len = {prompt} + {response} = {prompt + response}"
        found[total] = prompt + response
    if (requested := config.engine.sglang_context_length) is not None:
        found[f"sglang_context_length = {requested}"] = requested
    if (read := context_length(start_weights(config))) is not None:
        found[f"max_position_embeddings = {read}"] = read
    shortest = min(found, key=lambda name: found[name], default="")
    return found.get(shortest), shortest


LENGTHS: tuple[Rule, ...] = (_responses_fit_the_context, _context_fits_the_model)
LENGTHS_OF_RUN: tuple[Rule, ...] = (_responses_fit_the_model, _hard_budget_holds_the_longest)
LENGTHS_OF_EVAL: tuple[Rule, ...] = (_evaluated_responses_fit_the_model,)
