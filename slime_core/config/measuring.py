"""Section [eval]: measuring on held-out prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainValidator, ValidationError

from slime_core.config.mistakes import nearest
from slime_core.config.options import NO_ENGINES, Conflicts, Needs, Once
from slime_core.config.reward_sum import RewardSum
from slime_core.config.section import (
    All,
    Count,
    CountOrZero,
    Name,
    Positive,
    PositiveOrZero,
    Section,
    Share,
    rejected,
)
from slime_core.config.serving import EngineGroup
from slime_core.untrusted import parse_toml

__all__ = ["EvalConfig", "EvalDataset", "dataset_of"]

Finite = Annotated[float, Field(allow_inf_nan=False)]


def _set_name(name: str) -> str:
    if not re.fullmatch(r"[\w.+-][\w.+ -]*", name):
        raise rejected(f"found the name {name!r}; metrics and files carry it: letters, digits, blanks and . _ + - only")
    return name


SetName = Annotated[Name, AfterValidator(_set_name)]
"""Name of an evaluation set."""

NOT_TAKEN = {
    "custom_rm_path": "a set names a component, rm_type; code by path is for the whole run, --custom-rm-path",
    "custom_generate_function_path": "a set names a component, generate_function; code by path is for the whole run",
    "skip_special_tokens": "texts are decoded from the ids here, which are kept whole",
    "no_stop_trim": "texts are decoded from the ids here, which are kept whole",
    "metadata_overrides": "not built yet; rows hold their metadata",
    "multimodal_keys": "not built yet for a single set",
    "apply_chat_template_kwargs": "not built yet for a single set",
    "tool_key": "not built yet for a single set",
}
"""What an evaluation set of slime may hold besides, and why there is no such key."""


class EvalDataset(Section):
    """One evaluation set with settings of its own; what it leaves out is that of ``eval_*``, then of ``[rollout]`` and
    ``[data]``.

    Example: ``[[eval.eval_datasets]]`` with ``name = "aime"``, ``path = "aime.jsonl"``, ``temperature = 0.6``.
    """

    name: SetName
    """Name of the set in metrics."""
    path: Path
    """Prompt file; relative to the file that names it."""
    n_samples_per_eval_prompt: Count | None = None
    """Responses per prompt."""
    temperature: PositiveOrZero | None = None
    """Sampling temperature. 0: greedy."""
    top_p: Share | None = None
    """Keep the likeliest tokens up to this probability mass."""
    top_k: All | Count | None = None
    """Keep the k likeliest tokens. -1: all."""
    max_response_len: Count | None = None
    """Longest response in tokens."""
    min_new_tokens: CountOrZero | None = None
    """Minimum tokens of a response."""
    max_prompt_len: Count | None = None
    """Maximum tokens of a prompt; longer ones are dropped."""
    max_context_len: Count | None = None
    """Maximum tokens of prompt plus response."""
    stop: tuple[Name, ...] | None = None
    """Texts that end a response."""
    stop_token_ids: tuple[CountOrZero, ...] | None = None
    """Token ids that end a response, besides the end of sequence."""
    repetition_penalty: Positive | None = None
    """SGLang's; 1 is none."""
    input_key: Name | None = None
    """Field of a row with the prompt."""
    label_key: Name | None = None
    """Field of a row with the ground truth; "none": rows have none."""
    metadata_key: Name | None = None
    """Field of a row with its metadata."""
    apply_chat_template: bool | None = None
    """Render prompts with the tokenizer's chat template."""
    generate_function: Name | None = None
    """Component that turns a prompt into a response."""
    rm_type: RewardSum | None = None
    """Component that rewards responses, or a sum of several, as text or as a table of weights."""
    reward_key: Name | None = None
    """Which of a reward model's named numbers counts; "none": rewards are plain numbers."""
    pass_threshold: Finite | None = None
    """Minimum reward of a solved response."""
    model: Name | None = None
    """The model that answers: an auxiliary model of the run, or the address of an SGLang server."""


def dataset_of(table: object) -> EvalDataset:
    """The set that a TOML table, or the text of one as a flag gives it, describes.

    Raises:
        PydanticCustomError: it describes none; says everything that is wrong, of type ``REJECTED``.
    """
    if isinstance(table, EvalDataset):
        return table
    found = _parsed(table) if isinstance(table, str) else table
    if not isinstance(found, dict):
        raise rejected(f"found {table!r}; accepted: a table such as {{ name = 'aime', path = 'aime.jsonl' }}")
    problems = [*_unknown(found), *_missing(found)]
    values = {key: value for key, value in found.items() if key in EvalDataset.model_fields}
    try:
        # Through JSON, in which a list is a tuple and a text a path, but "5" is no number.
        dataset = EvalDataset.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        problems += [_problem(one, values) for one in error.errors() if one["type"] != "missing"]
    if problems:
        raise rejected(f"evaluation set {found.get('name', '(without a name)')}: {'; '.join(dict.fromkeys(problems))}")
    return dataset


def _parsed(text: str) -> object:
    try:
        return parse_toml(f"it = {{ {text.strip().removeprefix('{').removesuffix('}')} }}")["it"]
    except ValueError as error:
        raise rejected(f"{text!r} is no TOML table ({error}); accepted: name = 'aime', path = 'aime.jsonl'") from None


