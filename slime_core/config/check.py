"""The rules between settings, and whether the files they name are there; quick, and without anything heavy imported.

Each rule is a function that yields what is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from slime_core.config.conditions import unmet
from slime_core.config.described import context_length, described, start_weights
from slime_core.config.learning import PARITY_BOUNDS
from slime_core.config.mistakes import Mistake
from slime_core.config.prompt_paths import unreadable
from slime_core.config.reward_sum import reward_terms
from slime_core.config.rules.asynchronous import ASYNC
from slime_core.config.rules.batches import BATCHES, OPTIMIZER
from slime_core.config.rules.corrections import CORRECTIONS
from slime_core.config.rules.data import DATA
from slime_core.config.rules.debug import DEBUG, unwritable
from slime_core.config.rules.drawing import DRAWING
from slime_core.config.rules.engines import SERVING, SERVING_OF_EVAL, SERVING_OF_RUN
from slime_core.config.rules.evaluation import EVALUATION
from slime_core.config.rules.layout import ENGINE_LAYOUT, LEARNER_LAYOUT, Rule
from slime_core.config.rules.models import MODELS
from slime_core.config.running import DebugConfig
from slime_core.config.schema import RunConfig
from slime_core.config.settings import Setting, core_settings, core_values

__all__ = ["mistakes"]


def mistakes(
    config: RunConfig,
    *,
    purpose: str = "run",
    broken: frozenset[str] = frozenset(),
    of_plugins: Mapping[str, tuple[Setting, Any]] | None = None,
) -> list[Mistake]:
    """Every condition and every rule that ``config`` breaks.

    Arguments:
        purpose: ``run``, or ``eval``, which trains nothing.
        broken: settings whose value could not be read, which therefore have their defaults here. Conditions on them
            are not judged, and rules that read one are silent, because the default is not what was meant.
        of_plugins: setting key -> (setting, value), of the active plugins.
    """
    if purpose == "eval":
        config = config.model_copy(update={"debug": DebugConfig()})  # neither half of the loop runs
    rules = (*_ALWAYS, *(_OF_EVAL if purpose == "eval" else _OF_RUN))
    of_core = core_values(config)
    values = {key: (setting, of_core[key]) for key, setting in core_settings().items()}
    readable = _without(config, broken)
    messages = [
        *unmet(values | dict(of_plugins or {}), sections=OF_EVALUATIONS if purpose == "eval" else None, broken=broken),
        *(message for rule in rules for message in _messages(rule, readable)),
    ]
    return list(map(Mistake, messages))


class _UnreadError(Exception):
    """A rule has used a setting whose value could not be read."""


class _Unread:
    """Stands in for such a value: every use of it raises."""

    def _used(self, *_: object) -> NoReturn:
        raise _UnreadError

    __bool__ = __eq__ = __hash__ = __len__ = __iter__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __floordiv__ = _used
    __rfloordiv__ = __truediv__ = __rtruediv__ = __contains__ = __getattr__ = __str__ = __format__ = _used


def _without(config: RunConfig, settings: frozenset[str]) -> RunConfig:
    """``config`` with a value in the place of each of ``settings`` that no rule can use."""
    known = core_settings()
    sections = {known[key].section for key in settings if key in known}
    update = {
        name: (section := getattr(config, name)).model_copy(
            update={key: _Unread() for key in settings if key in type(section).model_fields}
        )
        for name in sections
    }
    return config.model_copy(update=update)


def _messages(rule: Rule, config: RunConfig) -> list[str]:
    try:
        return list(rule(config))
    except _UnreadError:
        return []


OF_EVALUATIONS = frozenset({"engine", "eval"})
"""Sections whose conditions hold for an evaluation too."""


def _estimator_is_named(config: RunConfig) -> Iterator[str]:
    if config.algorithm.advantage_estimator is None:
        yield (
            "advantage_estimator: nothing says how rewards become advantages; name a plugin that does, "
            "--plugin grpo, or a component, --advantage-estimator NAME"
        )


def _responses_fit_the_context(config: RunConfig) -> Iterator[str]:
    context = config.engine.sglang_context_length
    longest = max(config.rollout.rollout_max_response_len, config.eval.eval_max_response_len or 0)
    if context is not None and longest >= context:
        yield (
            f"sglang_context_length = {context} has no room for a prompt and a response of {longest} tokens; "
            "raise it, or lower the longest response"
        )


def _context_fits_the_model(config: RunConfig) -> Iterator[str]:
    asked, context = config.engine.sglang_context_length, context_length(start_weights(config))
    if asked is not None and context is not None and asked > context:
        yield (
            f"sglang_context_length = {asked}, but the model reads at most max_position_embeddings = {context} tokens; "
            f"give at most {context}, or leave it out"
        )


def _responses_fit_the_model(config: RunConfig) -> Iterator[str]:
    yield from _too_long(config, "rollout_max_response_len", config.rollout.rollout_max_response_len)
    yield from _too_long(config, "eval_max_response_len", config.eval.eval_max_response_len)


def _evaluated_responses_fit_the_model(config: RunConfig) -> Iterator[str]:
    if config.eval.eval_max_response_len is None:
        yield from _too_long(config, "rollout_max_response_len", config.rollout.rollout_max_response_len)
    yield from _too_long(config, "eval_max_response_len", config.eval.eval_max_response_len)


def _colocated_engines_have_devices(config: RunConfig) -> Iterator[str]:
    engines, ranks = config.cluster.rollout_num_gpus, config.num_learner_ranks
    if config.cluster.colocate and engines > ranks:
        nodes, each = config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node
        yield (
            f"colocate: rollout_num_gpus = {engines} is more than the learner's devices, actor_num_nodes x "
            f"actor_num_gpus_per_node = {nodes} x {each} = {ranks}, and engines sit on those; give at most {ranks}"
        )


def _transport_reaches_the_engines(config: RunConfig) -> Iterator[str]:
    nodes = config.cluster.actor_num_nodes
    if config.transport == "tensor" and nodes > 1:
        yield (
            f"update_weight_transport = tensor shares memory inside the machine of the first learner rank, and "
            f"actor_num_nodes = {nodes} has engines on others; choose disk, or without colocate distributed"
        )


def _disk_folder_is_used(config: RunConfig) -> Iterator[str]:
    folder = config.weights.update_weight_disk_dir
    if folder is not None:
        yield from unwritable(folder, "update_weight_disk_dir")


def _parity_bounds_are_ordered(config: RunConfig) -> Iterator[str]:
    settings, number = config.weights, "bfloat16" if config.model.bf16 else "float32"
    given = {
        "parity_mean_tolerance": settings.parity_mean_tolerance,
        "parity_max_tolerance": settings.parity_max_tolerance,
    }
    if settings.parity_interval == 0:
        return
    defaults = dict(zip(given, PARITY_BOUNDS[number], strict=True))
    mean, largest = (value or defaults[name] for name, value in given.items())
    if mean > largest:
        yield (
            f"parity_mean_tolerance = {mean:g} is above parity_max_tolerance = {largest:g}, and no mean is above its "
            f"largest part; give both (in {number} they are {' and '.join(f'{one:g}' for one in defaults.values())} "
            "by default)"
        )


def _reward_sums_can_be_read(config: RunConfig) -> Iterator[str]:
    sums = {"rm_type": config.rollout.rm_type}
    sums |= {f"evaluation set {one.name}: rm_type": one.rm_type or "" for one in config.eval.eval_datasets}
    for where, written in sums.items():
        try:
            reward_terms(written)
        except ValueError as error:
            yield f"{where} = {error}"


def _waits_warn_first(config: RunConfig) -> Iterator[str]:
    if config.watch.wait_warn_s > config.watch.wait_fail_s:
        warn, fail = config.watch.wait_warn_s, config.watch.wait_fail_s
        yield f"wait_warn_s = {warn:g} is above wait_fail_s = {fail:g}; a wait is reported before it fails"


def _there_is_eval_data(config: RunConfig) -> Iterator[str]:
    if not config.evaluates:
        yield "eval_prompt_data: there is nothing to evaluate on; add --eval-prompt-data NAME FILE"


def _eval_names_differ(config: RunConfig) -> Iterator[str]:
    counts = Counter(name for name, _ in config.eval.files)
    for name in (name for name, count in counts.items() if count > 1):
        yield f"eval_prompt_data: {counts[name]} files are named {name!r}; metrics carry the name, each needs its own"


def _eval_files_are_readable(config: RunConfig) -> Iterator[str]:
    for name, path in config.eval.files:
        yield from _unreadable(path, f"eval_prompt_data {name}")


def _prompts_are_readable(config: RunConfig) -> Iterator[str]:
    if config.data.prompt_data is not None and config.debug.generates:
        yield from _unreadable(config.data.prompt_data, "prompt_data")


def _checkpoint_is_a_model(config: RunConfig) -> Iterator[str]:
    yield from _no_model(config.model.hf_checkpoint, "hf_checkpoint")


def _reference_is_a_model(config: RunConfig) -> Iterator[str]:
    yield from _no_model(config.model.ref_load, "ref_load")


def _critic_is_a_model(config: RunConfig) -> Iterator[str]:
    yield from _no_model(config.critic.critic_load, "critic_load")


def _teacher_is_a_model(config: RunConfig) -> Iterator[str]:
    yield from _no_model(config.algorithm.opd_teacher_load, "opd_teacher_load")


def _load_exists(config: RunConfig) -> Iterator[str]:
    folder = config.model.load
    if folder is not None and not folder.is_dir():
        yield f"load: {folder} is no folder; accepted: a run folder, or one of its checkpoints"


def _output_is_writable(config: RunConfig) -> Iterator[str]:
    yield from unwritable(config.run.output_dir or Path.cwd() / "outputs", "output_dir")


def _unreadable(path: Path, what: str) -> Iterator[str]:
    yield from (f"{what}: {problem}" for problem in unreadable(path))


def _no_model(folder: Path | None, what: str) -> Iterator[str]:
    if folder is None:
        return
    accepted = "accepted: a Hugging Face folder on this machine (download a hub model first)"
    if not (folder / "config.json").is_file():
        found = "holds no config.json" if folder.is_dir() else "is no folder"
        yield f"{what}: {folder} {found}; {accepted}"
    elif (content := described(folder)) is None:
        yield f"{what}: {folder / 'config.json'} is no JSON object; {accepted}"
    elif not _names_an_architecture(content):
        yield f"{what}: {folder / 'config.json'} names no architecture; {accepted}"


def _names_an_architecture(found: dict[str, Any]) -> bool:
    match found.get("architectures"):
        case [str(), *_]:
            return True
    return False


def _too_long(config: RunConfig, name: str, longest: int | None) -> Iterator[str]:
    context = context_length(start_weights(config))
    if longest is not None and context is not None and longest >= context:
        yield (
            f"{name} = {longest}, but the model reads at most max_position_embeddings = {context} tokens, "
            f"prompt and response together; give less than {context}"
        )


_ALWAYS: tuple[Rule, ...] = (
    *SERVING,
    *ENGINE_LAYOUT,
    *EVALUATION,
    _reward_sums_can_be_read,
    _context_fits_the_model,
    _responses_fit_the_context,
    _waits_warn_first,
    _eval_names_differ,
    _eval_files_are_readable,
    _checkpoint_is_a_model,
    _load_exists,
    _output_is_writable,
)

_OF_EVAL: tuple[Rule, ...] = (
    *SERVING_OF_EVAL,
    _there_is_eval_data,
    _evaluated_responses_fit_the_model,
)

_OF_RUN: tuple[Rule, ...] = (
    *SERVING_OF_RUN,
    _estimator_is_named,
    *LEARNER_LAYOUT,
    *ASYNC,
    *BATCHES,
    *CORRECTIONS,
    *DATA,
    *DEBUG,
    *DRAWING,
    *OPTIMIZER,
    *MODELS,
    _colocated_engines_have_devices,
    _transport_reaches_the_engines,
    _disk_folder_is_used,
    _parity_bounds_are_ordered,
    _responses_fit_the_model,
    _prompts_are_readable,
    _reference_is_a_model,
    _critic_is_a_model,
    _teacher_is_a_model,
)
