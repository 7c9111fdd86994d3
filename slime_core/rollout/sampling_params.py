"""How responses are sampled: for training, for an evaluation set, and for a row that wants its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from slime_core.config.eval_sets import EvalSet
from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.prompts.row_sampling import own_sampling
from slime_core.types import Sample

__all__ = ["apply_row_sampling", "eval_sampling", "train_sampling", "truncates"]

NAMED = frozenset(one.name for one in fields(SamplingParams)) - {"extra", "max_kept"}


def truncates(rollout: RolloutConfig) -> bool:
    """Whether top-p or top-k leaves something out to draw from."""
    return rollout.rollout_top_p < 1 or rollout.rollout_top_k != -1


def train_sampling(config: RunConfig, *, end_ids: tuple[int, ...]) -> SamplingParams:
    """What the settings of ``[rollout]`` ask for; ``end_ids``, those of the model, end a response too."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_kept=rollout.rollout_max_kept_tokens,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=(*rollout.rollout_stop_token_ids, *end_ids),
    )


def eval_sampling(one: EvalSet, *, end_ids: tuple[int, ...]) -> SamplingParams:
    """What an evaluation set asks for."""
    penalty = one.repetition_penalty
    return SamplingParams(
        temperature=one.temperature,
        top_p=one.top_p,
        top_k=one.top_k,
        max_new_tokens=one.max_response_len,
        min_new_tokens=one.min_new_tokens,
        stop=one.stop,
        stop_token_ids=(*one.stop_token_ids, *end_ids),
        max_kept=None,  # nothing is trained on them
        extra={} if penalty is None else {"repetition_penalty": penalty},
    )


def apply_row_sampling(
    sample: Sample, context: GenerateContext, sampling: SamplingParams
) -> tuple[GenerateContext, SamplingParams]:
    """``context`` and ``sampling`` with what the sample's row wants instead, as a generate function gets them; see
    :mod:`slime_core.prompts.row_sampling`.

    Ids of the row that end a response do so besides those of ``sampling``, among which are the model's.

    Raises:
        DataError: it wants what does not exist, or what cannot be trained on.
    """
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    where = f"sample {sample.index} of group {sample.group_index}"
    own = own_sampling(sample.metadata, drawn=None if context.evaluation else drawn, where=where)
    sampling = _with(sampling, own) if own else sampling
    return replace(context, max_response_len=sampling.max_new_tokens), sampling


def _with(sampling: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    named = {key: value for key, value in own.items() if key in NAMED}
    extra = {key: value for key, value in own.items() if key not in NAMED}
    if "stop_token_ids" in named:
        named["stop_token_ids"] = (*named["stop_token_ids"], *sampling.stop_token_ids)
    return replace(sampling, **named, extra={**sampling.extra, **extra})
