"""The devices that a run needs, divided into Ray's bundles; :mod:`.placement` and ``slime check`` call it.

A *bundle* is one device and the core that drives it, or on a CPU a share of the cores. :func:`assign` gives each bundle
that Ray has placed to a process. An engine gets bundles of one node, so that tensor-parallel traffic stays inside a
node; an engine that is larger than every node gets equal parts of several. Colocated engines share the learner's
bundles. The sampler and the router need no device: they mostly wait.

All of it is arithmetic, without Ray.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import groupby
from typing import Literal

from slime_core.config.engines import speculates
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, PlacementError
from slime_core.runtime.machine import cluster_address

Device = Literal["cpu", "gpu"]

FINEST_SHARE = 10_000
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes of a run that need devices.

    Example, 4 learner ranks and 2 engines of 2 GPUs each, 8 bundles: ``Layout(learner_ranks=4, engines=(2, 2),
    device="gpu")``.

    Arguments:
        learner_ranks: processes that train, one device each.
        engines: devices of each inference server of the policy; on a CPU, its processes. Empty: the run only trains.
        device: ``"cpu"`` or ``"gpu"``.
        colocated: engines share the learner's devices.
        critic_ranks: processes of a separate critic, one device each, which they do not share.
        auxiliary: as ``engines``, of auxiliary models and of those that only evaluate; they do not share their devices.
        tensor, critic_tensor: consecutive ranks of learner and critic that share every layer (tensor parallelism).
    """

    learner_ranks: int
    engines: tuple[int, ...]
    device: Device = "cpu"
    colocated: bool = False
    critic_ranks: int = 0
    auxiliary: tuple[int, ...] = ()
    tensor: int = 1
    critic_tensor: int = 1

    @property
    def bundles(self) -> int:
        """Number of bundles."""
        generating = sum(self.engines)
        shared = max(self.learner_ranks, generating) if self.colocated else self.learner_ranks + generating
        return shared + self.critic_ranks + sum(self.auxiliary)

    def __str__(self) -> str:
        learner, engines = f"{self.learner_ranks} (learner ranks)", f"{_products(self.engines)} (engines x devices)"
        needed = f"the larger of {learner} and {engines}" if self.colocated else f"{learner} + {engines}"
        others = f" + {self.critic_ranks} (critic ranks)" if self.critic_ranks else ""
        others += f" + {_products(self.auxiliary)} (further engines x devices)" if self.auxiliary else ""
        return f"{needed}{others} = {self.bundles}"


def _products(sizes: Sequence[int]) -> str:
    return " + ".join(f"{len([*same])} x {size}" for size, same in groupby(sizes)) or "0"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The resources of a cluster in total, and those of the nodes with the most GPUs and with the most cores."""

    cpus: float
    gpus: float = 0
    largest_node_gpus: float = 0
    largest_node_cpus: float = math.inf


@dataclass(frozen=True, slots=True)
class Plan:
    """A request to Ray: bundles for ``layout`` of ``cpus`` cores and ``gpus`` GPUs each, of which the largest node
    holds ``largest_node``."""

    layout: Layout
    cpus: float
    gpus: float
    largest_node: float = math.inf

    @property
    def bundle(self) -> dict[str, float]:
        """Ray's resources of one bundle."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    @property
    def resources_per_actor(self) -> tuple[float, float]:
        """Cores and GPUs that one actor takes of its bundle: half of it if a learner rank and an engine share it."""
        if not self.layout.colocated:
            return self.cpus, self.gpus
        return _rounded_down(self.cpus / 2), _rounded_down(self.gpus / 2)

    def __str__(self) -> str:
        kind = f"{self.gpus:g} GPU + {self.cpus:g} CPU" if self.gpus else f"{self.cpus:g} CPU"
        shared = " (the processes share cores)" if self.cpus < 1 else ""
        return f"{self.layout} bundles of {kind}{shared}"


