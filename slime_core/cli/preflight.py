"""Checks prompts, weights and the machine before the run starts a process or writes a file.

:mod:`slime_core.config.check` has checked the settings. Estimates are lower bounds: a refused run cannot work, and one
that passes may still need more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime_core.cli.labels import LabelSamples
from slime_core.cli.memory import GpuPlan, Needs
from slime_core.components.construction import refusals, run_view, screened
from slime_core.components.devices import find_device
from slime_core.config.engines import server_arguments
from slime_core.config.internals import missing_internals
from slime_core.config.model_config import (
    architecture_of,
    context_length,
    described,
    differences,
    start_weights,
    whole_number,
)
from slime_core.config.options import PROMPT_FILES
from slime_core.config.schema import ARITHMETIC, RunConfig, eval_sets
from slime_core.config.secrets import result_changing_variables
from slime_core.contracts import PromptLimits, PromptRow, PromptScreen
from slime_core.errors import Mistake, config_error
from slime_core.modeling.memory import GIB
from slime_core.plugins.registration import Kind
from slime_core.prompts.chat import has_processor
from slime_core.rollout.prompt_filter import evaluation_request, template_arguments, training_request
from slime_core.rollout.rollout_files import screen_rollouts
from slime_core.rollout.row_checks import RowChecks
from slime_core.runtime.machine import COMPILER, KERNEL_PACKAGES, Machine, cluster_address, free_resources

if TYPE_CHECKING:
    from slime_core.checkpoint.folder import Checkpoint
    from slime_core.config.load import Resolved
    from slime_core.plugins.registry import Registry


NO_OPTIONS: Mapping[str, object] = {}


KERNEL_SETTINGS = ("flash_attention", "transformer_impl")
"""Settings of the learner that name an implementation."""


def print_warning(message: str) -> None:
    """Print ``warning: ...`` to stderr."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def check_files(
    config: RunConfig,
    registry: Registry,
    *,
    trains: bool,
    first: int = 0,
    options: Mapping[str, object] = NO_OPTIONS,
    labels: LabelSamples | None = None,
) -> list[str]:
    """Check that the model can be built, and that prompts, or recorded rollouts, are valid for it.

    Arguments:
        labels: receives labels of every file.

    Returns:
        The mistakes in rows that the run will leave out (``on_bad_data = skip``), of the rows read.

    Raises:
        ConfigError: the model spec does not support parts of the checkpoint's architecture; lists all of them.
        PluginError: the plugin of the model spec fails.
        DataError: a mistake in a prompt file or a saved rollout, with file and line.
    """
    for missing in missing_internals():
        print_warning(missing)
    if trains and config.debug.trains:
        _check_model(config, registry)
    recorded = config.debug.load_debug_rollout_data
    if trains and recorded is not None:
        screen_rollouts(
            recorded,
            range(first, config.rollout.num_rollout),
            temperature=config.rollout.rollout_temperature,
        )
        return []
    bad = _screen_training(config, registry, options, labels) if trains else []
    _screen_evaluations(config, registry, options, labels)
    unused = [name for name, path in config.eval.files if not _is_embedded(config, path)]
    if trains and config.eval.eval_interval is None and unused:
        print_warning(
            f"evaluation sets {', '.join(unused)}: the run does not evaluate them, because eval_interval is not given; "
            "add --eval-interval N, or evaluate a checkpoint with slime eval"
        )
    return bad


def check_resume(config: RunConfig, resume: Checkpoint | None) -> None:
    """Check that the run has the model of the checkpoint ``resume``.

    The data source checks the prompts when it restores its state.

    Raises:
        ConfigError: lists every difference.
    """
    if resume is None:
        return
    weights, saved = start_weights(config), described(resume.hf)
    if config.debug.trains and saved is not None and (texts := differences(described(weights) or {}, saved)):
        start = f"--hf-checkpoint {weights} is another model than {resume.path}"
        step = "resume with that value, or start a new run from its weights"
        raise config_error([Mistake(f"{start}: {text}; {step}") for text in texts])


def _check_model(config: RunConfig, registry: Registry) -> None:
    folder, architecture = start_weights(config), architecture_of(config.model.hf_checkpoint)
    problems = [
        f"hf_checkpoint: {folder / 'config.json'} {text}; give another checkpoint, or name a plugin with a model spec "
        "that builds it (--plugin)"
        for text in refusals(
            registry, architecture or "", described(folder) or {}, run_view(config, model_folder=folder)
        )
    ]
    _refuse([*problems, *_unseen_images(config, registry, architecture)])


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise config_error([Mistake(text) for text in problems])


