"""The rules of generating while training goes on, and of how old a sample may be when it is trained."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["ASYNC"]


def _what_is_kept_is_off_policy(config: RunConfig) -> Iterator[str]:
    fetched, bound = config.rollout.over_sampling_batch_size, config.rollout.max_staleness
    if fetched is None or bound == 0:
        return
    kept = f"over_sampling_batch_size = {fetched}"
    if config.algorithm.true_on_policy_mode:
        yield (
            f"true_on_policy_mode trains only on what the trained weights drew, and {kept} keeps groups that finish "
            "besides for later rollouts; add --max-staleness 0, with which they are drawn anew, or leave one of the "
            "two out"
        )
    if config.algorithm.keep_old_actor:
        yield (
            f"keep_old_actor keeps one copy of the weights, those published last, and {kept} keeps groups that older "
            "ones drew; for the log-probs of the weights that drew each token add --use-rollout-logprobs, and leave "
            "keep_old_actor out"
        )


def _the_bound_can_be_kept(config: RunConfig) -> Iterator[str]:
    bound, ahead = config.rollout.max_staleness, config.rollout.async_buffer_size
    if bound is None:
        return
    name = f"max_staleness = {bound}"
    yield from _between_publications(config, bound, name)
    if ahead > bound:
        yield (
            f"{name} begins no group that would be trained more than {bound} rollouts after the weights that drew it, "
            f"and async_buffer_size = {ahead} asks for {ahead}, so that {ahead - bound} of them would never be there; "
            f"give a buffer of at most {bound}, or a bound of at least {ahead}"
        )


def _between_publications(config: RunConfig, bound: int, name: str) -> Iterator[str]:
    interval, total = config.weights.update_weights_interval, config.rollout.num_rollout
    oldest = (interval or total) - 1
    if bound < oldest:
        when = f"after every {interval} rollouts" if interval else f"never, and there are num_rollout = {total}"
        yield (
            f"{name}, but update_weights_interval = {interval} publishes weights {when}: the last rollout that they "
            f"draw is trained {oldest} rollouts later; give a bound of at least {oldest}, or a shorter interval"
        )


def _more_is_begun_than_is_taken(config: RunConfig) -> Iterator[str]:
    fetched, batch = config.rollout.over_sampling_batch_size, config.rollout.rollout_batch_size
    if fetched is not None and fetched < batch:
        yield (
            f"over_sampling_batch_size = {fetched} begins fewer prompts than rollout_batch_size = {batch} takes; give "
            f"at least {batch}, or leave it out"
        )


def _ended_responses_can_go_on(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if not rollout.partial_rollout:
        return
    ahead = rollout.async_buffer_size
    ends = rollout.pause_generation_mode == "abort" or (rollout.over_sampling_batch_size is not None and not ahead)
    if not ends and rollout.generate_function == type(rollout).model_fields["generate_function"].default:
        others = "" if ahead else "--over-sampling-batch-size N, or --async-buffer-size N with "
        why = f" with async_buffer_size = {ahead}, where they go on meanwhile" if ahead else ""
        yield (
            f"partial_rollout goes on with responses that were ended before their time, and none is{why}: give "
            f"{others}--pause-generation-mode abort, or leave it out"
        )


ASYNC: tuple[Rule, ...] = (
    _what_is_kept_is_off_policy,
    _the_bound_can_be_kept,
    _more_is_begun_than_is_taken,
    _ended_responses_can_go_on,
)
