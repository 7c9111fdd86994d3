"""Sections [data], [rollout] and [eval]: prompts, how responses are generated and rewarded, evaluations.

``rm_type``: the name of one reward model, or a weighted sum of several, such as ``0.7*math + 0.3*dapo:acc``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from slime_core.config.engines import EngineGroup
from slime_core.config.options import NO_ENGINES, ONE_HALF, PROMPT_FILES, AtMost, CheckedIfGiven, Conflicts, Needs
from slime_core.config.section import (
    FractionAboveZero,
    MinusOne,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    rejected,
)

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*?"
_TERM = re.compile(
    r"(?P<weight>[+-]?\s*(?:\d+(?:\.\d*)?|\.\d+))\s*\*\s*"
    rf"(?:(?P<qualified>{_NAME}:{_NAME}):(?P<its_key>[^\s:*]*?)|(?P<name>{_NAME})(?::(?P<key>[^\s:*]+?))?)\s*"
)
_BETWEEN = re.compile(r"(?<=[^\s+-])\s*(?=[+-]\s*[\d.]+\s*\*)")


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One part of a sum.

    Example: ``0.3*dapo:acc`` is ``RewardTerm(0.3, "dapo", "acc")``, and ``0.3*acme:dapo:acc`` is
    ``RewardTerm(0.3, "acme:dapo", "acc")``.

    Arguments:
        weight: factor of the part's reward.
        name: the reward model, or ``plugin:model``.
        key: name of the number that counts; None if the reward is a plain number.
    """

    weight: float
    name: str
    key: str | None = None

    def __str__(self) -> str:
        is_qualified = ":" in self.name
        return f"{self.name}:{self.key or ''}" if is_qualified or self.key is not None else self.name


def reward_terms(written: str) -> tuple[RewardTerm, ...] | None:
    """Return the parts of a sum, in order, or None for the name of one reward model.

    Raises:
        ValueError: ``written`` is neither.
    """
    if "*" not in written:
        return None
    matches = [_TERM.fullmatch(part) for part in _BETWEEN.split(written.strip())]
    terms = [_term(match) for match in matches if match]
    if len(terms) < len(matches):
        raise ValueError(
            f"{written!r} is not a sum of reward models; accepted: WEIGHT*NAME+WEIGHT*NAME, such as '0.7*math+0.3*f1', "
            "or WEIGHT*NAME:KEY for one of several numbers, such as '0.3*dapo:acc'; if several plugins offer NAME, "
            "WEIGHT*PLUGIN:NAME:KEY or WEIGHT*PLUGIN:NAME:"
        )
    if len({str(term) for term in terms}) < len(terms):
        raise ValueError(f"{written!r} names a part twice; add up its weights")
    return tuple(terms)


def _term(match: re.Match[str]) -> RewardTerm:
    weight = float("".join(match["weight"].split()))
    return RewardTerm(weight, match["qualified"] or match["name"], match["its_key"] or match["key"] or None)


def with_reward_names(written: str, name_of: Callable[[str], str]) -> str:
    """Return the text of ``rm_type`` with the name of each reward model replaced by ``name_of(name)``."""

    def replaced(part: str) -> str:
        match = _TERM.fullmatch(part)
        if match is None:
            return part
        term = _term(match)
        return f"{match['weight']}*{replace(term, name=name_of(term.name))}"

    return "".join(map(replaced, _BETWEEN.split(written.strip()))) if "*" in written else name_of(written)


def _readable(written: str) -> str:
    try:
        reward_terms(written)
    except ValueError as error:
        raise rejected(str(error)) from None
    return written


RewardSum = Annotated[Name, AfterValidator(_readable)]
"""The text of ``rm_type``."""


def reward_names(written: str) -> tuple[str, ...]:
    """Return the reward models that ``rm_type`` names, each once; ``written`` itself if it cannot be read."""
    try:
        terms = reward_terms(written)
    except ValueError:
        terms = None
    return (written,) if terms is None else tuple(dict.fromkeys(term.name for term in terms))


TwoOrMore = Annotated[int, Field(ge=2)]
"""A number of tokens to choose from (a single token has probability 1 and teaches nothing), or of a prompt and its
response."""

