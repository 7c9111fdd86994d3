"""Every evaluation set of a run with all that decides it: its own settings, then ``eval_*``, then the run's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slime_core.config.sampling import EvalDataset
from slime_core.config.schema import RunConfig

__all__ = ["EvalSet", "eval_sets"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """One evaluation set; see :class:`~slime_core.config.sampling.EvalDataset` for what its fields mean.

    ``label_key``, ``reward_key``, ``repetition_penalty``, ``model`` and the two limits are None where there is none.
    """

    name: str
    path: Path
    n_samples: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    repetition_penalty: float | None
    max_prompt_len: int | None
    max_context_len: int | None
    input_key: str
    label_key: str | None
    metadata_key: str
    apply_chat_template: bool
    generate_function: str
    rm_type: str
    reward_key: str | None
    pass_threshold: float
    model: str | None

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that is kept; None: all are."""
        beside_a_token = None if self.max_context_len is None else self.max_context_len - 1
        return min((most for most in (self.max_prompt_len, beside_a_token) if most is not None), default=None)


def eval_sets(config: RunConfig) -> tuple[EvalSet, ...]:
    """The sets of ``eval_prompt_data``, then those of ``eval_datasets``."""
    pairs = (EvalDataset(name=name, path=path) for name, path in config.eval.eval_prompt_data)
    return tuple(_resolved(one, config) for one in (*pairs, *config.eval.eval_datasets))


def _resolved(own: EvalDataset, config: RunConfig) -> EvalSet:
    of_all, rollout, data = config.eval, config.rollout, config.data
    temperature = _first(own.temperature, of_all.eval_temperature)
    # At temperature 0 nothing is left to choose from.
    greedy = temperature == 0
    return EvalSet(
        name=own.name,
        path=own.path,
        n_samples=_first(own.n_samples_per_eval_prompt, of_all.n_samples_per_eval_prompt),
        temperature=temperature,
        top_p=1.0 if greedy else _first(own.top_p, of_all.eval_top_p, rollout.rollout_top_p),
        top_k=-1 if greedy else _first(own.top_k, of_all.eval_top_k, rollout.rollout_top_k),
        max_response_len=_first(own.max_response_len, of_all.eval_max_response_len, rollout.rollout_max_response_len),
        min_new_tokens=_first(own.min_new_tokens, of_all.eval_min_new_tokens),
        stop=_first(own.stop, rollout.rollout_stop),
        stop_token_ids=_first(own.stop_token_ids, rollout.rollout_stop_token_ids),
        repetition_penalty=own.repetition_penalty,
        max_prompt_len=own.max_prompt_len or of_all.eval_max_prompt_len,
        max_context_len=own.max_context_len or of_all.eval_max_context_len,
        input_key=own.input_key or of_all.eval_input_key or data.input_key,
        label_key=_or_none(own.label_key or of_all.eval_label_key or data.label_key),
        metadata_key=own.metadata_key or data.metadata_key,
        apply_chat_template=_first(own.apply_chat_template, data.apply_chat_template),
        generate_function=own.generate_function or rollout.generate_function,
        rm_type=own.rm_type or rollout.rm_type,
        reward_key=_or_none(own.reward_key or of_all.eval_reward_key or rollout.reward_key),
        pass_threshold=_first(own.pass_threshold, of_all.eval_pass_threshold),
        model=own.model,
    )


def _first(*values: T | None) -> T:
    """The first that is given; the last always is."""
    return next(value for value in values if value is not None)


def _or_none(name: str | None) -> str | None:
    """A set says ``none`` where what the run has is to be without effect."""
    return None if name == "none" else name
