"""Samples that were begun before: what is taken from them when they are handed out again, and how they go on.

    anew      nothing of an earlier try is left
    prepare   a group as its generate function wants it, which may go on with what was ended
    add       a response goes on from its tokens
    fail      nobody answered

Tokens that were drawn before an interruption keep their log-probabilities and the versions of the weights that drew
them; whether they are trained is a setting (``mask_offpolicy_in_partial_rollout``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slime_core.errors import EngineError, RequestFailed
from slime_core.rollout.choice import Chosen
from slime_core.rollout.engines.generation import Generation, SamplingParams
from slime_core.rollout.engines.speculation import added
from slime_core.rollout.nucleus import joined, keep, kept_of
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, SpecInfo, Status, TokenIds

__all__ = ["FINISHED", "UNANSWERED", "add", "anew", "fail", "is_finished", "left_to_draw", "prepare", "unfinished"]

FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""How a response ended -> where its sample stands."""

UNANSWERED = "engine"
"""Cause of a failure: no engine has answered."""

GENERATED = (
    *("tokens", "response", "response_length", "reward", "loss_mask", "status", "weight_versions", "weight_spans"),
    *("rollout_log_probs", "rollout_routed_experts", "multimodal_train_inputs", "remove_sample"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("non_generation_time", "spec_info", "error", "failure_cause"),
)
"""Fields of a sample that say what became of it."""


def is_finished(sample: Sample) -> bool:
    """Whether its response is whole."""
    return sample.status in (Status.COMPLETED, Status.TRUNCATED)


def anew(sample: Sample) -> None:
    """Make ``sample`` ready to be generated: nothing of an earlier answer is left, and no reward.

    A sample that is still pending keeps what its data source gave it; only its reward goes.
    """
    fresh = Sample()
    for name in GENERATED if sample.status is not Status.PENDING else ("reward",):
        setattr(sample, name, getattr(fresh, name))


def fail(sample: Sample, failure: EngineError) -> None:
    """``sample`` has no response, because of ``failure``; it is not trained on."""
    sample.status, sample.error = Status.FAILED, str(failure)
    sample.failure_cause = failure.cause if isinstance(failure, RequestFailed) else UNANSWERED


def prepare(group: PromptGroup, generator: Chosen, reward: Chosen, *, resumes: bool) -> None:
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
            anew(sample)
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


def _stays(sample: Sample, generator: Chosen) -> bool:
    if is_finished(sample):
        return generator.resumes or not generator.takes_groups
    return generator.resumes and sample.status is Status.ABORTED and sample.response_length > 0


def left_to_draw(sample: Sample, sampling: SamplingParams) -> SamplingParams | None:
    """How the rest of an ended response is drawn; None: it has as many tokens as it may."""
    have = sample.response_length
    if have >= sampling.max_new_tokens:
        return None
    fewest = max(0, sampling.min_new_tokens - have)
    return replace(sampling, max_new_tokens=sampling.max_new_tokens - have, min_new_tokens=fewest)


def add(sample: Sample, answer: Generation, response: str, *, masks: bool) -> None:
    """Append ``answer`` to an ended response.

    Arguments:
        response: all of it as text.
        masks: the tokens so far are not trained.
    """
    have, more = sample.response_length, list(answer.token_ids)
    before = [0] * have if masks else list(sample.loss_mask or [1] * have)
    sample.loss_mask = Mask([*before, *[1] * len(more)]) if masks or sample.loss_mask is not None else None
    sample.tokens = TokenIds([*sample.tokens, *more])
    sample.rollout_log_probs = LogProbs([*(sample.rollout_log_probs or ()), *answer.log_probs])
    sample.response, sample.response_length = response, have + len(more)
    keep(sample, joined([(kept_of(sample), have), (answer.kept, len(more))]))
    drawn_by, spans = (answer.weight_versions, answer.weight_spans) if more else ((), ())
    sample.weight_versions = list(dict.fromkeys([*sample.weight_versions, *drawn_by]))
    sample.weight_spans = [*sample.weight_spans, *((name, have + start, have + end) for name, start, end in spans)]
    sample.rollout_routed_experts = _routes(sample, answer)
    sample.spec_info = added(sample.spec_info, answer.spec_info) or SpecInfo()
    sample.status = FINISHED[answer.finish_reason]


def _routes(sample: Sample, answer: Generation) -> object:
    """Those of the tokens so far as they were taken then, and those of what was added."""
    before, all_of_it = sample.rollout_routed_experts, answer.routed_experts
    if before is None or all_of_it is None:
        return all_of_it if before is None else before
    return np.concatenate([before, all_of_it[len(before) :]])


def unfinished(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Those that have not begun, and those that were ended."""
    left = [sample for sample in samples if not is_finished(sample)]
    return [one for one in left if not one.response_length], [one for one in left if one.response_length]