RESERVED_ARGUMENTS = frozenset(
    {
        *("conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)
"""Arguments of ``apply_chat_template`` in transformers that are not variables of a template."""


def _template_arguments(text: str) -> str:
    arguments = _object(text, example='{"enable_thinking": false}')
    if reserved := sorted(RESERVED_ARGUMENTS & arguments.keys()):
        raise rejected(
            f"found {text!r}, but the run sets {', '.join(reserved)} for each prompt; accepted: variables of the "
            "template, such as enable_thinking"
        )
    return text


def _multimodal_keys(text: str) -> str:
    example = '{"image": "images"}'
    if not all(isinstance(field, str) for field in _object(text, example=example).values()):
        raise rejected(f"found {text!r}; accepted: a JSON object from kinds to the fields that hold them, as {example}")
    return text


def _object(text: str, *, example: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise rejected(f"found {text!r}; accepted: a JSON object, as {example}")
    return value


TemplateArguments = Annotated[Name, AfterValidator(_template_arguments)]
MultimodalKeys = Annotated[Name, AfterValidator(_multimodal_keys)]


class RolloutConfig(Section):
    """Generation and rewards of responses."""

    num_rollout: PositiveInt = 200
    """Number of rollouts. Each is generated, trained on and published once."""
    rollout_batch_size: Annotated[PositiveInt, AtMost("over_sampling_batch_size")] = 32
    """Prompts per rollout."""
    n_samples_per_prompt: PositiveInt = 8
    """Responses per prompt; together they form a prompt group."""
    rollout_temperature: PositiveFloat = 1.0
    """Sampling temperature, by which the learner also divides its logits."""
    rollout_top_p: FractionAboveZero = 1.0
    """Nucleus sampling: keep the likeliest tokens up to this probability mass. 1: all.

    The engine records the kept tokens of each position, and the learner computes log-probs over those tokens.
    """
    rollout_top_k: MinusOne | TwoOrMore = -1
    """Keep the k likeliest tokens; log-probs as for rollout_top_p. -1: all."""
    rollout_max_kept_tokens: TwoOrMore = 64
    """Maximum tokens that rollout_top_p keeps if rollout_top_k is not set.

    The engine returns this many for each position, about 30 bytes each. Evaluations have no such limit.
    """
    rollout_max_response_len: PositiveInt = 1024
    """Maximum tokens of a response; longer ones are truncated."""
    rollout_stop: tuple[Name, ...] = ()
    """Texts that end a response. Empty: only the end-of-sequence token ends it."""
    rollout_stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Token ids that end a response, in addition to the tokenizer's end-of-sequence token."""
    rollout_source: Annotated[
        Name | None,
        Conflicts("load_debug_rollout_data", part="rollouts", because="the file replaces generated rollouts"),
    ] = None
    """Component (kind rollout_source) that makes complete rollouts. None: generate_function makes each group."""
    generate_function: Name = "single_turn"
    """Component (kind generate_function) that turns a prompt into a response."""
    max_turns: Annotated[int, Field(ge=1)] | None = None
    """Maximum turns of the model in one conversation, for generate functions that hold conversations. None: the
    generate function decides."""
    rm_type: RewardSum = "exact_match"
    """Component (kind reward_model) that rewards responses, or a weighted sum: 0.7*math+0.3*f1."""
    reward_key: Name | None = None
    """Name of the number that trains, for reward models that return several named numbers. None: the reward is one
    number."""
    log_passrate: bool = False
    """Log pass@k of training rollouts as rollout/pass@K: the estimated probability that one of k responses to a prompt
    reaches eval_pass_threshold."""
    rm_model: Name | None = None
    """Name of the auxiliary model (engine_models) that reward models call. None: no model."""
    sample_transforms: tuple[Name, ...] = ()
    """Components (kind sample_transform) that keep, drop, mask or reshape finished groups, in order. Empty: none.

    Dropped groups are counted by reason and replaced by groups of other prompts. Evaluations are not transformed.
    """
    rollout_max_refills: NonNegativeInt = 100
    """Rounds of new prompts that may replace dropped groups before the run ends. 0: train on the remaining groups."""
    over_sampling_batch_size: PositiveInt | None = None
    """Over-sampling: prompts to start at once when groups are missing, at least rollout_batch_size. None: as many as
    are missing.

    The rollout takes the groups that finish first. Other finished groups wait for the next rollout; unfinished ones are
    aborted and requeued, unless generation runs ahead (async_buffer_size).
    """
    partial_rollout: Annotated[
        bool,
        Conflicts("max_staleness", equals=0, because="older weights sampled the first tokens of a resumed response"),
        Needs(
            "over_sampling_batch_size",
            "async_buffer_size",
            unless="generate_function",
            because="otherwise no response is aborted",
        ),
    ] = False
    """Resume aborted responses from their tokens. False: restart them.

    Generate functions without support for it restart unfinished responses; single_turn supports it.
    """
    mask_offpolicy_in_partial_rollout: Annotated[
        bool, Needs("partial_rollout", because="without it no response is resumed")
    ] = False
    """Train only the tokens that a response sampled after it was resumed."""
    failed_samples: Literal["drop_sample", "drop_group", "retry"] = "drop_sample"
    """Treatment of a group with a sample that failed in generation or reward. Failed samples are never trained on.

    drop_sample: train on the other samples of the group, with group statistics over these. drop_group: replace the
    group by another prompt. retry: generate the sample again unless it was refused (4xx), then drop it.
    """
    failed_sample_retries: Annotated[PositiveInt, Needs("failed_samples", equals="retry")] = 2
    """Maximum retries of a failed sample, with failed_samples = retry."""
    reward_num_workers: PositiveInt | None = None
    """Processes that score responses. Each can have several calls in flight that wait.

    None: one for two cores of the sampler's machine, 2 to 16. As many more repeat the calls of a process that died.
    """
    reward_timeout_s: PositiveFloat = 30.0
    """Time limit for scoring a response, in seconds. Beyond it the process is killed, and only that sample fails."""
    reward_memory_gib: PositiveFloat = 4.0
    """Memory limit of a process that scores responses, in GiB. Beyond it the process is killed, and only the sample at
    fault fails."""
    async_buffer_size: Annotated[
        NonNegativeInt,
        AtMost("max_staleness", because="samples become as stale as rollouts are ahead"),
        Conflicts("colocate", because="engines and learner take turns on the same devices"),
        Conflicts("rollout_source", because="a rollout source makes whole rollouts, one when it is called"),
        Conflicts(
            "partial_rollout",
            unless={"pause_generation_mode": "abort", "generate_function": None},
            because="responses in flight continue when weights are published, and none is aborted",
        ),
        Conflicts("debug_rollout_only", because="nothing is trained while rollouts are generated"),
        Conflicts(*NO_ENGINES, because="nothing is generated"),
    ] = 0
    """Rollouts that may be generated ahead while the learner trains. 0: synchronous.

    1: one rollout ahead. Such samples are older than the weights that train on them: see max_staleness.
    """
    max_staleness: Annotated[
        NonNegativeInt | None, Conflicts(*ONE_HALF, because="learner and engines do not both run")
    ] = None
    """Maximum staleness: trained rollouts between the weights that sampled the first token of a sample and the weights
    that train on it.

    0: exactly on-policy. None: no bound beyond what async_buffer_size and update_weights_interval imply.
    """
    stale_samples: Annotated[
        Literal["requeue", "correct", "evict"],
        Needs("max_staleness", because="otherwise no sample is stale"),
        Needs(
            "corrections",
            "use_rollout_logprobs",
            when="correct",
            part="correction",
            because="without a correction stale samples would bias the gradient",
        ),
    ] = "requeue"
    """Samples above max_staleness. requeue: generate the prompt again. correct: train them. evict: drop them.

    correct needs a correction that compares learner and engine, or use_rollout_logprobs; then no rollout waits for a
    slow group.
    """
    pause_generation_mode: Annotated[
        Literal["retract", "in_place", "abort"],
        Needs("async_buffer_size", because="otherwise nothing is in flight when weights are published"),
    ] = "retract"
    """Treatment of requests in flight when weights are published. retract: continue with a recomputed KV cache.

    in_place: continue with the KV cache of the old weights. abort: abort them and requeue their prompts.
    """
    sglang_server_concurrency: PositiveInt = 512
    """Responses that an engine generates at once. Further requests wait in the sampler."""
    rollout_request_timeout_s: PositiveFloat = 300.0
    """Seconds without an answer and without progress of the engine after which a generation request fails."""

    @property
    def truncates(self) -> bool:
        """Whether top-p or top-k truncates the vocabulary."""
        return self.rollout_top_p < 1 or self.rollout_top_k != -1

    @property
    def has_groups_across_rollouts(self) -> bool:
        """Whether the sampler may hold groups of other rollouts while it samples a rollout. If not, an interrupted
        rollout can be sampled again from its start."""
        return self.async_buffer_size > 0 or self.partial_rollout or self.rollout_source is not None


class DataConfig(Section):
    """Prompts of the run."""

    prompt_data: Path | None = None
    """Prompts: a JSON Lines or Parquet file, a folder of such, a folder that datasets saved, a pattern such as
    'data/*.jsonl'; @[a:b] after it takes rows a to b-1. None: the built-in arithmetic problems."""
    input_key: Name = "prompt"
    """Field of a row with the prompt: text, or chat messages. Dots lead into objects: extra_info.question."""
    label_key: Name | None = "label"
    """Field of a row with the ground truth for the reward, such as reward_model.ground_truth. None: rows have none."""
    metadata_key: Annotated[Name, CheckedIfGiven()] = "metadata"
    """Field of a row with an object that becomes the sample's metadata; rows may lack it."""
    tool_key: Annotated[Name | None, CheckedIfGiven()] = "tools"
    """Field of a row with a list of tools that the chat template shows the model; rows may lack it. None: no tools."""
    multimodal_keys: MultimodalKeys | None = None
    """Fields of a row with images or other media for the engine, as JSON: '{"image": "images"}'. None: no media."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template; a text prompt becomes one user message."""
    apply_chat_template_kwargs: Annotated[TemplateArguments, Needs("apply_chat_template")] = "{}"
    """Further arguments of the chat template, as JSON: '{"enable_thinking": false}'."""
    rollout_shuffle: bool = True
    """Shuffle the prompts anew in each epoch, by the seed. False: file order."""
    rollout_max_prompt_len: PositiveInt | None = None
    """Leave out prompts longer than this many tokens, and count them. None: keep all."""
    num_data_workers: Annotated[NonNegativeInt, Needs("rollout_max_prompt_len")] = 0
    """Processes that tokenize prompts to apply rollout_max_prompt_len. 0: the sampler tokenizes them. Above 0, the
    default of rollout_max_prompt_len is the model's context minus rollout_max_response_len."""
    on_bad_data: Literal["fail", "skip"] = "fail"
    """Treatment of rows that cannot be read, or that name something that the run does not have. fail: end the run with
    file and line. skip: leave the row out, count it, and list it in logs/bad-rows.log."""
    data_source: Name = PROMPT_FILES
    """Component (kind data_source) that returns prompts."""


Finite = Annotated[float, Field(allow_inf_nan=False)]


def _set_name(name: str) -> str:
    if not re.fullmatch(r"[\w.+-][\w.+ -]*", name):
        raise rejected(f"found the name {name!r}; accepted: letters, digits, blanks and . _ + -, for metrics and files")
    return name


SetName = Annotated[Name, AfterValidator(_set_name)]
"""Name of an evaluation set."""


class EvalDataset(Section):
    """An evaluation set with separate settings. Settings that it leaves out are those of ``eval_*``, or of
    ``[rollout]`` or ``[data]``.

    Example: ``[[eval.eval_datasets]]`` with ``name = "aime"``, ``path = "aime.jsonl"``, ``temperature = 0.6``.
    """

    name: SetName
    """Name of the set in metrics."""
    path: Path
    """Prompt file, relative to the file that names it."""
    n_samples_per_eval_prompt: PositiveInt | None = None
    """Responses per prompt."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature. 0: greedy."""
    top_p: FractionAboveZero | None = None
    """Keep the likeliest tokens up to this probability mass."""
    top_k: MinusOne | PositiveInt | None = None
    """Keep the k likeliest tokens. -1: all."""
    max_response_len: PositiveInt | None = None
    """Longest response in tokens."""
    min_new_tokens: NonNegativeInt | None = None
    """Minimum tokens of a response."""
    max_prompt_len: PositiveInt | None = None
    """Maximum tokens of a prompt; longer ones are dropped."""
    max_context_len: TwoOrMore | None = None
    """Maximum tokens of prompt plus response."""
    stop: tuple[Name, ...] | None = None
    """Texts that end a response."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Token ids that end a response, in addition to the end of sequence."""
    repetition_penalty: PositiveFloat | None = None
    """Repetition penalty of SGLang. 1: none."""
    input_key: Name | None = None
    """Field of a row with the prompt."""
    label_key: Name | None = None
    """Field of a row with the ground truth. "none": rows have none."""
    metadata_key: Name | None = None
    """Field of a row with its metadata."""
    apply_chat_template: bool | None = None
    """Render prompts with the tokenizer's chat template."""
    generate_function: Name | None = None
    """Component that turns a prompt into a response."""
    rm_type: RewardSum | None = None
    """Component that rewards responses, or a sum of several."""
    reward_key: Name | None = None
    """Name of the number that counts. "none": rewards are plain numbers."""
    pass_threshold: Finite | None = None
    """Minimum reward of a solved response."""
    model: Name | None = None
    """Model that answers: an auxiliary model of the run, or the address of an SGLang server."""
    model_key_env: Name | None = None
    """Environment variable with the API key of the server at that address. None: it needs no key."""


OF_SETS = Needs("eval_prompt_data", "eval_datasets", part="evaluation")
WITH_ENGINES = Conflicts(*NO_ENGINES, because="evaluations need engines")
WHILE_TRAINING = Needs("eval_interval", because="otherwise a run evaluates nothing")


class EvalConfig(Section):
    """Evaluation on held-out prompts."""

    eval_prompt_data: Annotated[tuple[tuple[SetName, Path], ...], WITH_ENGINES] = ()
    """Named evaluation sets: NAME FILE. Empty: only eval_datasets."""
    eval_datasets: Annotated[tuple[EvalDataset, ...], WITH_ENGINES] = ()
    """Further evaluation sets with separate settings: tables with at least name and path."""
    eval_interval: Annotated[PositiveInt | None, OF_SETS, WITH_ENGINES] = None
    """Rollouts between evaluations. The run also evaluates before the first rollout and at the end. None: never."""
    skip_eval_before_train: bool = False
    """Do not evaluate the start weights."""
    n_samples_per_eval_prompt: PositiveInt = 1
    """Responses per evaluation prompt. The score is their mean; pass@k is logged for k up to this number."""
    eval_temperature: NonNegativeFloat = 0.0
    """Sampling temperature of evaluation. 0: greedy."""
    eval_top_p: FractionAboveZero | None = None
    """Nucleus sampling of evaluation. None: rollout_top_p; greedy, all."""
    eval_top_k: MinusOne | PositiveInt | None = None
    """Keep the k likeliest tokens in evaluation. None: rollout_top_k; greedy, all."""
    eval_max_response_len: PositiveInt | None = None
    """Maximum tokens of an evaluation response. None: rollout_max_response_len."""
    eval_min_new_tokens: NonNegativeInt = 0
    """Minimum tokens of an evaluation response."""
    eval_max_prompt_len: PositiveInt | None = None
    """Maximum tokens of an evaluation prompt; longer ones are dropped and counted. None: no limit."""
    eval_max_context_len: TwoOrMore | None = None
    """Maximum tokens of an evaluation prompt plus its response. None: no such limit."""
    eval_input_key: Name | None = None
    """Field of an evaluation row with the prompt. None: input_key."""
    eval_label_key: Name | None = None
    """Field of an evaluation row with the ground truth. None: label_key."""
    eval_reward_key: Name | None = None
    """Name of the number that evaluations count, for reward models that return several. None: reward_key."""
    eval_pass_threshold: Finite = 1.0
    """Minimum reward of a solved response, in pass@k."""
    eval_num_gpus: Annotated[
        PositiveInt | None,
        OF_SETS,
        Conflicts("eval_interleaved", because="with it the policy's engines evaluate"),
        Conflicts(
            "colocate", because="the learner is offloaded when an evaluation starts; --eval-interleaved works with it"
        ),
        WHILE_TRAINING,
    ] = None
    """GPUs of engines that only evaluate, during training; on a CPU, server processes. None: no such engines."""
    eval_num_gpus_per_engine: Annotated[PositiveInt | None, Needs("eval_num_gpus")] = None
    """GPUs per engine that only evaluates. None: rollout_num_gpus_per_engine."""
    eval_interleaved: Annotated[bool, OF_SETS, WHILE_TRAINING] = False
    """Evaluate on the policy's engines while generation and training continue. New weights wait for the evaluation.

    False: training waits for the evaluation, and the evaluation for groups in flight.
    """

    @property
    def is_concurrent(self) -> bool:
        """Whether training continues during an evaluation."""
        return self.eval_interleaved or self.eval_num_gpus is not None

    def groups(self, *, num_gpus_per_engine: int) -> tuple[EngineGroup, ...]:
        """Return the group of the engines that only evaluate, if there are any.

        Arguments:
            num_gpus_per_engine: size of an engine if eval_num_gpus_per_engine is not given.
        """
        if self.eval_num_gpus is None:
            return ()
        size = self.eval_num_gpus_per_engine or num_gpus_per_engine
        return (EngineGroup(num_gpus=self.eval_num_gpus, num_gpus_per_engine=size),)

    @property
    def files(self) -> tuple[tuple[str, Path], ...]:
        """Name and prompt file of every evaluation set."""
        return (*self.eval_prompt_data, *((dataset.name, dataset.path) for dataset in self.eval_datasets))
