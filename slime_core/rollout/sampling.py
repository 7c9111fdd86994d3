"""How responses are sampled: for training, and for an evaluation."""

from __future__ import annotations

from dataclasses import replace

from slime_core.config.schema import RunConfig
from slime_core.rollout.client import SamplingParams

__all__ = ["eval_sampling", "train_sampling"]


def train_sampling(config: RunConfig, *, end_of_sequence: int | None) -> SamplingParams:
    """What the settings of ``[rollout]`` ask for; the tokenizer's end of sequence ends a response too."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=(*rollout.rollout_stop_token_ids, *(() if end_of_sequence is None else (end_of_sequence,))),
    )


def eval_sampling(config: RunConfig, *, end_of_sequence: int | None) -> SamplingParams:
    """The same with what ``[eval]`` says; at temperature 0 nothing is left to choose from."""
    chosen = config.eval
    greedy = chosen.eval_temperature == 0
    sampling = train_sampling(config, end_of_sequence=end_of_sequence)
    return replace(
        sampling,
        temperature=chosen.eval_temperature,
        max_new_tokens=chosen.eval_max_response_len or config.rollout.rollout_max_response_len,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=-1 if greedy else sampling.top_k,
    )
