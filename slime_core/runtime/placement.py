"""The placement group of a run, and the placement of each actor in its bundles."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_core.errors import PlacementError
from slime_core.runtime.layout import Capacity, Layout, PlacedBundle, Plan, assign, plan

SLICE_S = 1.0
"""Longest wait in Ray's own code between two looks at Ctrl-C."""


@dataclass(frozen=True, slots=True)
class ActorPlacement:
    """The place of an actor: its bundle, the resources that it takes of the bundle, and the devices it sees.

    Arguments:
        group: the placement group.
        bundle: the bundle in which the actor runs.
        block: all bundles of the process or engine, node by node; the first is ``bundle``.
        cpus, gpus: resources of the actor.
        env: environment variables that show the actor its devices: all devices of its engine on this node.
        further: for an engine over several nodes, a placement on each further node.
    """

    group: PlacementGroup
    bundle: PlacedBundle
    cpus: float
    gpus: float
    env: dict[str, str] = field(default_factory=dict)
    block: tuple[PlacedBundle, ...] = ()
    further: tuple[ActorPlacement, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of every actor: one per rank of the learner and of a separate critic, in rank order, and one per
    engine of the policy and of auxiliary models. As a context manager it releases the bundles at the end."""

    plan: Plan
    learner: tuple[ActorPlacement, ...]
    engines: tuple[ActorPlacement, ...]
    group: PlacementGroup
    critic: tuple[ActorPlacement, ...] = ()
    auxiliary: tuple[ActorPlacement, ...] = ()

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *reason: object) -> None:
        self.release()

    @property
    def nodes(self) -> set[str]:
        """Ids of the nodes with a process that reads a model."""
        placements = (*self.learner, *self.engines, *self.critic, *self.auxiliary)
        return {bundle.node for placement in placements for bundle in placement.block}

    def release(self) -> None:
        """Release all bundles; every actor in them dies."""
        remove_placement_group(self.group)


def place(layout: Layout, *, timeout_s: float = 60.0) -> Placement:
    """Reserve all bundles of ``layout``.

    Arguments:
        timeout_s: longest time to wait for devices that other jobs hold.

    Raises:
        PlacementError: at once if the cluster is too small; after ``timeout_s`` if other jobs hold the devices.
    """
    request = plan(layout, capacity=capacity())
    name = f"slime-{os.getpid()}-{time.time_ns()}"  # Ray requires a unique name; other jobs read it
    group = placement_group([dict(request.bundle) for _ in range(layout.bundles)], strategy="PACK", name=name)
    # In slices: Ray waits in native code, and Ctrl-C would come only at the end.
    deadline_s = time.monotonic() + timeout_s
    while not (is_placed := group.wait(SLICE_S)) and time.monotonic() < deadline_s:
        pass
    if not is_placed:
        remove_placement_group(group)
        free = ray.available_resources()
        raise PlacementError(
            f"The run needs {request}. The cluster is large enough, but has {free.get('CPU', 0):g} CPU and "
            f"{free.get('GPU', 0):g} GPU free, and no other job released any within {timeout_s:g} s. `ray status` and "
            "`ray list placement-groups` show what holds them. Wait for it, or lower --rollout-num-gpus or "
            "--actor-num-gpus-per-node."
        )
    assigned = assign(layout, bundles=_placed_bundles(group, request), largest_node=request.largest_node)
    return Placement(
        request,
        learner=tuple(_actor_placement(group, request, (bundle,)) for bundle in assigned.learner),
        engines=tuple(_actor_placement(group, request, block) for block in assigned.engines),
        group=group,
        critic=tuple(_actor_placement(group, request, (bundle,)) for bundle in assigned.critic),
        auxiliary=tuple(_actor_placement(group, request, block) for block in assigned.auxiliary),
    )


def nearest_ranks(engines: Sequence[ActorPlacement], learner: Sequence[ActorPlacement]) -> tuple[tuple[int, ...], ...]:
    """Return, for each bundle of each engine, the learner rank that shares it, or the first rank on its node, or 0."""
    shares = {placement.bundle.index: rank for rank, placement in enumerate(learner)}
    on_node = {placement.bundle.node: rank for rank, placement in reversed(list(enumerate(learner)))}
    return tuple(
        tuple(shares.get(bundle.index, on_node.get(bundle.node, 0)) for bundle in engine.block) for engine in engines
    )


def capacity() -> Capacity:
    """Return the total resources of the cluster's living nodes, including those in use."""
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = [node.get("GPU", 0.0) for node in nodes]
    cpus = [node.get("CPU", 0.0) for node in nodes]
    return Capacity(sum(cpus), sum(gpus), max(gpus, default=0.0), max(cpus, default=0.0))


def _placed_bundles(group: PlacementGroup, request: Plan) -> list[PlacedBundle]:
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    count = request.layout.bundles
    devices = _devices(group, count=count) if request.gpus else [None] * count
    return [PlacedBundle(index, nodes[index], addresses[nodes[index]], devices[index]) for index in range(count)]


def _devices(group: PlacementGroup, *, count: int) -> Sequence[str | None]:
    # Ray assigns a GPU to a bundle when something runs in it, so a task in each bundle reads its GPU.
    look: Any = ray.remote(num_cpus=0, num_gpus=1)(_visible_device)
    strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(count)]
    devices: list[str] = ray.get([look.options(scheduling_strategy=s).remote() for s in strategies], timeout=120)
    return devices


def _visible_device() -> str:
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def _actor_placement(group: PlacementGroup, request: Plan, block: tuple[PlacedBundle, ...]) -> ActorPlacement:
    cpus, gpus = request.resources_per_actor
    nodes = [tuple(part) for _, part in groupby(block, key=lambda bundle: bundle.node)]
    first, *further = (ActorPlacement(group, part[0], cpus, gpus, env=_visible(part), block=part) for part in nodes)
    return replace(first, block=block, further=tuple(further))


def _visible(block: tuple[PlacedBundle, ...]) -> dict[str, str]:
    devices = [bundle.device for bundle in block if bundle.device is not None]
    if not devices:
        return {}
    # An actor runs in one bundle but its engine uses several devices: Ray must not restrict it to the bundle's.
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
