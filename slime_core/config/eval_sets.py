"""Every evaluation set of a run with all that decides it: its own settings, then ``eval_*``, then the run's; and the
rules of evaluations.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from slime_core.config.choices import reward_terms
from slime_core.config.model_config import context_length, start_weights
from slime_core.config.rules import Rule
from slime_core.config.sampling import EvalDataset
from slime_core.config.schema import RunConfig
from slime_core.config.secrets import is_key
from slime_core.errors import nearest

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
        before_a_token = None if self.max_context_len is None else self.max_context_len - 1
        return min((most for most in (self.max_prompt_len, before_a_token) if most is not None), default=None)


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


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The name of an environment variable."""


def _sets_fit_the_model(config: RunConfig) -> Iterator[str]:
    """Checks the lengths that a set itself gives; the lengths of the run are checked in ``rules/lengths.py``."""
    own = {one.name: one for one in config.eval.eval_datasets}
    # An auxiliary model may read further.
    for one in (each for each in eval_sets(config) if each.model is None):
        context = config.engine.sglang_context_length or context_length(start_weights(config))
        given = own.get(one.name)
        if context is None:
            return
        if given is not None and (given.max_response_len or 0) >= context:
            yield (
                f"evaluation set {one.name}: max_response_len = {one.max_response_len}, but the model reads at most "
                f"{context} tokens, prompt and response together; give less than {context}"
            )
        if (one.max_context_len or 0) > context:
            yield (
                f"evaluation set {one.name}: prompt and response may have {one.max_context_len} tokens "
                f"(max_context_len), but the model reads at most {context}; give at most {context}, or leave it out"
            )


def _lengths_agree(config: RunConfig) -> Iterator[str]:
    for one in eval_sets(config):
        if one.min_new_tokens > one.max_response_len:
            yield (
                f"evaluation set {one.name}: min_new_tokens = {one.min_new_tokens} is above the longest response, "
                f"max_response_len = {one.max_response_len}; give at most {one.max_response_len}"
            )
        if one.max_context_len is not None and one.max_context_len < 2:
            yield f"evaluation set {one.name}: max_context_len = 1 has no room for a prompt and a token; give 2 or more"


def _choices_have_an_effect(config: RunConfig) -> Iterator[str]:
    """At temperature 0 the likeliest token is taken, whatever top_p and top_k are."""
    greedy = {one.name for one in eval_sets(config) if one.temperature == 0}
    for one in config.eval.eval_datasets:
        for key, value in (("top_p", one.top_p), ("top_k", one.top_k)):
            if value is not None and one.name in greedy:
                yield (
                    f"evaluation set {one.name}: {key} = {value} has no effect at temperature 0, which always takes "
                    "the likeliest token; give it a temperature, or leave one of them out"
                )
    if greedy and len(greedy) == len(config.eval.files):
        for key, value in (("eval_top_p", config.eval.eval_top_p), ("eval_top_k", config.eval.eval_top_k)):
            if value is not None:
                yield (
                    f"{key} = {value} has no effect: every evaluation set is sampled at temperature 0, which always "
                    "takes the likeliest token; add --eval-temperature, or leave it out"
                )


def _a_model_has_a_name_or_an_address(config: RunConfig) -> Iterator[str]:
    served = [model.name for model in config.engine.engine_models]
    for one in config.eval.eval_datasets:
        if one.model is not None and "/" in one.model and not one.model.startswith(("http://", "https://")):
            yield (
                f"evaluation set {one.name}: model = {one.model!r}; accepted: the name of an auxiliary model of the "
                "run, or the address of an SGLang server, such as http://127.0.0.1:30000"
            )
        elif one.model is not None and "/" not in one.model and one.model not in served:
            yield (
                f"evaluation set {one.name}: model = {one.model!r}, but the auxiliary models of the run are: "
                f"{', '.join(served) or 'none'}{nearest(one.model, served)}; name one of them, or add it as a table "
                "[[engine.engine_models]]"
            )


def _keys_of_models_are_set(config: RunConfig) -> Iterator[str]:
    for one in (each for each in config.eval.eval_datasets if each.model_key_env is not None):
        name = str(one.model_key_env)
        if "/" not in (one.model or ""):
            yield (
                f"evaluation set {one.name}: model_key_env = {name!r} has no effect without the address of a server; "
                "give model = 'http://HOST:PORT', or leave it out. Models of the run have its key"
            )
        elif not VARIABLE.fullmatch(name):
            yield (
                f"evaluation set {one.name}: model_key_env is no name of an environment variable; accepted is the "
                "name, such as JUDGE_KEY, and never the key itself"
            )
        elif not is_key(os.environ.get(name)):
            yield (
                f"evaluation set {one.name}: model_key_env names the environment variable {name}, which holds no key: "
                "one line of ASCII without spaces. Export it before the run"
            )


def _eval_names_differ(config: RunConfig) -> Iterator[str]:
    counts = Counter(name for name, _ in config.eval.files)
    for name in (name for name, count in counts.items() if count > 1):
        yield (
            f"eval_prompt_data: {counts[name]} files are named {name!r}; their metrics would have the same names; "
            "give each its own"
        )


def _engines_that_evaluate_fill_their_gpus(config: RunConfig) -> Iterator[str]:
    gpus, size = config.eval.eval_num_gpus, config.eval.eval_num_gpus_per_engine
    if gpus is None:
        return
    each = size or config.cluster.rollout_num_gpus_per_engine
    if gpus % each:
        name = "rollout_num_gpus_per_engine" if size is None else "eval_num_gpus_per_engine"
        yield (
            f"eval_num_gpus = {gpus} is no multiple of {name} = {each}. Change --eval-num-gpus to a multiple, or "
            "give --eval-num-gpus-per-engine, the devices of one evaluation engine"
        )


def _reward_sums_can_be_read(config: RunConfig) -> Iterator[str]:
    sums = {"rm_type": config.rollout.rm_type}
    sums |= {f"evaluation set {one.name}: rm_type": one.rm_type or "" for one in config.eval.eval_datasets}
    for where, written in sums.items():
        try:
            reward_terms(written)
        except ValueError as error:
            yield f"{where} = {error}"


EVALUATION: tuple[Rule, ...] = (
    _eval_names_differ,
    _reward_sums_can_be_read,
    _sets_fit_the_model,
    _lengths_agree,
    _choices_have_an_effect,
    _a_model_has_a_name_or_an_address,
    _keys_of_models_are_set,
    _engines_that_evaluate_fill_their_gpus,
)
