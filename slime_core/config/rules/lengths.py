"""Rules of lengths: prompts, responses, and the context that the model reads."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.model_config import context_length, start_weights
from slime_core.config.rules import Rule
from slime_core.config.schema import RunConfig

__all__ = ["LENGTHS", "LENGTHS_OF_EVAL", "LENGTHS_OF_RUN"]


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
