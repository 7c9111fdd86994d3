"""Rules that settings cannot declare as conditions: sizes (batches, optimizer steps, schedules, staleness; prompts,
responses, the context of the model), files (what a run reads is there, what it writes can be written and replaces
nothing else), and evaluations. Those of ranks, devices, engines and models are in
:mod:`slime_core.config.layout_rules`.

A rule yields a message for each mistake: what was given, what is wrong, what is accepted, the next step. Rules import
nothing heavy, because they run before anything starts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from slime_core.config.learning import PARITY_BOUNDS, STRICT_PARITY_BOUNDS
from slime_core.config.model_config import context_length, described, is_mixture, start_weights, torch_dist_folder
from slime_core.config.prompt_paths import unreadable
from slime_core.config.sampling import reward_terms
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


def _over_sampling_starts_a_batch(config: RunConfig) -> Iterator[str]:
    started, batch = config.rollout.over_sampling_batch_size, config.rollout.rollout_batch_size
    if started is not None and started < batch:
        yield (
            f"over_sampling_batch_size = {started} prompts cannot fill rollout_batch_size = {batch}. Give at least "
            f"{batch}, or leave it out"
        )


def _ahead_within_staleness(config: RunConfig) -> Iterator[str]:
    bound, ahead = config.rollout.max_staleness, config.rollout.async_buffer_size
    if bound is not None and ahead > bound:
        yield (
            f"max_staleness = {bound}, but with async_buffer_size = {ahead} the staleness of samples reaches {ahead}. "
            f"Lower --async-buffer-size to {bound}, or raise --max-staleness to {ahead}"
        )


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


def _parity_bounds(config: RunConfig) -> Iterator[str]:
    settings = config.weights
    number = "bfloat16" if config.model.bf16 else "mixture" if is_mixture(config.model.hf_checkpoint) else "float32"
    names = ("parity_mean_tolerance", "parity_max_tolerance")
    given = (settings.parity_mean_tolerance, settings.parity_max_tolerance)
    if config.algorithm.true_on_policy_mode:
        for name, value, bound in zip(names, given, STRICT_PARITY_BOUNDS, strict=True):
            if value is not None and value > bound:
                yield (
                    f"{name} = {value:g} is above {bound:g}, the bound of true_on_policy_mode. Lower it, or leave it "
                    "out"
                )
    defaults = PARITY_BOUNDS[number]
    mean, largest = (value or default for value, default in zip(given, defaults, strict=True))
    kind = "for mixtures of experts in float32" if number == "mixture" else f"in {number}"
    if settings.parity_interval and mean > largest:
        yield (
            f"parity_mean_tolerance = {mean:g} is above parity_max_tolerance = {largest:g}, which bounds the mean, "
            f"too. Give both flags; {kind} the defaults are {defaults[0]:g} and {defaults[1]:g}"
        )


def _learning_rates(config: RunConfig) -> Iterator[str]:
    settings = config.optimizer
    for name, bound in {"min_lr": settings.min_lr, "lr_warmup_init": settings.lr_warmup_init}.items():
        if bound > settings.lr:
            yield f"{name} = {bound:g} is above lr = {settings.lr:g}. Lower --{name.replace('_', '-')}, or raise --lr"
        if config.critic.critic_lr is not None and config.critic.critic_lr < bound:
            yield (
                f"critic_lr = {config.critic.critic_lr:g} is below {name} = {bound:g}, which holds for the "
                f"critic, too. Raise --critic-lr, or lower --{name.replace('_', '-')}"
            )


def _decay_after_warm_up(config: RunConfig) -> Iterator[str]:
    """The phases of the schedule: warm-up, then decay; with WSD the decay is the last ``lr_wsd_decay_iters`` steps."""
    optimizer, alone = config.optimizer, config.critic.num_critic_only_steps
    warm_ups = {"lr_warmup_iters": (optimizer.lr_warmup_iters, config.rollout.num_rollout - alone)}
    if config.critic.critic_lr_warmup_iters is not None:
        warm_ups["critic_lr_warmup_iters"] = (config.critic.critic_lr_warmup_iters, config.rollout.num_rollout)
    for name, (warm_up, rollouts) in warm_ups.items():
        end = optimizer.lr_decay_iters or rollouts * config.steps_per_rollout
        if optimizer.lr_decay_iters is not None and end <= warm_up:
            yield (
                f"lr_decay_iters = {end} must be above {name} = {warm_up}, because both count from the first step. "
                "Raise --lr-decay-iters"
            )
        elif optimizer.lr_decay_style == "WSD" and (optimizer.lr_wsd_decay_iters or 0) > end - warm_up:
            total = "lr_decay_iters" if optimizer.lr_decay_iters else f"optimizer steps of {rollouts} rollouts"
            yield (
                f"lr_wsd_decay_iters = {optimizer.lr_wsd_decay_iters} is more than the steps after warm-up: {total} - "
                f"{name} = {end} - {warm_up} = {end - warm_up}. Give --lr-wsd-decay-iters at most that"
            )


def _actor_is_trained(config: RunConfig) -> Iterator[str]:
    alone, total = config.critic.num_critic_only_steps, config.rollout.num_rollout
    if alone >= total:
        yield (
            f"num_critic_only_steps = {alone} leaves the actor no rollout of num_rollout = {total}. Lower "
            f"--num-critic-only-steps to at most {total - 1}, or raise --num-rollout"
        )


def _parameter_names_compile(config: RunConfig) -> Iterator[str]:
    for setting in ("only_train_params_name_list", "freeze_params_name_list"):
        for expression in dict(config.optimizer)[setting]:
            try:
                re.compile(expression)
            except re.error as problem:
                yield (
                    f"{setting}: {expression!r} is no regular expression: {problem}. Write a literal dot or bracket "
                    "with a backslash, as \\."
                )


def waits_warn_first(config: RunConfig) -> Iterator[str]:
    """A wait is reported before it fails; runs and evaluations wait."""
    warn, fail = config.watch.wait_warn_s, config.watch.wait_fail_s
    if warn > fail:
        yield (
            f"wait_warn_s = {warn:g} is above wait_fail_s = {fail:g}, so no wait would be reported. Lower "
            "--wait-warn-s, or raise --wait-fail-s"
        )


STEPS: tuple[Rule, ...] = (
    _batches_add_up,
    _over_sampling_starts_a_batch,
    _ahead_within_staleness,
    _publications_within_staleness,
    _one_step_on_policy,
    _parity_bounds,
    _learning_rates,
    _decay_after_warm_up,
    _actor_is_trained,
    _parameter_names_compile,
)


def _responses_fit_the_context(config: RunConfig) -> Iterator[str]:
    context = config.engine.sglang_context_length
    longest = max(config.rollout.rollout_max_response_len, config.eval.eval_max_response_len or 0)
    if context is not None and longest >= context:
        yield (
            f"sglang_context_length = {context} has no room for a prompt and a response of {longest} tokens; "
            "raise --sglang-context-length, or lower --rollout-max-response-len or --eval-max-response-len"
        )


def _context_fits_the_model(config: RunConfig) -> Iterator[str]:
    requested, context = config.engine.sglang_context_length, context_length(start_weights(config))
    if requested is not None and context is not None and requested > context:
        yield (
            f"sglang_context_length = {requested}, but the model reads at most max_position_embeddings = {context} "
            f"tokens; give at most {context}, or leave it out"
        )


def _responses_fit_the_model(config: RunConfig) -> Iterator[str]:
    yield from _too_long(config, "rollout_max_response_len", config.rollout.rollout_max_response_len)
    yield from _too_long(config, "eval_max_response_len", config.eval.eval_max_response_len)


def _evaluated_responses_fit_the_model(config: RunConfig) -> Iterator[str]:
    if config.eval.eval_max_response_len is None:
        yield from _too_long(config, "rollout_max_response_len", config.rollout.rollout_max_response_len)
    yield from _too_long(config, "eval_max_response_len", config.eval.eval_max_response_len)


def _too_long(config: RunConfig, name: str, longest: int | None) -> Iterator[str]:
    context = context_length(start_weights(config))
    if longest is not None and context is not None and longest >= context:
        yield (
            f"{name} = {longest}, but the model reads at most max_position_embeddings = {context} tokens, "
            f"prompt and response together; give less than {context}"
        )


def _hard_budget_holds_the_longest(config: RunConfig) -> Iterator[str]:
    settings, (context, name) = config.learner, _smallest_context(config)
    if not settings.hard_token_budget:
        return
    longest, sum_ = _longest(config)
    if longest is None:
        yield (
            "hard_token_budget = true, but the length of prompts has no limit; add --rollout-max-prompt-len, or "
            "leave out --hard-token-budget"
        )
        return
    count = settings.micro_batch_size or 1
    needed, budget = count * longest, settings.max_tokens_per_gpu * context
    if needed > budget:
        times = f"micro_batch_size = {count} samples of {sum_} tokens = {needed}" if count > 1 else sum_
        yield (
            f"hard_token_budget: {times} tokens do not fit max_tokens_per_gpu x {name} = "
            f"{settings.max_tokens_per_gpu} x {context} = {budget}; raise --max-tokens-per-gpu to at "
            f"least {-(-needed // context)}, or shorten prompts or responses"
        )


def _smallest_context(config: RunConfig) -> tuple[int, str]:
    """The smaller context-parallel size of the actor and a separate critic, and the name of its setting."""
    actor, name = config.parallel.context_parallel_size, "context_parallel_size"
    critic = config.critic_parallel.context_parallel_size
    return (critic, f"critic_{name}") if config.num_critic_ranks and critic < actor else (actor, name)


def _longest(config: RunConfig) -> tuple[int | None, str]:
    """Tokens of the longest sequence, and the sum or setting that gives it."""
    prompt, response = config.data.rollout_max_prompt_len, config.rollout.rollout_max_response_len
    found = {}
    if prompt is not None:
        total = f"rollout_max_prompt_len + rollout_max_response_len = {prompt} + {response} = {prompt + response}"
        found[total] = prompt + response
    if (requested := config.engine.sglang_context_length) is not None:
        found[f"sglang_context_length = {requested}"] = requested
    if (read := context_length(start_weights(config))) is not None:
        found[f"max_position_embeddings = {read}"] = read
    shortest = min(found, key=lambda name: found[name], default="")
    return found.get(shortest), shortest


LENGTHS: tuple[Rule, ...] = (_responses_fit_the_context, _context_fits_the_model)
LENGTHS_OF_RUN: tuple[Rule, ...] = (_responses_fit_the_model, _hard_budget_holds_the_longest)
LENGTHS_OF_EVAL: tuple[Rule, ...] = (_evaluated_responses_fit_the_model,)


ROLLOUT_FILES = ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data")
"""Settings that name a file for each rollout, with ``{rollout_id}`` for its number."""

MARKS = {
    "save_debug_rollout_data": (b'{"format": "slime rollout"', 64),
    "save_debug_train_data": (b'"slime train data"', 2**20),
}
"""Setting -> what stands in a file that it wrote (:mod:`slime_core.rollout.rollout_files`,
:mod:`slime_core.learner.rank`), and in how many of its first bytes."""

PLACEHOLDER = r"\{\w+\}"


def _eval_files_are_readable(config: RunConfig) -> Iterator[str]:
    for name, path in config.eval.files:
        yield from (f"eval_prompt_data {name}: {problem}" for problem in unreadable(path))


def _prompts_are_readable(config: RunConfig) -> Iterator[str]:
    if config.data.prompt_data is not None and config.debug.generates:
        yield from (f"prompt_data: {problem}" for problem in unreadable(config.data.prompt_data))


def _checkpoint_is_a_model(config: RunConfig) -> Iterator[str]:
    yield from _no_model(config.model.hf_checkpoint, "hf_checkpoint")


def _further_models_are_models(config: RunConfig) -> Iterator[str]:
    reference = config.model.ref_load
    if reference is None or torch_dist_folder(reference) is None:
        yield from _no_model(reference, "ref_load", formats="Hugging Face or torch_dist folder")
    yield from _no_model(config.critic.critic_load, "critic_load")
    yield from _no_model(config.algorithm.opd_teacher_load, "opd_teacher_load")


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
        yield f"load: {folder} is no folder; accepted: a run folder, or one of its checkpoints"


def _output_is_writable(config: RunConfig) -> Iterator[str]:
    yield from _unwritable(config.run.output_dir or Path.cwd() / "outputs", "output_dir")


def _disk_folder_is_used(config: RunConfig) -> Iterator[str]:
    folder = config.weights.update_weight_disk_dir
    if folder is not None:
        yield from _unwritable(folder, "update_weight_disk_dir")


def _no_model(folder: Path | None, what: str, *, formats: str = "Hugging Face folder") -> Iterator[str]:
    if folder is None:
        return
    accepted = f"accepted: a {formats} on this machine (download a hub model first)"
    if not (folder / "config.json").is_file():
        found = "holds no config.json" if folder.is_dir() else "is no folder"
        yield f"{what}: {folder} {found}; {accepted}"
    elif (content := described(folder)) is None:
        yield f"{what}: {folder / 'config.json'} is no JSON object; {accepted}"
    elif not (isinstance(names := content.get("architectures"), list) and names and isinstance(names[0], str)):
        yield f"{what}: {folder / 'config.json'} names no architecture; {accepted}"


def _every_rollout_has_a_file(config: RunConfig) -> Iterator[str]:
    total = config.rollout.num_rollout
    for name in ROLLOUT_FILES:
        path = dict(config.debug)[name]
        if path is not None and total > 1 and "{rollout_id}" not in f"{path}":
            one = " or give --num-rollout 1" if name == "load_debug_rollout_data" else ""
            yield (
                f"{name} = {path} names one file, but each of the num_rollout = {total} rollouts needs its own; put "
                f"{{rollout_id}} into the path, as in "
                f"{_numbered(path, '{rollout_id}')},{one or ' which stands for the number of the rollout'}"
            )


def _numbered(path: Path, number: str) -> Path:
    """An example of a file for each; ``/`` has no name that a number could be put into."""
    return path.with_stem(f"{path.stem}-{number}") if path.name else path / number


def _every_rank_has_a_file(config: RunConfig) -> Iterator[str]:
    path, ranks = config.debug.save_debug_train_data, config.num_learner_ranks
    if path is not None and ranks > 1 and "{rank}" not in f"{path}":
        nodes, each = config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node
        yield (
            f"save_debug_train_data = {path} has no {{rank}}, but actor_num_nodes x actor_num_gpus_per_node = "
            f"{nodes} x {each} = {ranks} learner ranks write one file each; put {{rank}} into the path, as in "
            f"{_numbered(path, '{rank}')}"
        )


def _files_can_be_written(config: RunConfig) -> Iterator[str]:
    for name in MARKS:
        path = dict(config.debug)[name]
        if path is not None and "{" not in f"{path.parent}":
            yield from _unwritable(path.parent, name)


def _nothing_else_is_replaced(config: RunConfig) -> Iterator[str]:
    others = _inputs(config)
    for name in MARKS:
        path = dict(config.debug)[name]
        if path is None:
            continue
        taken = [other for other, file in others.items() if re.fullmatch(_form(path), _first(file))]
        for other in taken:
            yield (
                f"{name} = {path} is the file of {other} = {others[other]}, which saving would replace; give another "
                "file to one of them"
            )
        for file in [] if taken else _foreign(name, path):
            yield (
                f"{name} = {path}: {file} is there already and is nothing that {name} wrote; move it away, or choose "
                "another file"
            )
        others[name] = path


def _inputs(config: RunConfig) -> dict[str, Path]:
    """Setting -> the file that the run reads by it."""
    given = {
        "prompt_data": config.data.prompt_data,
        "load_debug_rollout_data": config.debug.load_debug_rollout_data,
        "lock_file": config.run.lock_file,
    }
    given |= config.of_plugins.files
    given |= {f"eval_prompt_data {name}": path for name, path in config.eval.files}
    return {name: path for name, path in given.items() if path is not None}


def _form(template: Path) -> str:
    """A regular expression for the files of ``template``."""
    return r"\d+".join(re.escape(part) for part in re.split(PLACEHOLDER, f"{template.resolve()}"))


def _first(template: Path) -> str:
    """A file of ``template``, with 0 for its numbers."""
    return re.sub(PLACEHOLDER, "0", f"{template.resolve()}")


def _foreign(name: str, template: Path) -> list[Path]:
    """Files where ``template`` would be written that the setting ``name`` did not write."""
    folder = template.resolve().parent
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    mark, within = MARKS[name]
    return [file for file in found if re.fullmatch(_form(template), f"{file}") and mark not in _head(file, within)]


def _head(file: Path, size: int) -> bytes:
    try:
        with open_regular(file) as stream:
            return stream.read(size)
    except OSError:
        return b""


def _unwritable(folder: Path, what: str) -> Iterator[str]:
    """Why ``folder``, named by setting ``what``, cannot be made or written into; nothing where it can."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    flag = "--" + what.replace("_", "-")
    if not nearest.is_dir():
        yield f"{what}: {nearest} is a file, so {folder} cannot be a folder; choose another with {flag}"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{what}: {nearest} is not writable, so {folder} cannot be written; choose another with {flag}"


FILES: tuple[Rule, ...] = (_eval_files_are_readable, _checkpoint_is_a_model, _load_exists, _output_is_writable)
FILES_OF_RUN: tuple[Rule, ...] = (
    _prompts_are_readable,
    _further_models_are_models,
    _initial_checkpoint_is_torch_dist,
    _disk_folder_is_used,
    _every_rollout_has_a_file,
    _every_rank_has_a_file,
    _files_can_be_written,
    _nothing_else_is_replaced,
)


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The name of an environment variable."""


def _sets_fit_the_model(config: RunConfig) -> Iterator[str]:
    """Checks the lengths that a set itself gives; those of the run are checked above."""
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
