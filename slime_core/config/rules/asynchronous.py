"""The rules of generating while training goes on, and of how old a sample may be when it is trained."""

from __future__ import annotations

from collections.abc import Iterator

from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig

__all__ = ["ASYNC"]


def _both_sides_work_at_once(config: RunConfig) -> Iterator[str]:
    if not config.rollout.async_buffer_size:
        return
    ahead = f"async_buffer_size = {config.rollout.async_buffer_size}"
    if config.cluster.colocate:
        yield (
            f"{ahead} generates while the learner trains, and with colocate engines and learner take turns on the same "
            "devices, so that nothing can be generated meanwhile; give 0, or leave colocate out"
        )
    if not config.debug.generates:
        yield f"{ahead} has no effect where rollouts are read, because nothing is generated; give 0"
    if not config.debug.trains:
        yield (
            f"{ahead} has no effect with debug_rollout_only = true: nothing trains that generation could go beside; "
            "give 0"
        )
    if (path := config.custom.rollout_function_path) is not None:
        yield (
            f"{ahead} begins single groups ahead, and rollout_function_path = {path} makes whole rollouts when it is "
            "called; give 0 (the function may keep generating by itself), or leave the function out"
        )
    elif (name := config.rollout.rollout_source) is not None:
        yield (
            f"{ahead} begins single groups ahead, and rollout_source = {name} makes whole rollouts when it is asked; "
            "give 0 (it may keep generating by itself), or leave --rollout-source out"
        )


def _what_is_ahead_is_off_policy(config: RunConfig) -> Iterator[str]:
    count, ahead = config.rollout.async_buffer_size, f"async_buffer_size = {config.rollout.async_buffer_size}"
    if count and config.algorithm.true_on_policy_mode:
        yield (
            f"true_on_policy_mode trains only on what the trained weights drew, and {ahead} has weights r draw what is "
            f"trained by weights up to r + {count}; give 0, or leave the mode out"
        )
    if count and config.algorithm.keep_old_actor:
        yield (
            f"keep_old_actor keeps one copy of the weights, those published last, and {ahead} trains what older ones "
            "drew; for the log-probs of the weights that drew each token add --use-rollout-logprobs, and leave "
            "keep_old_actor out"
        )


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
    if not (config.debug.generates and config.debug.trains):
        yield f"{name} has no effect where one half of the loop runs alone; add --max-staleness none"
        return
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


def _stale_samples_have_a_bound(config: RunConfig) -> Iterator[str]:
    choice, settings = config.rollout.stale_samples, config.algorithm
    if config.rollout.max_staleness is None:
        if choice != type(config.rollout).model_fields["stale_samples"].default:
            yield (
                f"stale_samples = {choice} has no effect without max_staleness, because no sample is too old; add "
                "--max-staleness N, or leave it out"
            )
        return
    corrects = settings.corrections or settings.use_rollout_logprobs or config.custom.custom_tis_function_path
    if choice == "correct" and not corrects:
        yield (
            "stale_samples = correct trains samples above max_staleness, and nothing weighs them by how likely they "
            "are today; add --corrections tis, or --use-rollout-logprobs, or choose requeue or evict"
        )


def _something_is_in_flight(config: RunConfig) -> Iterator[str]:
    mode = config.rollout.pause_generation_mode
    if mode != "retract" and not config.rollout.async_buffer_size:
        yield (
            f"pause_generation_mode = {mode} has no effect with async_buffer_size = 0: nothing is in flight when "
            "weights are published; add --async-buffer-size 1, or leave it out"
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
    if rollout.mask_offpolicy_in_partial_rollout and not rollout.partial_rollout:
        yield (
            "mask_offpolicy_in_partial_rollout masks what was drawn before a response was taken up again, and without "
            "partial_rollout none is; add --partial-rollout, or leave it out"
        )
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
    if rollout.max_staleness == 0:
        yield (
            "partial_rollout trains responses that older weights began, and max_staleness = 0 trains none of these; "
            "give a bound of at least 1, or leave one of the two out"
        )


def _failed_samples_are_tried_again(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    count, default = rollout.failed_sample_retries, type(rollout).model_fields["failed_sample_retries"].default
    if count != default and rollout.failed_samples != "retry":
        yield (
            f"failed_sample_retries = {count} has no effect with failed_samples = {rollout.failed_samples}, which "
            "generates none again; add --failed-samples retry, or leave it out"
        )


_HALVES = "debug_rollout_only debug_train_only load_debug_rollout_data"

ASYNC: dict[Rule, str] = {
    _both_sides_work_at_once: f"async_buffer_size colocate rollout_function_path rollout_source {_HALVES}",
    _what_is_ahead_is_off_policy: "async_buffer_size true_on_policy_mode keep_old_actor",
    _what_is_kept_is_off_policy: "over_sampling_batch_size max_staleness true_on_policy_mode keep_old_actor",
    _the_bound_can_be_kept: f"max_staleness async_buffer_size update_weights_interval num_rollout {_HALVES}",
    _stale_samples_have_a_bound: (
        "stale_samples max_staleness corrections use_rollout_logprobs custom_tis_function_path"
    ),
    _something_is_in_flight: "pause_generation_mode async_buffer_size",
    _more_is_begun_than_is_taken: "over_sampling_batch_size rollout_batch_size",
    _failed_samples_are_tried_again: "failed_sample_retries failed_samples",
    _ended_responses_can_go_on: (
        "partial_rollout mask_offpolicy_in_partial_rollout over_sampling_batch_size pause_generation_mode "
        "generate_function max_staleness async_buffer_size"
    ),
}
"""Rule -> the settings it reads."""
