"""Rules that annotations of settings cannot express: batch sizes, optimizer steps, schedules, staleness, lengths of
prompts and responses, files and evaluations. :mod:`slime_core.config.layout_rules` has those of ranks, devices, engines
and models.

A rule yields a message for each mistake, with the values, the accepted ones and the next step. Rules import nothing
heavy, because they run before anything starts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from slime_core.config.model_config import context_length, described, start_weights, torch_dist_folder
from slime_core.config.schema import RunConfig, eval_sets
from slime_core.config.secrets import is_key
from slime_core.errors import nearest
from slime_core.untrusted import open_regular

Rule = Callable[[RunConfig], Iterator[str]]
"""Yields a message for each mistake in a configuration."""


def _batches_add_up(config: RunConfig) -> Iterator[str]:
    prompts, responses = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    size, steps = config.learner.global_batch_size, config.learner.num_steps_per_rollout
    total = config.samples_per_rollout
    samples = f"rollout_batch_size x n_samples_per_prompt = {prompts} x {responses} = {total}"
    if size and steps and size * steps != total:
        product = f"global_batch_size x num_steps_per_rollout = {size} x {steps} = {size * steps}"
        yield f"{samples}, but {product}. They must be equal: leave out --global-batch-size or --num-steps-per-rollout"
    elif size and not steps and total % size:
        yield f"{samples}, which is not divisible by global_batch_size = {size}. Give a divisor of {total}"
    elif steps and not size and total % steps:
        yield f"{samples}, which is not divisible by num_steps_per_rollout = {steps}. Give a divisor of {total}"


def _publications_within_staleness(config: RunConfig) -> Iterator[str]:
    bound, interval = config.rollout.max_staleness, config.weights.update_weights_interval
    oldest = (interval or config.rollout.num_rollout) - 1
    if bound is not None and bound < oldest:
        when = f"after every {interval} rollouts" if interval else "before the first rollout only"
        yield (
            f"max_staleness = {bound}, but update_weights_interval = {interval} publishes weights {when}, so that "
            f"the staleness of samples reaches {oldest}. Raise --max-staleness to {oldest}, or give "
            f"--update-weights-interval {bound + 1}"
        )


def _one_step_on_policy(config: RunConfig) -> Iterator[str]:
    if config.algorithm.true_on_policy_mode and config.steps_per_rollout > 1:
        yield (
            f"true_on_policy_mode takes one optimizer step a rollout, but num_steps_per_rollout = "
            f"{config.steps_per_rollout}: later steps change the weights that generated the samples. Give "
            "--num-steps-per-rollout 1, or leave out --true-on-policy-mode"
        )


def _wsd_decay_after_warm_up(config: RunConfig) -> Iterator[str]:
    """With WSD the decay is the last ``lr_wsd_decay_iters`` steps, of which none may belong to the warm-up."""
    optimizer, critic, rollouts = config.optimizer, config.critic, config.rollout.num_rollout
    phases = {
        "lr_warmup_iters": (optimizer.lr_warmup_iters, rollouts - critic.num_critic_only_steps),
        "critic_lr_warmup_iters": (critic.critic_lr_warmup_iters, rollouts),
    }
    for name, (warm_up, trained) in phases.items():
        if warm_up is None or optimizer.lr_decay_style != "WSD":
            continue
        total = optimizer.lr_decay_iters or trained * config.steps_per_rollout
        if (optimizer.lr_wsd_decay_iters or 0) > total - warm_up:
            yield (
                f"lr_wsd_decay_iters = {optimizer.lr_wsd_decay_iters} is more than the {total} - {warm_up} = "
                f"{total - warm_up} optimizer steps after {name}. Give --lr-wsd-decay-iters at most that"
            )


STEPS: tuple[Rule, ...] = (
    _batches_add_up,
    _publications_within_staleness,
    _one_step_on_policy,
    _wsd_decay_after_warm_up,
)


def _context_fits_the_model(config: RunConfig) -> Iterator[str]:
    requested, context = config.engine.sglang_context_length, context_length(start_weights(config))
    if requested is not None and context is not None and requested > context:
        yield (
            f"sglang_context_length = {requested}, but the model reads at most max_position_embeddings = {context} "
            f"tokens; give at most {context}, or leave it out"
        )


def _responses_fit_the_context(config: RunConfig) -> Iterator[str]:
    yield from _too_long(config, "rollout_max_response_len", config.rollout.rollout_max_response_len, reserved=1)


def _evaluations_fit_the_context(config: RunConfig) -> Iterator[str]:
    """An auxiliary model may read further than the policy."""
    settings = config.eval
    if settings.eval_max_response_len is None:
        yield from _responses_fit_the_context(config)
    yield from _too_long(config, "eval_max_response_len", settings.eval_max_response_len, reserved=1)
    yield from _too_long(config, "eval_max_context_len", settings.eval_max_context_len)
    for dataset in (dataset for dataset in settings.eval_datasets if dataset.model is None):
        where = f"evaluation set {dataset.name}"
        yield from _too_long(config, f"{where}: max_response_len", dataset.max_response_len, reserved=1)
        yield from _too_long(config, f"{where}: max_context_len", dataset.max_context_len)


def _too_long(config: RunConfig, name: str, tokens: int | None, *, reserved: int = 0) -> Iterator[str]:
    """Yield a message if ``tokens`` plus ``reserved`` exceed the context of the engines."""
    context, source = _context(config)
    if tokens is not None and context is not None and tokens + reserved > context:
        yield (
            f"{name} = {tokens}, but the model reads at most {source} = {context} tokens, prompt and response "
            f"together; give at most {context - reserved}"
        )


def _context(config: RunConfig) -> tuple[int | None, str]:
    """Return the context of the engines in tokens, and the name of the setting or field that gives it."""
    requested, read = config.engine.sglang_context_length, context_length(start_weights(config))
    if requested is not None and (read is None or requested < read):
        return requested, "sglang_context_length"
    return read, "max_position_embeddings"


def _hard_budget_holds_the_longest(config: RunConfig) -> Iterator[str]:
    learner, (longest, _) = config.learner, _context(config)
    if not learner.hard_token_budget:
        return
    if (prompt := config.data.rollout_max_prompt_len) is not None:
        total = prompt + config.rollout.rollout_max_response_len
        longest = total if longest is None else min(longest, total)
    if longest is None:
        yield (
            "hard_token_budget = true, but the length of prompts has no limit; add --rollout-max-prompt-len, or "
            "leave out --hard-token-budget"
        )
        return
    context = min(config.parallel.context_parallel_size, config.critic_parallel.context_parallel_size)
    needed, budget = (learner.micro_batch_size or 1) * longest, learner.max_tokens_per_gpu * context
    if needed > budget:
        yield (
            f"hard_token_budget: {learner.micro_batch_size or 1} sample(s) of {longest} tokens do not fit "
            f"max_tokens_per_gpu x context_parallel_size = {learner.max_tokens_per_gpu} x {context} = {budget}; raise "
            f"--max-tokens-per-gpu to at least {-(-needed // context)}, or shorten prompts or responses"
        )


LENGTHS: tuple[Rule, ...] = (_context_fits_the_model, _evaluations_fit_the_context)
LENGTHS_OF_RUN: tuple[Rule, ...] = (_responses_fit_the_context, _hard_budget_holds_the_longest)


MARKS = {
    "save_debug_rollout_data": (b'{"format": "slime rollout"', 64),
    "save_debug_train_data": (b'"slime train data"', 2**20),
}
"""Setting -> text at the start of its files (:mod:`slime_core.rollout.rollout_files`,
:mod:`slime_core.learner.rank`), and the number of bytes to search."""


def _served_models_are_models(config: RunConfig) -> Iterator[str]:
    yield from _no_model(config.model.hf_checkpoint, "hf_checkpoint")
    for model in config.engine.engine_models:
        yield from _no_model(model.model_path, f"engine_models {model.name}")


def _further_models_are_models(config: RunConfig) -> Iterator[str]:
    reference = config.model.ref_load
    if reference is None or torch_dist_folder(reference) is None:
        yield from _no_model(reference, "ref_load", formats="Hugging Face or torch_dist folder")
    yield from _no_model(config.critic.critic_load, "critic_load")
    yield from _no_model(config.algorithm.opd_teacher_load, "opd_teacher_load")


def _no_model(folder: Path | None, what: str, *, formats: str = "Hugging Face folder") -> Iterator[str]:
    if folder is None:
        return
    content = described(folder)
    names = None if content is None else content.get("architectures")
    if not (folder / "config.json").is_file():
        problem = "holds no config.json" if folder.is_dir() else "is not a folder"
    elif content is None:
        problem = "holds a config.json that is not a JSON object"
    elif not (isinstance(names, list) and names and isinstance(names[0], str)):
        problem = "holds a config.json that names no architecture"
    else:
        return
    yield f"{what}: {folder} {problem}; accepted: a {formats} on this machine, or OWNER/NAME on the hub"


def _initial_checkpoint_is_torch_dist(config: RunConfig) -> Iterator[str]:
    folder = config.model.initial_megatron_checkpoint
    if folder is not None and torch_dist_folder(folder) is None:
        yield (
            f"initial_megatron_checkpoint: {folder} holds no torch_dist checkpoint (no .metadata); accepted: a folder "
            "of slime convert hf-to-torch-dist, a run or one of its checkpoints, Megatron's own. Give a Hugging Face "
            "folder as --hf-checkpoint"
        )


def _load_exists(config: RunConfig) -> Iterator[str]:
    folder = config.model.load
    if folder is not None and not folder.is_dir():
        yield f"load: {folder} is not a folder; accepted: a run folder, or one of its checkpoints"


def _output_is_writable(config: RunConfig) -> Iterator[str]:
    yield from _unwritable(config.run.output_dir or Path.cwd() / "outputs", "output_dir")


def _further_folders_are_writable(config: RunConfig) -> Iterator[str]:
    if config.weights.update_weight_disk_dir is not None:
        yield from _unwritable(config.weights.update_weight_disk_dir, "update_weight_disk_dir")
    for name in MARKS:
        path = dict(config.debug)[name]
        if path is not None and "{" not in f"{path.parent}":
            yield from _unwritable(path.parent, name)


def _unwritable(folder: Path, what: str) -> Iterator[str]:
    """Yield a message if ``folder``, which setting ``what`` names, cannot be created or written."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    flag = "--" + what.replace("_", "-")
    if not nearest.is_dir():
        yield f"{what}: {nearest} is a file, so {folder} cannot be a folder; choose another with {flag}"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{what}: {nearest} is not writable, so {folder} cannot be written; choose another with {flag}"