def _unseen_images(config: RunConfig, registry: Registry, architecture: str | None) -> Iterator[str]:
    """Yield a message if engines receive images that the learner's model does not support."""
    keys = config.data.multimodal_keys
    spec = registry.model_spec(architecture or "", implementation=config.model.model_impl)
    if keys is None or spec is None or not has_processor(config.model.hf_checkpoint or start_weights(config)):
        return
    plugin, component = spec
    start = f"multimodal_keys = {keys!r} sends images to the engines"
    if not component.traits.inputs:
        yield (
            f"{start}, but model spec {component.name!r} of {plugin} takes only tokens, so the learner would train "
            "without images; name a plugin with a model spec that declares such inputs (--plugin), or leave "
            "multimodal_keys out"
        )
    elif config.parallel.context_parallel_size > 1:
        yield (
            f"{start}, but context_parallel_size = {config.parallel.context_parallel_size} divides rows without their "
            "images; leave --context-parallel-size out"
        )


def check_machine(config: RunConfig, needs: Needs) -> None:
    """Check the environment variables and, unless the run joins a cluster, the resources of this machine.

    Raises:
        ConfigError: lists every variable that changes results, and every resource that is too small.
        PluginError: the run computes on a CPU, and the plugin for that is missing or cannot be loaded.
    """
    problems = [
        f"environment variable {name}: engines would return other tokens or log-probabilities than they sampled; "
        f"unset {name}"
        for name in result_changing_variables()
    ]
    machine = free_resources()
    problems += [] if joins_a_cluster(config) else list(machine_mistakes(config, needs, machine))
    if computes_on_gpus(config):
        plan = GpuPlan.of(config, needs)
        problems += [] if plan is None else plan.mistakes()
        problems += [] if plan is None or joins_a_cluster(config) else plan.host_mistakes(machine.memory)
    elif needs.ranks or needs.engines:
        find_device("cpu")
    _refuse(problems)
    groups = [*config.engine_groups, *config.auxiliary_groups]
    if flags := (*config.sglang.given, *(flag for group in groups for flag in group.overrides)):
        from slime_core.rollout.engines.engine import check_sglang_flags  # imports HTTP clients

        check_sglang_flags(server_arguments(flags), "cuda" if computes_on_gpus(config) else "cpu")


def computes_on_gpus(config: RunConfig) -> bool:
    """Return whether learner and engines of the run compute on GPUs."""
    device = config.cluster.device
    return device == "cuda" or (device == "auto" and finds_gpus(config.cluster.ray_address))


def joins_a_cluster(config: RunConfig) -> bool:
    """Return whether the run joins a Ray cluster instead of starting one on this machine."""
    return cluster_address(config.cluster.ray_address) is not None


def finds_gpus(ray_address: str | None) -> bool:
    """Return whether ``device = auto`` means GPUs: of this machine, or of the cluster.

    A cluster that does not answer counts as one with GPUs.
    """
    address = cluster_address(ray_address)
    return free_resources().can_use_gpus if address is None else _gpus_at(address) != 0


def _gpus_at(address: str) -> int | None:
    from slime_core.runtime.session import gpus_at  # imports Ray, which this machine alone does not need

    return gpus_at(address)


def precision(resolved: Resolved) -> str:
    """Return a line with the dtype of learner and engines, and its source."""
    source = resolved.provenance["bf16"]
    if not resolved.config.model.bf16:
        return f"computes in: float32 ({source})"
    more = "; --no-bf16: float32" if source.layer == "model" else ""
    return f"computes in: bfloat16 ({source}{more})"


def machine_mistakes(config: RunConfig, needs: Needs, machine: Machine) -> Iterator[str]:
    """Yield a message for each resource of ``machine`` that is too small."""
    if config.cluster.device == "cuda" and not machine.can_use_gpus:
        reason = "this machine has no GPU driver under /dev"
        if machine.has_gpus:
            reason = f"torch {machine.torch} is a build without CUDA"
        yield f"device = cuda, but {reason}; accepted: --device cpu or auto, or a cluster with GPUs (--ray-address)"
    elif config.cluster.device == "cpu" or not machine.can_use_gpus:
        yield from _too_small(needs, machine)
    yield from _missing_kernels(config, machine)
    if config.cluster.device != "cpu" and machine.can_use_gpus and machine.missing_build_tools:
        yield (
            f"engines compile GPU kernels at their start, but {', '.join(machine.missing_build_tools)} is missing; "
            "install the CUDA toolkit, a C++ compiler and ninja (docs/install.md)"
        )