def _unknown(table: dict[str, Any]) -> list[str]:
    known = EvalDataset.model_fields
    return [
        f"{key}: {NOT_TAKEN[key]}" if key in NOT_TAKEN else f"no such key {key}{nearest(str(key), known)}"
        for key in table
        if key not in known
    ]


def _missing(table: dict[str, Any]) -> list[str]:
    return [f"{key} is missing" for key in ("name", "path") if key not in table]


def _problem(error: Any, table: dict[str, Any]) -> str:
    key = str(error["loc"][0])
    return f"{key} = {json.dumps(table.get(key), default=str)}: {error['msg'][:1].lower()}{error['msg'][1:]}"


EVALUATION_DATA = ("eval_prompt_data", "eval_datasets")
NO_EVALUATION = Conflicts("skip_eval_before_train", unless="eval_interval", because="nothing would be evaluated")


class EvalConfig(Section):
    """Measuring on held-out prompts."""

    eval_prompt_data: Annotated[
        tuple[tuple[SetName, Path], ...], Conflicts(*NO_ENGINES, because="evaluations need engines")
    ] = ()
    """Named evaluation sets: NAME FILE. Empty: only eval_datasets."""
    eval_datasets: Annotated[
        tuple[Annotated[EvalDataset, PlainValidator(dataset_of)], ...],
        Conflicts(*NO_ENGINES, because="evaluations need engines"),
    ] = ()
    """Further evaluation sets with their own settings: tables with at least name and path."""
    eval_config: Annotated[Path | None, Once()] = None
    """YAML or TOML file with evaluation sets and defaults for them, read into eval_datasets. None: there is none."""
    eval_interval: Annotated[
        Count | None,
        Needs(*EVALUATION_DATA, part="evaluation"),
        Conflicts(*NO_ENGINES, because="evaluations need engines"),
    ] = None
    """Evaluate every this many rollouts, and at the end. None: only before the first. --no-eval: never."""
    skip_eval_before_train: bool = False
    """Do not evaluate the start weights."""
    n_samples_per_eval_prompt: Count = 1
    """Responses per evaluation prompt; the score is their mean, and pass@k is logged for k up to this."""
    eval_temperature: PositiveOrZero = 0.0
    """Sampling temperature of evaluation. 0: greedy."""
    eval_top_p: Share | None = None
    """Nucleus sampling of evaluation. None: rollout_top_p; greedy, all."""
    eval_top_k: All | Count | None = None
    """Keep the k likeliest tokens in evaluation. None: rollout_top_k; greedy, all."""
    eval_max_response_len: Count | None = None
    """Maximum tokens of an evaluation response. None: rollout_max_response_len."""
    eval_min_new_tokens: CountOrZero = 0
    """Minimum tokens of an evaluation response."""
    eval_max_prompt_len: Count | None = None
    """Maximum tokens of an evaluation prompt; longer ones are dropped and counted. None: no limit."""
    eval_max_context_len: Count | None = None
    """Maximum tokens of an evaluation prompt plus its response. None: no such limit."""
    eval_input_key: Name | None = None
    """Field of an evaluation row with the prompt. None: input_key."""
    eval_label_key: Name | None = None
    """Field of an evaluation row with the ground truth. None: label_key."""
    eval_reward_key: Name | None = None
    """Which of a reward model's named numbers evaluations count. None: reward_key."""
    eval_pass_threshold: Finite = 1.0
    """Minimum reward of a solved response, in pass@k."""
    eval_num_gpus: Annotated[
        Count | None,
        Needs(*EVALUATION_DATA, part="evaluation"),
        Conflicts("eval_interleaved", because="the policy's engines evaluate with it"),
        Conflicts("colocate", because="the learner sleeps when an evaluation begins; --eval-interleaved goes with it"),
        NO_EVALUATION,
    ] = None
    """GPUs of engines that only evaluate, concurrently with training; on a CPU, server processes. None: no such
    engines."""
    eval_num_gpus_per_engine: Annotated[Count | None, Needs("eval_num_gpus")] = None
    """GPUs per such engine. None: rollout_num_gpus_per_engine."""
    eval_interleaved: Annotated[bool, Needs(*EVALUATION_DATA, part="evaluation"), NO_EVALUATION] = False
    """Evaluate on the policy's engines while generation and training continue; new weights wait for it.

    False: training waits for the evaluation, and the evaluation for groups in flight.
    """

    @property
    def is_beside_training(self) -> bool:
        """Whether training goes on while an evaluation is under way."""
        return self.eval_interleaved or self.eval_num_gpus is not None

    def groups(self, *, num_gpus_per_engine: int) -> tuple[EngineGroup, ...]:
        """Engines that only evaluate, as one group or none.

        Arguments:
            num_gpus_per_engine: of an engine where nothing else is said.
        """
        if self.eval_num_gpus is None:
            return ()
        size = self.eval_num_gpus_per_engine or num_gpus_per_engine
        return (EngineGroup(num_gpus=self.eval_num_gpus, num_gpus_per_engine=size),)

    @property
    def files(self) -> tuple[tuple[str, Path], ...]:
        """Name and prompt file of every evaluation set."""
        return (*self.eval_prompt_data, *((one.name, one.path) for one in self.eval_datasets))
