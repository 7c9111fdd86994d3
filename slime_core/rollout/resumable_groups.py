"""Prepares groups that were generated before, and saves groups in checkpoints.

    reset_sample     removes everything that an earlier attempt generated
    prepare_group    resumes the aborted samples of a group where the generate function can, and resets the others
    dump_group, dump_prompts, load_group    a group as JSON text

Tokens that were sampled before an abort keep their log-probabilities and the versions of the weights that sampled them;
``mask_offpolicy_in_partial_rollout`` decides whether they are trained.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from typing import Any

from slime_core.generation.outcome import is_finished
from slime_core.rollout.component_router import RoutedComponent
from slime_core.rollout.staleness import oldest_version
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, Status, TokenIds

__all__ = [
    "copy_sample",
    "dump_group",
    "dump_prompts",
    "load_group",
    "oldest_group_version",
    "prepare_group",
    "reset_sample",
]

ARRAYS = {
    "tokens": TokenIds,
    "rollout_log_probs": LogProbs,
    "loss_mask": Mask,
    "rollout_top_p_token_ids": TokenIds,
    "rollout_top_p_token_offsets": TokenIds,
}
"""Fields of a sample that are lists in JSON."""


def copy_sample(sample: Sample) -> Sample:
    """A copy of ``sample`` and its containers, which a generate function may change in place without changing it."""
    return Sample(**{one.name: copy.copy(getattr(sample, one.name)) for one in fields(Sample)})


def dump_group(samples: PromptGroup, version: int) -> str | None:
    """A finished group as JSON, with the oldest version of its weights; None: JSON cannot represent a value of it."""
    try:
        return json.dumps({"version": version, "samples": [sample.to_dict() for sample in samples]})
    except (TypeError, ValueError):
        return None


def dump_prompts(given: PromptGroup, version: int) -> str:
    """A group as its source gave it, without values that JSON cannot represent; its number identifies the prompt."""
    rows = [{name: value for name, value in one.to_dict().items() if _is_json(value)} for one in given]
    return json.dumps({"version": version, "samples": rows})


def load_group(text: str) -> tuple[int, PromptGroup]:
    """The oldest version of the weights that sampled a token of the group, and its samples."""
    found = json.loads(text)
    samples = [Sample.from_dict(values) for values in found["samples"]]
    for sample in samples:
        for name, kind in ARRAYS.items():
            if getattr(sample, name) is not None:
                setattr(sample, name, kind(getattr(sample, name)))
    return oldest_group_version(samples, found["version"]), samples


def oldest_group_version(samples: PromptGroup, served: int) -> int:
    """The oldest version that sampled, or will sample, a token of a group that starts while ``served`` is served."""
    return min([served, *(oldest for oldest in map(oldest_version, samples) if oldest is not None)])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


GENERATED = (
    *("tokens", "response", "response_length", "reward", "loss_mask", "status", "weight_versions", "weight_spans"),
    *("rollout_log_probs", "rollout_routed_experts", "multimodal_train_inputs", "remove_sample"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("non_generation_time", "spec_info", "error", "failure_cause"),
)
"""Fields of a sample that generating and rewarding set."""


def reset_sample(sample: Sample) -> None:
    """Remove the response and the reward of an earlier attempt.

    A pending sample keeps what its data source gave it; only its reward is removed.
    """
    fresh = Sample()
    for name in GENERATED if sample.status is not Status.PENDING else ("reward",):
        setattr(sample, name, getattr(fresh, name))


def prepare_group(group: PromptGroup, generator: RoutedComponent, reward: RoutedComponent, *, resumes: bool) -> None:
    """Make ``group`` ready for its generate function.

    Arguments:
        resumes: aborted responses continue (``partial_rollout``), where ``generator`` can. Finished samples of the
            group keep their response, and their reward unless ``reward`` compares the samples of a group.

    One generation may have returned several samples of one ``rollout_id``. If one of them cannot stay, a single sample
    replaces them all, because the restarted generation returns all of them again. ``group`` is changed in place.
    """
    was_aborted = resumes and any(sample.status is Status.ABORTED for sample in group)
    stay = [was_aborted and _stays(sample, generator) for sample in group]
    gone = [one for one, stays in zip(group, stay, strict=True) if not stays and one.status is not Status.PENDING]
    again = {one.rollout_id for one in gone} - {None}
    stay = [stays and one.rollout_id not in again for one, stays in zip(group, stay, strict=True)]
    for sample, stays in zip(group, stay, strict=True):
        if not stays:
            reset_sample(sample)
        elif reward.takes_groups:
            sample.reward = None
    group[:] = _keep_first_of(group, again)


def _keep_first_of(group: PromptGroup, generations: set[int | None]) -> list[Sample]:
    """``group`` with only the first sample of each of ``generations``."""
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
