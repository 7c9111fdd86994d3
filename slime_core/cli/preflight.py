"""Checks prompts, weights and the machine before the first process starts and the first file is written.

The rules between settings came before (:mod:`slime_core.config.check`). Here files are opened and the machine is looked
at. Estimates are lower bounds: what is refused here cannot work, what passes may still be too much.
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
    """``warning: ...``, where errors are printed."""
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
        labels: receives labels of every file; None: they are not wanted.

    Returns:
        The mistakes in rows that the run will leave out (``on_bad_data = skip``), of those rows that were read.

    Raises:
        ConfigError: the model spec does not build something that the checkpoint asks for; lists all of it.
        PluginError: the model spec's plugin fails to say what it builds.
        DataError: a prompt file, or a saved rollout, with file and line.
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
    """Check that the model of the run is that of the checkpoint ``resume``, before anything starts.

    The data source checks when it restores that its place means the same prompts.

    Raises:
        ConfigError: lists every setting that differs from the checkpoint's.
    """
    if resume is None:
        return
    found: list[str] = []
    if config.debug.trains and (saved := described(resume.hf)) is not None:
        for one in differences(described(start_weights(config)) or {}, saved):
            found.append(f"--hf-checkpoint {start_weights(config)} is another model than {resume.path}: {one}")
    if found:
        raise config_error(
            [Mistake(f"{text}; resume with that value, or start a new run from its weights") for text in found]
        )


def _check_model(config: RunConfig, registry: Registry) -> None:
    folder, architecture = start_weights(config), architecture_of(config.model.hf_checkpoint)
    found = [
        f"hf_checkpoint: {folder / 'config.json'} {text}; take a checkpoint that does without, or name a plugin with a "
        "model spec that builds it (--plugin)"
        for text in refusals(
            registry, architecture or "", described(folder) or {}, run_view(config, model_folder=folder)
        )
    ]
    found += _unseen_images(config, registry, architecture)
    if found:
        raise config_error([Mistake(text) for text in found])


def _unseen_images(config: RunConfig, registry: Registry, architecture: str | None) -> Iterator[str]:
    """Mistakes about images that the engines are shown and that the learner's model cannot take."""
    keys = config.data.multimodal_keys
    spec = registry.model_spec(architecture or "", implementation=config.model.model_impl)
    if keys is None or spec is None or not has_processor(config.model.hf_checkpoint or start_weights(config)):
        return
    plugin, component = spec
    shown = f"multimodal_keys = {keys!r}: engines are shown what these fields hold"
    if not component.traits.inputs:
        who = f"model spec {component.name!r} of {plugin}"
        yield (
            f"{shown}, and the model of {who} takes tokens only, so answers to images would be trained without them; "
            "name a plugin with a model spec that declares such inputs (--plugin), or leave multimodal_keys out"
        )
    elif config.parallel.context_parallel_size > 1:
        yield (
            f"{shown}, and context_parallel_size = {config.parallel.context_parallel_size} gives a rank parts of a "
            "row, without saying which images belong to them; leave --context-parallel-size out"
        )


def check_machine(config: RunConfig, needs: Needs) -> None:
    """Check the environment variables and, unless the run joins a cluster, the resources of this machine.

    Raises:
        ConfigError: lists every variable that changes results, and every resource of which the machine has too little.
        PluginError: the run computes on a CPU, and the plugin for that is missing or cannot be loaded.
    """
    found = [
        f"environment variable {name}: engines would return other tokens or log-probabilities than they sampled; "
        f"unset {name}"
        for name in result_changing_variables()
    ]
    machine = free_resources()
    found += [] if joins_a_cluster(config) else list(machine_mistakes(config, needs, machine))
    if computes_on_gpus(config):
        plan = GpuPlan.of(config, needs)
        found += [] if plan is None else plan.mistakes()
        found += [] if plan is None or joins_a_cluster(config) else plan.host_mistakes(machine.memory)
    elif needs.ranks or needs.engines:
        find_device("cpu")
    if found:
        raise config_error([Mistake(message) for message in found])
    groups = [*config.engine_groups, *config.auxiliary_groups]
    given = (*config.sglang.given, *(flag for group in groups for flag in group.overrides))
    if given:
        from slime_core.rollout.engines.engine import check_sglang_flags  # brings clients of HTTP

        check_sglang_flags(server_arguments(given), "cuda" if computes_on_gpus(config) else "cpu")


