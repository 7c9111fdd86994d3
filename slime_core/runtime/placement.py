"""The placement group of a run, and the processes of its bundles."""

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
from slime_core.runtime.layout import Capacity, Layout, Plan, Seat, assign, plan


@dataclass(frozen=True, slots=True)
class Slot:
    """A seat that an actor can be started in: what it takes of the bundle, and the devices it sees.

    Arguments:
        group: the placement group.
        seat: which bundle, where.
        block: all seats of the process or engine, node by node; the first is ``seat``.
        cpus, gpus: what the actor takes.
        env: environment variables that show the actor its devices: all those of its engine on this node.
        further: of an engine over several nodes, a slot on each of the others.
    """

    group: PlacementGroup
    seat: Seat
    cpus: float
    gpus: float
    env: dict[str, str] = field(default_factory=dict)
    block: tuple[Seat, ...] = ()
    further: tuple[Slot, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """One slot a rank of the learner and of a separate critic, in rank order, and one an engine, of the policy and
    auxiliary; as a context manager it releases them at the end."""

    plan: Plan
    learner: tuple[Slot, ...]
    engines: tuple[Slot, ...]
    group: PlacementGroup
    critic: tuple[Slot, ...] = ()
    auxiliary: tuple[Slot, ...] = ()

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *reason: object) -> None:
        self.release()

    @property
    def nodes(self) -> set[str]:
        """Ids of the nodes with a process that reads a model."""
        slots = (*self.learner, *self.engines, *self.critic, *self.auxiliary)
        return {seat.node for slot in slots for seat in slot.block}

    def release(self) -> None:
        """Release all bundles; every actor in them dies."""
        remove_placement_group(self.group)


def place(layout: Layout, *, timeout_s: float = 60.0) -> Placement:
    """Bundles for everything in ``layout``, all or none.

    Arguments:
        timeout_s: how long to wait for devices that other jobs hold.

    Raises:
        PlacementError: at once if the cluster is too small; after ``timeout_s`` if other jobs hold the devices.
    """
    wanted = plan(layout, capacity=capacity())
    name = f"slime-{os.getpid()}-{time.time_ns()}"  # unique, as Ray wants it; other jobs read it
    group = placement_group([dict(wanted.bundle) for _ in range(layout.bundles)], strategy="PACK", name=name)
    if not group.wait(timeout_s):
        remove_placement_group(group)
        free = ray.available_resources()
        raise PlacementError(
            f"The run needs {wanted}. The cluster is large enough, but has {free.get('CPU', 0):g} CPU and "
            f"{free.get('GPU', 0):g} GPU free, and no other job released any within {timeout_s:g} s. `ray status` and "
            "`ray list placement-groups` show what holds them. Wait for it, or lower --rollout-num-gpus or "
            "--actor-num-gpus-per-node."
        )
    seats = assign(layout, seats=_seats(group, wanted), largest_node=wanted.largest_node)
    return Placement(
        wanted,
        learner=tuple(_slot(group, wanted, (seat,)) for seat in seats.learner),
        engines=tuple(_slot(group, wanted, block) for block in seats.engines),
        group=group,
        critic=tuple(_slot(group, wanted, (seat,)) for seat in seats.critic),
        auxiliary=tuple(_slot(group, wanted, block) for block in seats.auxiliary),
    )


def nearest_ranks(engines: Sequence[Slot], learner: Sequence[Slot]) -> tuple[tuple[int, ...], ...]:
    """For each seat of each engine, the learner rank that shares it, or else the first on its node, or else rank 0."""
    shares = {slot.seat.bundle: rank for rank, slot in enumerate(learner)}
    on_node = {slot.seat.node: rank for rank, slot in reversed(list(enumerate(learner)))}
    return tuple(
        tuple(shares.get(seat.bundle, on_node.get(seat.node, 0)) for seat in engine.block) for engine in engines
    )


def capacity() -> Capacity:
    """The resources of the cluster's living nodes in total, in use or not."""
    nodes: list[dict[str, float]] = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = [node.get("GPU", 0.0) for node in nodes]
    cpus = [node.get("CPU", 0.0) for node in nodes]
    return Capacity(sum(cpus), sum(gpus), max(gpus, default=0.0), max(cpus, default=0.0))


def _seats(group: PlacementGroup, wanted: Plan) -> list[Seat]:
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    count = wanted.layout.bundles
    devices = _devices(group, count=count) if wanted.gpus else [None] * count
    return [Seat(index, nodes[index], addresses[nodes[index]], devices[index]) for index in range(count)]


def _devices(group: PlacementGroup, *, count: int) -> Sequence[str | None]:
    # Ray assigns a GPU to a bundle when something runs in it, so a task in each bundle reads its own.
    look: Any = ray.remote(num_cpus=0, num_gpus=1)(_visible_device)
    strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(count)]
    devices: list[str] = ray.get([look.options(scheduling_strategy=s).remote() for s in strategies], timeout=120)
    return devices


def _visible_device() -> str:
    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def _slot(group: PlacementGroup, wanted: Plan, block: tuple[Seat, ...]) -> Slot:
    cpus, gpus = wanted.tenant
    nodes = [tuple(part) for _, part in groupby(block, key=lambda seat: seat.node)]
    first, *further = (Slot(group, part[0], cpus, gpus, env=_visible(part), block=part) for part in nodes)
    return replace(first, block=block, further=tuple(further))


def _visible(block: tuple[Seat, ...]) -> dict[str, str]:
    devices = [seat.device for seat in block if seat.device is not None]
    if not devices:
        return {}
    # An actor runs in one bundle but its engine uses several devices: Ray must not restrict it to the bundle's.
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices), "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