def _missing_kernels(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Yield a message for each implementation of the learner that this machine does not have."""
    if config.learner.compile_pointwise and COMPILER in machine.missing_build_tools:
        yield f"compile_pointwise needs {COMPILER}, and this machine has none; install g++ (docs/install.md)"
    for setting in KERNEL_SETTINGS:
        used = getattr(config.learner, setting)
        package = KERNEL_PACKAGES.get(used)
        if package is None:
            continue
        flag = f"--{setting.replace('_', '-')}"
        if not machine.can_use_gpus:
            yield f"{setting} = {used} needs a GPU, and torch finds none on this machine; leave {flag} out"
        elif package not in machine.kernel_packages:
            yield f"{setting} = {used}, but {package} is not installed; pip install {package}, or leave {flag} out"


def _too_small(needs: Needs, machine: Machine) -> Iterator[str]:
    """Yield messages about memory and shared memory of a machine without GPUs."""
    if needs.memory > machine.memory:
        yield (
            f"memory: the run needs at least {needs.memory_sum} GiB, but this machine has {machine.memory / GIB:.1f} "
            "GiB free; use a smaller model, fewer ranks or engines, or a larger machine"
        )
    free, needed = machine.shared_memory, needs.shared_memory
    if free is None or needed > free:
        available = "this machine has none" if free is None else f"it has {_size(free)} free"
        weights = ", or lower --update-weight-buffer-size, or choose --update-weight-transport disk"
        yield (
            f"shared memory: the processes need {_size(needed)} of /dev/shm, and {available}; enlarge it "
            f"(docker run --shm-size){weights if needs.buffer else ''}"
        )


def _size(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB" if number >= 2**20 else f"{number / 2**10:,.1f} KiB"


OPTIONAL_KEYS = ("tool_key", "metadata_key")
"""Settings of fields that rows may lack."""


def _screen_training(
    config: RunConfig, registry: Registry, options: Mapping[str, object], labels: LabelSamples | None
) -> list[str]:
    """Let the data source check its files; return the mistakes in rows that will be left out."""
    data = config.data
    checks = RowChecks.of(config, registry, options=options)
    request = training_request(
        config,
        data.prompt_data or ARITHMETIC / "data" / "train.jsonl",
        checks,
        vocab_size=whole_number(start_weights(config), "vocab_size"),
    )
    limits = _limits(
        config,
        registry,
        config.rollout.generate_function,
        response=config.rollout.rollout_max_response_len,
        leaves_out=data.rollout_max_prompt_len,
        apply_chat_template=data.apply_chat_template,
    )
    screen = PromptScreen(
        setting="" if data.prompt_data is None else "prompt_data",
        limits=limits,
        keys={key: getattr(data, key) for key in OPTIONAL_KEYS if key in data.model_fields_set and getattr(data, key)},
        see=_add_labels(labels, checks, config.rollout.reward_key),
    )
    return screened(registry, data.data_source, options, run_view(config, options, prompts=request), screen)


def _screen_evaluations(
    config: RunConfig, registry: Registry, options: Mapping[str, object], labels: LabelSamples | None
) -> None:
    for eval_set in eval_sets(config):
        if _is_embedded(config, eval_set.path):
            continue
        limits = _limits(
            config,
            registry,
            eval_set.generate_function,
            response=1 if eval_set.max_context_len else eval_set.max_response_len,
            leaves_out=eval_set.longest_prompt,
            apply_chat_template=eval_set.apply_chat_template,
        )
        checks = RowChecks.of(config, registry, evaluates=eval_set, options=options)
        is_separate = eval_set.metadata_key != config.data.metadata_key
        screen = PromptScreen(
            setting=f"eval_prompt_data {eval_set.name}",
            # Another model has other limits of its prompts.
            limits=limits if eval_set.model is None else None,
            keys={"metadata_key": eval_set.metadata_key} if is_separate else {},
            see=_add_labels(labels, checks, eval_set.reward_key),
        )
        run = run_view(config, options, prompts=evaluation_request(config, eval_set, checks))
        screened(registry, PROMPT_FILES, {}, run, screen)


def _add_labels(
    labels: LabelSamples | None, checks: RowChecks, reward_key: str | None
) -> Callable[[Path, Sequence[PromptRow]], None]:
    def see(path: Path, rows: Sequence[PromptRow]) -> None:
        if labels is not None and checks.rewards is not None:
            labels.add(path, rows, checks.rewards, reward_key)

    return see


def _is_embedded(config: RunConfig, path: Path) -> bool:
    """Return whether ``path`` is the built-in set of the built-in model, which tests check."""
    return config.model.hf_checkpoint is None and path.is_relative_to(ARITHMETIC)


def _limits(
    config: RunConfig,
    registry: Registry,
    generate_function: str,
    *,
    response: int,
    leaves_out: int | None,
    apply_chat_template: bool,
) -> PromptLimits | None:
    """Return the limits of prompts, or None if the generate function changes prompts."""
    if not registry.traits(Kind.GENERATE_FUNCTION, generate_function).sends_prompts_whole:
        return None
    folder = start_weights(config)
    return PromptLimits(
        context=config.engine.sglang_context_length or context_length(folder),
        response=response,
        folder=folder,
        apply_chat_template=apply_chat_template,
        leaves_out=leaves_out,
        template_arguments=template_arguments(config.data),
    )