def _every_rollout_and_rank_has_a_file(config: RunConfig) -> Iterator[str]:
    rollouts, ranks = config.rollout.num_rollout, config.num_learner_ranks
    for name, placeholder, count, kind in (
        ("save_debug_rollout_data", "{rollout_id}", rollouts, "rollouts"),
        ("load_debug_rollout_data", "{rollout_id}", rollouts, "rollouts"),
        ("save_debug_train_data", "{rollout_id}", rollouts, "rollouts"),
        ("save_debug_train_data", "{rank}", ranks, "learner ranks"),
    ):
        path = dict(config.debug)[name]
        if path is not None and count > 1 and placeholder not in f"{path}":
            yield (
                f"{name} = {path} has no {placeholder}, but each of the {count} {kind} needs another file; put "
                f"{placeholder} into the path for the number"
            )


def _nothing_else_is_replaced(config: RunConfig) -> Iterator[str]:
    for name, (mark, within) in MARKS.items():
        path = dict(config.debug)[name]
        if path is None:
            continue
        written = r"\d+".join(re.escape(part) for part in re.split(r"\{\w+\}", f"{path.resolve()}"))
        folder = path.resolve().parent
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if re.fullmatch(written, f"{file}") and mark not in _head(file, within):
                yield (
                    f"{name} = {path}: {file} exists and {name} did not write it; move it away, or choose another file"
                )