def computes_on_gpus(config: RunConfig) -> bool:
    """Whether learner and engines of the run compute on GPUs, as far as can be said before it starts."""
    device = config.cluster.device
    return device == "cuda" or (device == "auto" and finds_gpus(config.cluster.ray_address))


def joins_a_cluster(config: RunConfig) -> bool:
    """Whether the run goes to a Ray cluster that runs already, rather than to one of its own on this machine."""
    return cluster_address(config.cluster.ray_address) is not None


def finds_gpus(ray_address: str | None) -> bool:
    """Whether ``device = auto`` means GPUs: of this machine, or of the nodes of a cluster that is joined.

    A cluster that does not answer is taken to have some.
    """
    address = cluster_address(ray_address)
    return free_resources().can_use_gpus if address is None else _gpus_at(address) != 0


def _gpus_at(address: str) -> int | None:
    from slime_core.runtime.session import gpus_at  # brings Ray, which a look at this machine does without

    return gpus_at(address)


def precision(resolved: Resolved) -> str:
    """The type that learner and engines compute in, and where it came from."""
    origin = resolved.provenance["bf16"]
    if not resolved.config.model.bf16:
        return f"computes in: float32 ({origin})"
    more = "; --no-bf16: float32" if origin.layer == "model" else ""
    return f"computes in: bfloat16 ({origin}{more})"


def machine_mistakes(config: RunConfig, needs: Needs, machine: Machine) -> Iterator[str]:
    """Mistakes about what ``machine`` has too little of for ``needs``."""
    if config.cluster.device == "cuda" and not machine.can_use_gpus:
        found = "this machine shows no GPU driver under /dev"
        if machine.has_gpus:
            found = f"torch {machine.torch} is a build without CUDA"
        yield f"device = cuda, but {found}; accepted here: --device cpu or auto, or a cluster with GPUs (--ray-address)"
    elif config.cluster.device == "cpu" or not machine.can_use_gpus:
        yield from _too_small(needs, machine)
    yield from _missing_kernels(config, machine)
    if config.cluster.device != "cpu" and machine.can_use_gpus and machine.missing_build_tools:
        yield (
            f"engines compile GPU kernels at their start, but {', '.join(machine.missing_build_tools)} is missing; "
            "install the CUDA toolkit, a C++ compiler and ninja (docs/install.md)"
        )


def _missing_kernels(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Mistakes about implementations that the learner is told to use and that this machine does not have."""
    if config.learner.compile_pointwise and COMPILER in machine.missing_build_tools:
        yield f"compile_pointwise needs {COMPILER}, and this machine has none; install g++ (docs/install.md)"
    for setting in KERNEL_SETTINGS:
        used = getattr(config.learner, setting)
        package = KERNEL_PACKAGES.get(used)
        if package is None:
            continue
        flag = f"--{setting.replace('_', '-')}"
        if not machine.can_use_gpus:
            yield f"{setting} = {used} needs a GPU, and torch can use none here; leave {flag} out"
        elif package not in machine.kernel_packages:
            yield f"{setting} = {used}, but {package} is not installed; pip install {package}, or leave {flag} out"


def _too_small(needs: Needs, machine: Machine) -> Iterator[str]:
    """Mistakes about memory and shared memory of a machine that computes on its cores."""
    if needs.memory > machine.memory:
        yield (
            f"memory: {needs.memory_sum} GiB are needed at least, and this machine has {machine.memory / GIB:.1f} GiB "
            "left; take a smaller model, fewer ranks or engines, or a larger machine"
        )
    free, needed = machine.shared_memory, needs.shared_memory
    if free is None or needed > free:
        held = "this machine has none" if free is None else f"it has {_size(free)} free"
        weights = ", or lower --update-weight-buffer-size, or choose --update-weight-transport disk"
        yield (
            f"shared memory: the processes need {_size(needed)} of /dev/shm, and {held}; enlarge it "
            f"(docker run --shm-size){weights if needs.buffer else ''}"
        )


def _size(number: int) -> str:
    return f"{number / 2**20:,.1f} MiB" if number >= 2**20 else f"{number / 2**10:,.1f} KiB"


OPTIONAL_KEYS = ("tool_key", "metadata_key")
"""Settings that name fields which rows may lack."""


def _screen_training(
    config: RunConfig, registry: Registry, options: Mapping[str, object], labels: LabelSamples | None
) -> list[str]:
    """Let the run's data source check its files; return what is wrong with rows that will be left out."""
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
            # Another model decides how long its prompts may be.
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
    """Whether ``path`` is our set, for our model: checked by the tests."""
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
    """Return the limits of prompts; None: the generate function decides what it makes of them."""
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
