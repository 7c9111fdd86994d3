"""Samples that were begun before: what is taken from them when they are handed out again.

    anew      nothing of an earlier try is left
    prepare   a group as its generate function wants it, which may go on with what was ended

Tokens that were drawn before an interruption keep their log-probabilities and the versions of the weights that drew
them; whether they are trained is a setting (``mask_offpolicy_in_partial_rollout``).
"""

from __future__ import annotations

from slime_core.generation.outcome import is_finished
from slime_core.rollout.component_router import RoutedComponent
from slime_core.types import PromptGroup, Sample, Status

__all__ = ["prepare_group", "reset_sample"]

GENERATED = (
    *("tokens", "response", "response_length", "reward", "loss_mask", "status", "weight_versions", "weight_spans"),
    *("rollout_log_probs", "rollout_routed_experts", "multimodal_train_inputs", "remove_sample"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("non_generation_time", "spec_info", "error", "failure_cause"),
)
"""Fields of a sample that say what became of it."""


def reset_sample(sample: Sample) -> None:
    """Make ``sample`` ready to be generated: nothing of an earlier answer is left, and no reward.

    A sample that is still pending keeps what its data source gave it; only its reward goes.
    """
    fresh = Sample()
    for name in GENERATED if sample.status is not Status.PENDING else ("reward",):
        setattr(sample, name, getattr(fresh, name))


def prepare_group(group: PromptGroup, generator: RoutedComponent, reward: RoutedComponent, *, resumes: bool) -> None:
    """Make ``group`` ready for its generate function.

    Arguments:
        resumes: responses that were ended go on (``partial_rollout``), where ``generator`` can; what is finished beside
            them stays as it is, with its reward unless that compares the samples of a group.

    Where one of the siblings that a generation fanned out into does not stay, all of them give way to one sample: the
    generation that begins anew makes all of them again. ``group`` is changed in place.
    """
    was_ended = resumes and any(sample.status is Status.ABORTED for sample in group)
    stay = [was_ended and _stays(sample, generator) for sample in group]
    gone = [one for one, stays in zip(group, stay, strict=True) if not stays and one.status is not Status.PENDING]
    again = {one.rollout_id for one in gone} - {None}
    stay = [stays and one.rollout_id not in again for one, stays in zip(group, stay, strict=True)]
    for sample, stays in zip(group, stay, strict=True):
        if not stays:
            reset_sample(sample)
        elif reward.takes_groups:
            sample.reward = None
    group[:] = _one_of_each(group, again)


def _one_of_each(group: PromptGroup, generations: set[int | None]) -> list[Sample]:
    """``group`` with the first sample alone of each of ``generations``, of which nothing has come yet."""
    kept, seen = [], set()
    for sample in group:
        if sample.rollout_id not in generations:
            kept.append(sample)
        elif sample.rollout_id not in seen:
            seen.add(sample.rollout_id)
            sample.rollout_id = None
            kept.append(sample)
    return kept


def _stays(sample: Sample, generator: RoutedComponent) -> bool:
    if is_finished(sample):
        return generator.resumes or not generator.takes_groups
    return generator.resumes and sample.status is Status.ABORTED and sample.response_length > 0