def _head(file: Path, size: int) -> bytes:
    try:
        with open_regular(file) as stream:
            return stream.read(size)
    except OSError:
        return b""


FILES: tuple[Rule, ...] = (_served_models_are_models, _load_exists, _output_is_writable)
FILES_OF_RUN: tuple[Rule, ...] = (
    _further_models_are_models,
    _initial_checkpoint_is_torch_dist,
    _further_folders_are_writable,
    _every_rollout_and_rank_has_a_file,
    _nothing_else_is_replaced,
)


def _names_are_given_once(config: RunConfig) -> Iterator[str]:
    """Metrics carry the name of an evaluation set, requests that of an auxiliary model."""
    named = {
        "evaluation sets": [name for name, _ in config.eval.files],
        "engine_models": [model.name for model in config.engine.engine_models],
    }
    for what, names in named.items():
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{what}: {count} are named {name!r}; give each another name"


def _lengths_agree(config: RunConfig) -> Iterator[str]:
    for dataset in eval_sets(config):
        if dataset.min_new_tokens > dataset.max_response_len:
            yield (
                f"evaluation set {dataset.name}: min_new_tokens = {dataset.min_new_tokens} is above "
                f"max_response_len = {dataset.max_response_len}; give at most {dataset.max_response_len}"
            )


def _models_of_sets_answer(config: RunConfig) -> Iterator[str]:
    served = [model.name for model in config.engine.engine_models]
    for dataset in (dataset for dataset in config.eval.eval_datasets if dataset.model is not None):
        name, is_address = str(dataset.model), str(dataset.model).startswith(("http://", "https://"))
        if name not in served and not is_address:
            yield (
                f"evaluation set {dataset.name}: model = {name!r}; accepted: an auxiliary model of the run (there are: "
                f"{', '.join(served) or 'none'}{nearest(name, served)}), or the address of an SGLang server, such as "
                "http://127.0.0.1:30000"
            )
        if is_address and dataset.model_key_env is not None and not is_key(os.environ.get(dataset.model_key_env)):
            yield (  # without the value, which may be the key itself
                f"evaluation set {dataset.name}: model_key_env names no environment variable with a key, one line "
                "of ASCII without spaces; give the name, such as JUDGE_KEY, and export it before the run"
            )


EVALUATION: tuple[Rule, ...] = (_names_are_given_once, _lengths_agree, _models_of_sets_answer)