@dataclass(frozen=True, slots=True)
class PlacedBundle:
    """A bundle that Ray has placed: its node and its device.

    Arguments:
        index: position of the bundle in the placement group.
        node: the cluster's name of the node.
        address: IP address of the node.
        device: the GPU's index or identifier on its node, as CUDA_VISIBLE_DEVICES takes it; None on a CPU.
    """

    index: int
    node: str
    address: str
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The bundles of each process: one bundle per rank of the learner and of a separate critic, in rank order, and one
    tuple of bundles per engine of the policy and of auxiliary models."""

    learner: tuple[PlacedBundle, ...]
    engines: tuple[tuple[PlacedBundle, ...], ...]
    critic: tuple[PlacedBundle, ...] = ()
    auxiliary: tuple[tuple[PlacedBundle, ...], ...] = ()


def device_of(config: RunConfig, *, num_gpus: int) -> Device:
    """Return the device of learner and engines; ``auto``: GPUs if the cluster has any.

    Arguments:
        num_gpus: GPUs of the cluster.
    """
    setting = config.cluster.device
    return "gpu" if setting == "cuda" or (setting == "auto" and _can_use_gpus(config, num_gpus)) else "cpu"


def require_device_support(config: RunConfig, layout: Layout) -> None:
    """Raise ConfigError if a setting does not work on the device of ``layout``.

    Raises:
        ConfigError: see above. Conflicts that need no device have been refused before.
    """
    if layout.device == "gpu" and layout.colocated and config.transport == "distributed":
        raise ConfigError(
            "update_weight_transport = distributed with colocate on GPUs: NCCL takes no two processes on one GPU, and "
            "the first learner rank shares its GPU with an engine. Choose tensor, disk or auto."
        )
    groups = (*config.engine_groups, *config.auxiliary_groups)
    split = any(group.worker_type != "regular" for group in groups)
    if layout.device == "cpu" and split:
        raise ConfigError(
            "separate prefill and decode engines send the KV cache from GPU to GPU, but this run has no GPU: device = "
            f"{config.cluster.device} means cpu here. Leave prefill_num_servers and worker_type out, or run on GPUs."
        )
    drafts = any(map(speculates, (config.sglang.given, *(group.overrides for group in groups))))
    if layout.device == "cpu" and groups and drafts:
        raise ConfigError(
            "speculative_algorithm needs compiled kernels that SGLang has for GPUs only, and this run has none: device "
            f"= {config.cluster.device} means cpu here. Leave it out, or run on GPUs."
        )


def _can_use_gpus(config: RunConfig, num_gpus: int) -> bool:
    # The version of torch marks a CPU build; importing torch to find out would cost the driver seconds. The driver of
    # a joined cluster may be on a node without a GPU, with another build than the nodes that compute.
    joins = cluster_address(config.cluster.ray_address) is not None
    return num_gpus > 0 and (joins or not metadata.version("torch").endswith("+cpu"))


def requested_layout(config: RunConfig, device: Device, *, learner_ranks: int) -> Layout:
    """Return the layout that the settings request: learner, critic, the policy's engines and auxiliary engines.

    Arguments:
        device: the device that :func:`device_of` returned.
        learner_ranks: processes that train; 0: the run does not train.
    """
    engines, auxiliary = (
        tuple(group.size for group in groups for _ in range(group.num_engines))
        for groups in (config.engine_groups, config.auxiliary_groups)
    )
    return Layout(
        learner_ranks,
        engines,
        device,
        colocated=config.cluster.colocate and learner_ranks > 0 and bool(engines),
        critic_ranks=config.num_critic_ranks if learner_ranks else 0,
        auxiliary=auxiliary,
        tensor=config.parallel.tensor_model_parallel_size,
        critic_tensor=config.critic_parallel.tensor_model_parallel_size,
    )


def plan(layout: Layout, *, capacity: Capacity) -> Plan:
    """Return the request for the bundles of ``layout``.

    On a CPU each bundle requests ``min(1, cores / processes)``: more processes than cores share them rather than fail.
    On GPUs nothing is shared.

    Raises:
        PlacementError: the cluster has too few devices or cores; the message has the arithmetic.
    """
    if layout.bundles < 1:
        raise PlacementError(f"The layout has no process: {layout}. Give --actor-num-gpus-per-node at least 1.")
    return _gpu_plan(layout, capacity) if layout.device == "gpu" else _cpu_plan(layout, capacity)


def _cpu_plan(layout: Layout, capacity: Capacity) -> Plan:
    share = min(1.0, _rounded_down(capacity.cpus / layout.bundles))
    if share <= 0:
        raise PlacementError(
            f"The run needs {layout} processes, but the cluster has {capacity.cpus:g} CPU cores. Add a node."
        )
    return Plan(layout, cpus=share, gpus=0, largest_node=capacity.largest_node_cpus // share)


def _rounded_down(amount: float) -> float:
    return math.floor(amount * FINEST_SHARE) / FINEST_SHARE


def _gpu_plan(layout: Layout, capacity: Capacity) -> Plan:
    needed = layout.bundles
    if needed > capacity.gpus:
        flags = "--actor-num-nodes, --actor-num-gpus-per-node"
        flags += ", --rollout-num-gpus or --critic-num-gpus" if layout.critic_ranks else " or --rollout-num-gpus"
        raise PlacementError(
            f"The run needs {layout} GPUs, but the cluster has {capacity.gpus:g}, {needed - capacity.gpus:g} too few. "
            f"Lower {flags}, or add nodes to the cluster."
        )
    if needed > capacity.cpus:
        raise PlacementError(
            f"The run needs {needed} CPU cores, one to drive each of {layout} GPUs, but the cluster has "
            f"{capacity.cpus:g}. Start Ray with --num-cpus, or lower --rollout-num-gpus."
        )
    return Plan(layout, cpus=1, gpus=1, largest_node=capacity.largest_node_gpus)


def assign(layout: Layout, *, bundles: Sequence[PlacedBundle], largest_node: float = math.inf) -> Assignment:
    """Assign the placed bundles, ordered by node and device, to the processes of ``layout``.

    Order of assignment:

    1. auxiliary engines, from the last node backwards;
    2. engines or learner: first the one with the larger blocks on one node, then the other one. A block is an engine or
       a tensor-parallel group of learner ranks. Engines are assigned from the last node backwards, so that the
       learner's ranks stay together; the learner from the first node on. Colocated, both are assigned the same bundles,
       from the first node on;
    3. a separate critic: the first bundles that learner and engines leave; colocated, the last ones.

    An engine that is larger than every node gets equal parts of as few nodes as can hold it. A tensor-parallel group
    that is larger than every node spans nodes.

    Arguments:
        largest_node: number of bundles that the largest node can hold, including those in use.

    Raises:
        PlacementError: the free bundles of the nodes do not add up to whole engines, or whole tensor-parallel groups.
    """
    ordered = sorted(bundles, key=_order)
    tensor, critic_tensor = _group_size(ordered, layout.tensor), _group_size(ordered, layout.critic_tensor)
    of_engines = partial(_blocks, largest_node=largest_node)
    auxiliary = of_engines(ordered, layout.auxiliary)
    ordered = _without(ordered, auxiliary)
    if layout.colocated:
        ordered, unassigned = (
            ordered[: len(ordered) - layout.critic_ranks],
            ordered[len(ordered) - layout.critic_ranks :],
        )
        engines = of_engines(ordered[::-1], layout.engines[::-1])[::-1]
        learner = _first_ranks(ordered, layout.learner_ranks, tensor, LEARNER)
    elif tensor > max(layout.engines, default=1):
        learner = _first_ranks(ordered, layout.learner_ranks, tensor, LEARNER)
        engines = of_engines(_without(ordered, [learner]), layout.engines)
        unassigned = _without(ordered, [learner, *engines])
    else:
        engines = of_engines(ordered, layout.engines)
        learner = _first_ranks(_without(ordered, engines), layout.learner_ranks, tensor, LEARNER)
        unassigned = _without(ordered, [learner, *engines])
    critic = _first_ranks(unassigned, layout.critic_ranks, critic_tensor, CRITIC)
    return Assignment(learner, engines, critic, auxiliary)


def _without(ordered: Sequence[PlacedBundle], blocks: Sequence[Sequence[PlacedBundle]]) -> list[PlacedBundle]:
    return [bundle for bundle in ordered if not any(bundle in block for block in blocks)]


def _group_size(ordered: Sequence[PlacedBundle], tensor: int) -> int:
    """Return how many bundles of one node a tensor-parallel group needs; 1 if the group is larger than every node."""
    largest = max(Counter(bundle.node for bundle in ordered).values(), default=0)
    return tensor if tensor <= largest else 1


def _first_ranks(ordered: Sequence[PlacedBundle], count: int, tensor: int, what: str) -> tuple[PlacedBundle, ...]:
    """Take the bundles of ``count`` ranks from the first node on, each tensor-parallel group on one node."""
    blocks = _blocks(ordered[::-1], [tensor] * (count // tensor), what)
    return tuple(bundle for block in reversed(blocks) for bundle in block)


ENGINES = "engines of {size} GPUs, each on {nodes}"
LEARNER = "tensor-parallel groups of {size} learner ranks, each on {nodes}"
CRITIC = "tensor-parallel groups of {size} critic ranks, each on {nodes}"


def _blocks(
    ordered: Sequence[PlacedBundle], sizes: Sequence[int], what: str = ENGINES, *, largest_node: float = math.inf
) -> tuple[tuple[PlacedBundle, ...], ...]:
    """Take a block of bundles for each of ``sizes``, the last block from the end: on one node or, if it is larger than
    ``largest_node``, in equal parts on several nodes."""
    free: dict[str, list[PlacedBundle]] = {}
    for bundle in ordered:
        free.setdefault(bundle.node, []).append(bundle)
    blocks = [_take(free, size, _num_nodes(size, largest_node), sizes, what) for size in reversed(sizes)]
    return tuple(blocks[::-1])


def _num_nodes(size: int, largest_node: float) -> int:
    return next((nodes for nodes in range(1, size) if size % nodes == 0 and size // nodes <= largest_node), size)


def _take(
    free: dict[str, list[PlacedBundle]], size: int, num_nodes: int, sizes: Sequence[int], what: str
) -> tuple[PlacedBundle, ...]:
    part = size // num_nodes
    holding = [node for node in reversed(free.values()) if len(node) >= part][:num_nodes]
    if len(holding) == num_nodes:
        block = [bundle for node in holding for bundle in node[-part:]]
        for node in holding:
            del node[-part:]
        return tuple(sorted(block, key=_order))
    nodes = "one node" if num_nodes == 1 else f"{num_nodes} nodes, {part} on each"
    available = ", ".join(f"{node[0].address}: {len(node)}" for node in free.values() if node)
    raise PlacementError(
        f"The run needs {sizes.count(size)} {what.format(size=size, nodes=nodes)}, but the devices left are "
        f"{available or 'none'}. Choose sizes of engines and tensor-parallel groups that divide a node's devices."
    )


def _order(bundle: PlacedBundle) -> tuple[list[tuple[int, str]], str, list[tuple[int, str]], int]:
    return _natural(bundle.address), bundle.node, _natural(bundle.device or ""), bundle.index


def _natural(text: str) -> list[tuple[int, str]]:
    # 10.0.0.9 before 10.0.0.10, device 2 before device 10, and names among themselves.
    return [(int(part), "") if part.isdigit() else (-1, part) for part in text.split(".")]
