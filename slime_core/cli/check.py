"""``slime check``: the checks of ``slime run`` before it starts a process, and its plan of processes.

It starts nothing and writes no file. A mistake is an error with exit code 2. The plan is printed before the check of
this machine, so that a run for another machine can be planned here.

The plan is computed without a cluster. For this machine it is the plan of the run. For other machines it prints its
assumptions, and Ray decides on machines and bundles when the run starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_core.cli.activation import resolve, with_leading_config
from slime_core.cli.labels import LabelSamples, check_labels
from slime_core.cli.memory import GpuPlan, Needs, chosen
from slime_core.cli.plugins import because
from slime_core.cli.preflight import (
    check_files,
    check_machine,
    check_resume,
    computes_on_gpus,
    finds_gpus,
    joins_a_cluster,
    precision,
    print_warning,
)
from slime_core.cli.run import changed_settings, check_plugins, half_of, options_of, resumed
from slime_core.components.selection import check_targets, has_critic, selected
from slime_core.config.explain import to_toml
from slime_core.config.model_config import architecture_of
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, PlacementError
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.prompt_filter import BadRows
from slime_core.runtime.layout import (
    Assignment,
    Capacity,
    Device,
    Layout,
    PlacedBundle,
    Plan,
    assign,
    plan,
    requested_layout,
)
from slime_core.runtime.machine import (
    Machine,
    allocator_environment,
    free_resources,
    nccl_environment,
    rank_environment,
)

USAGE = """\
slime check CONFIG.toml [flags of slime run]
slime check [flags of slime run]

