"""Prompt groups as text, for a checkpoint of a run that generates ahead of training."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from typing import Any

from slime_core.rollout.staleness import oldest_version
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, TokenIds

__all__ = ["copy_sample", "dump_group", "dump_prompts", "load_group", "oldest_group_version"]

ARRAYS = {
    "tokens": TokenIds,
    "rollout_log_probs": LogProbs,
    "loss_mask": Mask,
    "rollout_top_p_token_ids": TokenIds,
    "rollout_top_p_token_offsets": TokenIds,
}
"""Fields of a sample that JSON carries as lists."""


def copy_sample(sample: Sample) -> Sample:
    """``sample`` as it is now: what a generate function will fill, or change in place, is its own."""
    return Sample(**{one.name: copy.copy(getattr(sample, one.name)) for one in fields(Sample)})


def dump_group(samples: PromptGroup, version: int) -> str | None:
    """A finished group, whole, and the version that was served when it was begun; None: JSON cannot carry it."""
    try:
        return json.dumps({"version": version, "samples": [sample.to_dict() for sample in samples]})
    except (TypeError, ValueError):
        return None


def dump_prompts(given: PromptGroup, version: int) -> str:
    """A group as its source gave it, without what JSON cannot carry: the source finds the prompt by its number."""
    rows = [{name: value for name, value in one.to_dict().items() if _is_json(value)} for one in given]
    return json.dumps({"version": version, "samples": rows})


def load_group(text: str) -> tuple[int, PromptGroup]:
    """The oldest version that had to do with a group, and its samples."""
    found = json.loads(text)
    samples = [Sample.from_dict(values) for values in found["samples"]]
    for sample in samples:
        for name, kind in ARRAYS.items():
            if getattr(sample, name) is not None:
                setattr(sample, name, kind(getattr(sample, name)))
    return oldest_group_version(samples, found["version"]), samples


def oldest_group_version(samples: PromptGroup, served: int) -> int:
    """The oldest version that drew a token of a group which begins, or goes on, while ``served`` is served."""
    return min([served, *(oldest for oldest in map(oldest_version, samples) if oldest is not None)])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
