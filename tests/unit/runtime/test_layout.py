"""The arithmetic of placement."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slime_core.errors import PlacementError
from slime_core.runtime.layout import Capacity, Layout, PlacedBundle, Plan, assign, plan
from slime_core.runtime.placement import ActorPlacement, nearest_ranks

GPUS_8 = Capacity(cpus=64, gpus=8, largest_node_gpus=8)
GPUS_16 = Capacity(cpus=128, gpus=16, largest_node_gpus=8)


@pytest.mark.parametrize(
    ("layout", "capacity", "count", "bundle"),
    [
        (Layout(1, (1,)), Capacity(cpus=2), 2, {"CPU": 1.0}),
        (Layout(1, (1,)), Capacity(cpus=64), 2, {"CPU": 1.0}),
        (Layout(1, (1,)), Capacity(cpus=1), 2, {"CPU": 0.5}),
        (Layout(4, (1,)), Capacity(cpus=2), 5, {"CPU": 0.4}),
        (Layout(2, (1,)), Capacity(cpus=2), 3, {"CPU": 0.6666}),
        (Layout(2, ()), Capacity(cpus=2), 2, {"CPU": 1.0}),
        (Layout(8, (1,) * 8, device="gpu"), GPUS_16, 16, {"CPU": 1, "GPU": 1}),
        (Layout(4, (2, 2), "gpu"), GPUS_16, 8, {"CPU": 1, "GPU": 1}),
        (Layout(8, (2, 2, 2, 2), "gpu", colocated=True), GPUS_8, 8, {"CPU": 1, "GPU": 1}),
        (Layout(2, (1,), colocated=True), Capacity(cpus=2), 2, {"CPU": 1.0}),
        (Layout(1, (2,)), Capacity(cpus=2), 3, {"CPU": 0.6666}),
        (Layout(8, (), "gpu"), Capacity(cpus=8, gpus=8, largest_node_gpus=4), 8, {"CPU": 1, "GPU": 1}),
    ],
)
def test_a_layout_becomes_equal_bundles(
    layout: Layout, capacity: Capacity, count: int, bundle: dict[str, float]
) -> None:
    wanted = plan(layout, capacity=capacity)
    assert (layout.bundles, wanted.bundle) == (count, bundle)


@pytest.mark.parametrize(
    ("layout", "capacity", "numbers"),
    [
        (Layout(8, (4, 4, 4, 4), "gpu"), GPUS_16, r"8 \(learner ranks\) \+ 4 x 4 .* = 24 GPUs.* 16, 8 too"),
        (
            Layout(8, (2, 2, 2, 2), "gpu", critic_ranks=4),
            GPUS_16,
            r"\+ 4 \(critic ranks\) = 20 GPUs.* 16, 4 too.*--rollout-num-gpus.*--critic-num-gpus",
        ),
        (Layout(9, (1,) * 8, "gpu"), GPUS_16, "--actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus, "),
        (Layout(8, (1,) * 8, "gpu"), Capacity(8, 16, 8), "16 CPU cores.* 8"),
        (Layout(8, (8, 8), "gpu", colocated=True), GPUS_8, r" 8 \(learner ranks\) and 2 x 8 .* = 16 GPUs"),
        (Layout(1, (1,)), Capacity(0), "= 2 processes, .* 0 CPU cores"),
        (Layout(0, ()), Capacity(2), "no process"),
    ],
)
def test_a_layout_beyond_the_cluster_is_refused_with_the_arithmetic(
    layout: Layout, capacity: Capacity, numbers: str
) -> None:
    with pytest.raises(PlacementError, match=numbers):
        plan(layout, capacity=capacity)


def test_shares_of_a_core_never_add_up_to_more_than_the_cores() -> None:
    shares = [plan(Layout(ranks, (1,)), capacity=Capacity(cpus=2)).cpus * (ranks + 1) for ranks in range(1, 200)]
    assert max(shares) <= 2.0


def test_two_actors_of_a_shared_bundle_fit_into_it() -> None:
    plans = [plan(Layout(ranks, (1,) * ranks, colocated=True), capacity=Capacity(cpus=2)) for ranks in range(1, 200)]
    assert all(2 * wanted.resources_per_actor[0] <= wanted.cpus for wanted in plans)
    assert plan(Layout(2, (2,), "gpu", colocated=True), capacity=GPUS_8).resources_per_actor == (0.5, 0.5)


def test_without_sharing_an_actor_has_its_whole_bundle() -> None:
    assert plan(Layout(2, (2,), "gpu"), capacity=GPUS_8).resources_per_actor == (1, 1)


def test_a_plan_reads_as_a_sentence() -> None:
    text = "4 (learner ranks) + 1 x 1 (engines x devices) = 5 bundles of 0.4 CPU (the processes share cores)"
    assert str(Plan(Layout(4, (1,)), cpus=0.4, gpus=0)) == text


def bundles(**nodes: int) -> list[PlacedBundle]:
    """Bundles counted from the end, so that order has to be found."""
    found = [(name, device) for name, count in nodes.items() for device in range(count)]
    return [
        PlacedBundle(len(found) - 1 - i, name, f"10.0.0.{name[1:]}", str(device))
        for i, (name, device) in enumerate(found)
    ]


def where(block: tuple[PlacedBundle, ...]) -> list[str]:
    return [f"{bundle.node}:{bundle.device}" for bundle in block]


def test_seats_are_ordered_by_address_as_numbers_then_device() -> None:
    found = assign(Layout(3, (), device="gpu"), bundles=[*bundles(n10=1), *bundles(n9=2)][::-1])
    assert where(found.learner) == ["n9:0", "n9:1", "n10:0"]


def test_device_10_comes_after_device_9() -> None:
    found = assign(Layout(11, (), device="gpu"), bundles=bundles(n1=11)[::-1])
    assert where(found.learner) == [f"n1:{device}" for device in range(11)]


def test_the_learner_takes_the_first_seats_and_engines_the_last() -> None:
    found = assign(Layout(4, (2, 2), "gpu"), bundles=bundles(n1=8))
    assert where(found.learner) == ["n1:0", "n1:1", "n1:2", "n1:3"]
    assert [where(engine) for engine in found.engines] == [["n1:4", "n1:5"], ["n1:6", "n1:7"]]


def test_colocated_engines_take_the_learners_seats() -> None:
    found = assign(Layout(4, (2, 2), "gpu", colocated=True), bundles=bundles(n1=4))
    assert where(found.learner) == ["n1:0", "n1:1", "n1:2", "n1:3"]
    assert [where(engine) for engine in found.engines] == [["n1:0", "n1:1"], ["n1:2", "n1:3"]]


def test_a_separate_critic_is_placed_after_the_learner_and_shares_no_device() -> None:
    separate = Layout(2, (2,), "gpu", critic_ranks=3)
    assert separate.bundles == 7
    assert " ".join(re.sub(r"\(.*?\)", "", str(separate)).split()) == "2 + 1 x 2 + 3 = 7"
    found = assign(separate, bundles=bundles(n1=7))
    assert where(found.learner) == ["n1:0", "n1:1"]
    assert where(found.critic) == ["n1:2", "n1:3", "n1:4"]
    assert [where(engine) for engine in found.engines] == [["n1:5", "n1:6"]]
    colocated = assign(Layout(2, (2,), "gpu", colocated=True, critic_ranks=2), bundles=bundles(n1=4))
    assert where(colocated.learner) == where(colocated.engines[0]) == ["n1:0", "n1:1"]
    assert where(colocated.critic) == ["n1:2", "n1:3"]


def test_a_colocated_engine_straddles_no_two_nodes() -> None:
    found = assign(Layout(6, (2, 2), "gpu", colocated=True), bundles=bundles(n1=3, n2=3))
    assert [where(engine) for engine in found.engines] == [["n1:0", "n1:1"], ["n2:0", "n2:1"]]


def test_no_engine_straddles_two_nodes() -> None:
    found = assign(Layout(6, (4, 4), "gpu"), bundles=bundles(n1=7, n2=7))
    assert [where(engine) for engine in found.engines] == [
        ["n1:3", "n1:4", "n1:5", "n1:6"],
        ["n2:3", "n2:4", "n2:5", "n2:6"],
    ]
    assert where(found.learner) == ["n1:0", "n1:1", "n1:2", "n2:0", "n2:1", "n2:2"]


def test_engines_that_fit_no_node_any_more_are_an_error() -> None:
    with pytest.raises(PlacementError, match=r"2 engines of 4 GPUs.*left are 10\.0\.0\.1: 2, 10\.0\.0\.2: 2"):
        assign(Layout(0, (4, 4), "gpu"), bundles=bundles(n1=6, n2=2))


def test_the_order_of_the_seats_given_does_not_matter() -> None:
    layout, found = Layout(4, (2, 2), "gpu"), bundles(n1=4, n2=4)
    assert assign(layout, bundles=found) == assign(layout, bundles=found[::-1])


def nodes_of(block: tuple[PlacedBundle, ...], size: int) -> list[set[str]]:
    return [{bundle.node for bundle in block[start : start + size]} for start in range(0, len(block), size)]


def test_no_tensor_parallel_group_straddles_two_nodes() -> None:
    layout = Layout(8, (1, 1, 1, 1), "gpu", tensor=4)
    found = assign(layout, bundles=bundles(a=6, b=6))
    assert nodes_of(found.learner, 4) == [{"a"}, {"b"}]
    assert sorted(bundle.node for block in found.engines for bundle in block) == ["a", "a", "b", "b"]


def test_larger_engines_choose_before_tensor_parallel_groups() -> None:
    found = assign(Layout(4, (4,), "gpu", tensor=2), bundles=bundles(a=4, b=4))
    assert {bundle.node for bundle in found.engines[0]} == {"b"}
    assert nodes_of(found.learner, 2) == [{"a"}, {"a"}]


def test_tensor_parallel_groups_that_fit_no_node_any_more_are_an_error() -> None:
    with pytest.raises(PlacementError, match=r" 2 tensor-parallel groups of 4 .*: 2, .*: 2\."):
        assign(Layout(8, (), "gpu", tensor=4), bundles=bundles(a=6, b=2))


def test_a_tensor_parallel_group_that_is_larger_than_every_node_spans_nodes() -> None:
    found = assign(Layout(8, (), "gpu", tensor=8), bundles=bundles(a=4, b=4))
    assert nodes_of(found.learner, 8) == [{"a", "b"}]


def test_a_critics_tensor_parallel_groups_stay_on_one_node_too() -> None:
    layout = Layout(3, (), "gpu", critic_ranks=4, critic_tensor=4)
    with pytest.raises(PlacementError, match=r"1 tensor-parallel .* 4 critic ranks"):
        assign(layout, bundles=bundles(a=4, b=3))
    assert nodes_of(assign(layout, bundles=bundles(a=3, b=4)).critic, 4) == [{"b"}]


def test_colocated_engines_and_learner_ranks_of_two_nodes_share_their_seats() -> None:
    layout = Layout(4, (2, 2), "gpu", colocated=True, tensor=2)
    found = assign(layout, bundles=bundles(a=2, b=2))
    assert found.learner == tuple(bundle for block in found.engines for bundle in block)
    assert [{bundle.node for bundle in block} for block in found.engines] == [{"a"}, {"b"}]
    group: Any = None
    learner = [ActorPlacement(group, bundle, 0, 0, block=(bundle,)) for bundle in found.learner]
    engines = [ActorPlacement(group, block[0], 0, 0, block=block) for block in found.engines]
    assert nearest_ranks(engines, learner) == ((0, 1), (2, 3))


def test_an_engine_beside_no_learner_rank_reads_from_the_first_rank_of_its_node() -> None:
    found = assign(Layout(2, (1, 1), "gpu"), bundles=bundles(a=2, b=2))
    group: Any = None
    placements = {
        bundle: ActorPlacement(group, bundle, 0, 0, block=(bundle,))
        for bundle in (*found.learner, *(b[0] for b in found.engines))
    }
    learner = [placements[bundle] for bundle in found.learner]
    assert nearest_ranks([placements[block[0]] for block in found.engines], learner) == ((0,), (0,))
    moved = [placements[found.engines[0][0]], placements[found.learner[1]]]
    assert nearest_ranks([placements[found.engines[1][0]], placements[found.learner[0]]], moved) == ((0,), (1,))