Prints all mistakes that slime run would find, or the processes that it would start. Starts and writes nothing."""


def execute(argv: Sequence[str]) -> int:
    """Check the run of ``argv``, print its plan, and return the exit code, 0.

    Raises:
        PluginError: a target cannot be imported or does not fit its contract, the checkpoint had other plugins, or an
            option cannot be written to config.toml.
        DataError: a prompt file, with file and line.
        ConfigError: the start weights, a checkpoint that cannot be resumed, or machines that are too small.
    """
    resolved, active = resolve(with_leading_config(argv))
    config, architecture = resolved.config, architecture_of(resolved.config.model.hf_checkpoint) or ""
    check_targets(config, active.registry, trains=True, architecture=architecture, heavy=True)
    resume = resumed(config, active.registry)
    first = 0 if resume is None else resume.state.step
    labels, options = LabelSamples(), resolved.plugin_options
    left_out = check_files(config, active.registry, trains=True, first=first, options=options, labels=labels)
    check_plugins(active.manifest, resume, allowed=config.run.allow_plugin_change, without=active.without)
    options = options_of(resolved, active)
    check_resume(config, resume)
    check_labels(labels, config, active.registry, active.manifest, options=options, warn=print_warning)
    changes = list(changed_settings(resume, to_toml(resolved)))
    needs = Needs.of(config, trains=True, critic=has_critic(config, active.registry))
    print(f"OK: settings, {'prompts' if config.debug.generates else 'rollouts'} and weights are valid")
    if left_out:
        bad = BadRows()
        for mistake in left_out:
            bad.add(mistake)
        print(f"{len(left_out)} of the rows read are invalid and will be left out")
        for line in bad.news():
            print(f"  {line}")
    if resume is not None:
        print("\n".join([f"resumes from {resume.path}", *changes]))
    print(f"plugins: {active.manifest}")
    for used in selected(config, active.registry, trains=True, architecture=architecture):
        print(f"  {used.kind.words} {used.component.name} of {used.plugin.name}, {because(used, resolved)}")
    computes = f"device {config.cluster.device}: {'cuda' if computes_on_gpus(config) else 'cpu'}"
    for line in (computes, precision(resolved), *chosen(resolved), "\nplacement"):
        print(line)
    try:
        lines = list(placement_plan(config, needs, free_resources()))
    except PlacementError as refused:  # a mistake in the settings, since nothing runs yet
        raise ConfigError(f"{refused}") from refused
    for line in lines:
        print(f"  {line}")
    check_machine(config, needs)
    print("\nnothing was started; slime run with the same arguments starts the run")
    return 0


HERE = "127.0.0.1"
COMMON_GPUS = 8
"""GPUs of the machine that is assumed for a run on one machine."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines that a plan is made for.

    Arguments:
        count: number of machines.
        cpus, gpus: cores and GPUs of each.
        assumed: the reason for these assumptions; empty for this machine.
    """

    count: int
    cpus: int
    gpus: int
    assumed: str = ""

    def __str__(self) -> str:
        each = f"{self.cpus} cores" + (f" and {self.gpus} GPUs" if self.gpus else "")
        if not self.assumed:
            return f"this machine: {each}"
        return f"assumed: {self.count} machine{'s' * (self.count > 1)} of {each} each, {self.assumed}"


def layout_of(config: RunConfig, machine: Machine) -> Layout:
    """Return the layout that the run requests. This machine, or the cluster, decides ``device = auto``."""
    cluster = config.cluster
    has_gpus = finds_gpus(cluster.ray_address) if joins_a_cluster(config) else machine.can_use_gpus
    auto: Device = "gpu" if has_gpus else "cpu"
    device: Device = {"auto": auto, "cuda": "gpu", "cpu": "cpu"}[cluster.device]
    return requested_layout(config, device, learner_ranks=config.num_started_ranks)


def expected_machines(config: RunConfig, layout: Layout, machine: Machine) -> Machines:
    """Return this machine, or the assumed machines of a cluster."""
    is_local = not joins_a_cluster(config)
    if layout.device == "cpu":
        nodes = 1 if is_local else config.cluster.actor_num_nodes
        return Machines(nodes, machine.cores, 0, "" if is_local else "actor_num_nodes machines like this one")
    if is_local and machine.can_use_gpus and (gpus := _gpus_here()):
        return Machines(1, machine.cores, gpus)
    requested = config.cluster
    if requested.actor_num_nodes == 1 and layout.bundles <= COMMON_GPUS:
        return Machines(1, layout.bundles, layout.bundles, "as many GPUs as the run requests")
    each = max(requested.actor_num_gpus_per_node, requested.rollout_num_gpus_per_engine)
    why = "as many GPUs as the larger of actor_num_gpus_per_node and rollout_num_gpus_per_engine, a core for each"
    return Machines(-(-layout.bundles // each), each, each, why)


def placement_plan(config: RunConfig, needs: Needs, machine: Machine) -> Iterator[str]:
    """Yield the lines of the plan.

    Raises:
        PlacementError: the machines are too small; with the arithmetic.
    """
    layout = layout_of(config, machine)
    machines = expected_machines(config, layout, machine)
    cpus, gpus = machines.count * machines.cpus, machines.count * machines.gpus
    placement = plan(layout, capacity=Capacity(cpus=cpus, gpus=gpus, largest_node_gpus=machines.gpus))
    assigned = assign(layout, bundles=_placed_bundles(placement, machines))
    yield f"{placement}"
    yield f"on {machines}" if not machines.assumed else f"{machines}"
    yield from _rows(config, layout, assigned)
    if config.debug.generates:
        yield "sampler, router: one process each, without a reserved core"
    else:
        yield "sampler: one process, without a reserved core"
    if layout.device == "cpu":
        yield f"memory in GiB, at least: {needs.memory_sum}; plus activations and the KV cache"
    elif memory := GpuPlan.of(config, needs):
        yield from memory.lines()
    if layout.device == "gpu":
        for process, variables in (
            ("a rank", rank_environment(config, on_gpu=True)),
            ("an engine", nccl_environment(config) | allocator_environment(config)),
        ):
            if variables:
                yield f"environment of {process}: {' '.join(f'{name}={value}' for name, value in variables.items())}"
    yield half_of(config) or f"weights are published by: {config.transport}"


def _placed_bundles(placement: Plan, machines: Machines) -> list[PlacedBundle]:
    """Return the bundles as Ray packs them: one machine after the other."""
    each = machines.gpus or -(-placement.layout.bundles // machines.count)
    bundles = []
    for number in range(placement.layout.bundles):
        node, place = divmod(number, each)
        name = f"machine {node}" if machines.assumed else "this machine"
        # Bundles are ordered by address; these numbers replace addresses that are not known yet.
        address = f"{node}" if machines.assumed else HERE
        bundles.append(PlacedBundle(number, name, address, f"{place}" if machines.gpus else None))
    return bundles


def _rows(config: RunConfig, layout: Layout, assigned: Assignment) -> Iterator[str]:
    yield from _ranks("learner rank", ParallelLayout.of(config.parallel), assigned.learner)
    if assigned.critic:
        yield from _ranks("critic rank", ParallelLayout.of(config.critic_parallel), assigned.critic)
    if config.engine.rollout_external_engine_addrs:
        yield f"  external engines: {', '.join(config.engine.rollout_external_engine_addrs)}"
    names = []
    for number, block in enumerate(assigned.engines):
        ranks = [str(rank) for rank, bundle in enumerate(assigned.learner) if bundle in block]
        shares = f", shares with learner rank{'s' * (len(ranks) != 1)} {', '.join(ranks) or 'none'}"
        names.append((f"engine {number}", shares if layout.colocated else ""))
    for model in config.engine.engine_models:
        names += [(model.name, ", auxiliary model")] * sum(group.num_engines for group in model.groups)
    evaluating = sum(group.num_engines for group in config.eval_groups)
    names += [(f"eval engine {number}", ", evaluations alone") for number in range(evaluating)]
    for (name, purpose), block in zip(names, (*assigned.engines, *assigned.auxiliary), strict=True):
        size = f"tensor parallel over {len(block)}" if len(block) > 1 else "whole"
        yield f"  {name:<16} {_place(*block):<28} {size}{purpose}"


def _ranks(name: str, cut: ParallelLayout, bundles: Sequence[PlacedBundle]) -> Iterator[str]:
    for rank, bundle in enumerate(bundles):
        at = cut.coordinates(rank, world_size=len(bundles))
        where = ", ".join(f"{axis} {place}" for axis, place in at.items())
        yield f"  {f'{name} {rank}':<16} {_place(bundle):<28} {where}"


def _place(*block: PlacedBundle) -> str:
    devices = [bundle.device for bundle in block if bundle.device is not None]
    if devices:
        return f"{block[0].node}, GPU {', '.join(devices)}"
    return f"{block[0].node}, bundle {', '.join(str(bundle.index) for bundle in block)}"


def _gpus_here() -> int:
    """Return the number of NVIDIA GPUs that this process may use; 0 if they cannot be counted."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
