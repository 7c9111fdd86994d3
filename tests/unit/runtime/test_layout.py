"""The arithmetic of placement, and what a run requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.engines import EngineGroup, EngineModel, SGLangConfig
from slime_core.config.sampling import EvalConfig
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, PlacementError
from slime_core.runtime.layout import (
    Capacity,
    Layout,
    PlacedBundle,
    assign,
    plan,
    requested_layout,
    require_device_support,
)
from slime_core.runtime.placement import ActorPlacement, nearest_ranks

GPUS_8 = Capacity(cpus=64, gpus=8, largest_node_gpus=8)
GPUS_16 = Capacity(cpus=128, gpus=16, largest_node_gpus=8)
GROUP: Any = None


@pytest.mark.parametrize(
    ("layout", "capacity", "count", "bundle"),
    [
        (Layout(1, (1,)), Capacity(cpus=64), 2, {"CPU": 1.0}),
        (Layout(1, (1,)), Capacity(cpus=1), 2, {"CPU": 0.5}),
        (Layout(4, (1,)), Capacity(cpus=2), 5, {"CPU": 0.4}),
        (Layout(2, (1,)), Capacity(cpus=2), 3, {"CPU": 0.6666}),
        (Layout(2, ()), Capacity(cpus=2), 2, {"CPU": 1.0}),
        (Layout(4, (2, 2), "gpu"), GPUS_16, 8, {"CPU": 1, "GPU": 1}),
        (Layout(8, (2, 2, 2, 2), "gpu", colocated=True), GPUS_8, 8, {"CPU": 1, "GPU": 1}),
        (Layout(2, (1,), colocated=True), Capacity(cpus=2), 2, {"CPU": 1.0}),
        (Layout(1, (2,)), Capacity(cpus=2), 3, {"CPU": 0.6666}),
        (Layout(8, (), "gpu"), Capacity(cpus=8, gpus=8, largest_node_gpus=4), 8, {"CPU": 1, "GPU": 1}),
    ],
)
def test_a_layout_becomes_equal_bundles(layout: Layout, capacity: Capacity, count: int, bundle: Any) -> None:
    assert (layout.bundles, plan(layout, capacity=capacity).bundle) == (count, bundle)


@pytest.mark.parametrize(
    ("layout", "capacity", "numbers"),
    [
        (Layout(8, (4, 4, 4, 4), "gpu"), GPUS_16, r"8 \(learner ranks\) \+ 4 x 4 .* = 24 GPUs.* 16, 8 too"),
        (Layout(8, (2, 2, 2, 2), "gpu", critic_ranks=4), GPUS_16, r"\+ 4 \(critic ranks\) = 20 GPUs.* 16, 4 too"),
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
    plans = [plan(Layout(ranks, (1,) * ranks, colocated=True), capacity=Capacity(cpus=2)) for ranks in range(1, 200)]
    assert all(2 * shared.resources_per_actor[0] <= shared.cpus for shared in plans)
    assert plan(Layout(2, (2,), "gpu", colocated=True), capacity=GPUS_8).resources_per_actor == (0.5, 0.5)


def bundles(**nodes: int) -> list[PlacedBundle]:
    """Bundles counted from the end, so that order has to be found."""
    places = [(name, device) for name, count in nodes.items() for device in range(count)]
    return [
        PlacedBundle(len(places) - 1 - i, name, f"10.0.0.{name[1:]}", str(device))
        for i, (name, device) in enumerate(places)
    ]


def where(block: tuple[PlacedBundle, ...]) -> str:
    return " ".join(f"{bundle.node}:{bundle.device}" for bundle in block)


@pytest.mark.parametrize(
    ("layout", "nodes", "learner", "engines", "others"),
    [
        (Layout(4, (), "gpu"), {"n10": 1, "n9": 3}, "n9:0 n9:1 n9:2 n10:0", [], []),
        (*(Layout(2, (2,), "gpu", critic_ranks=3), {"n1": 7}), *("n1:0 n1:1", ["n1:5 n1:6"], ["n1:2 n1:3 n1:4"])),
        (
            *(Layout(2, (2,), "gpu", colocated=True, critic_ranks=2), {"n1": 4}),
            *("n1:0 n1:1", ["n1:0 n1:1"], ["n1:2 n1:3"]),
        ),
        (
            *(Layout(6, (2, 2), "gpu", colocated=True), {"n1": 3, "n2": 3}),
            *("n1:0 n1:1 n1:2 n2:0 n2:1 n2:2", ["n1:0 n1:1", "n2:0 n2:1"], []),
        ),
        (
            *(Layout(6, (4, 4), "gpu"), {"n1": 7, "n2": 7}, "n1:0 n1:1 n1:2 n2:0 n2:1 n2:2"),
            *(["n1:3 n1:4 n1:5 n1:6", "n2:3 n2:4 n2:5 n2:6"], []),
        ),
        (
            *(Layout(2, (1, 2), "gpu", auxiliary=(2, 1)), {"n1": 4, "n2": 4}),
            *("n1:0 n1:1", ["n2:0", "n1:2 n1:3"], ["n2:1 n2:2", "n2:3"]),
        ),
        (
            *(Layout(4, (2, 1, 1), "gpu", colocated=True, auxiliary=(2,)), {"n1": 6}),
            *("n1:0 n1:1 n1:2 n1:3", ["n1:0 n1:1", "n1:2", "n1:3"], ["n1:4 n1:5"]),
        ),
        (
            *(Layout(4, (1, 1, 1, 1), "gpu", tensor=4), {"n1": 5, "n2": 3}),
            *("n1:0 n1:1 n1:2 n1:3", ["n1:4", "n2:0", "n2:1", "n2:2"], []),
        ),
        (Layout(4, (4,), "gpu", tensor=2), {"n1": 4, "n2": 4}, "n1:0 n1:1 n1:2 n1:3", ["n2:0 n2:1 n2:2 n2:3"], []),
        (Layout(4, (), "gpu", tensor=4), {"n1": 2, "n2": 2}, "n1:0 n1:1 n2:0 n2:1", [], []),
        (
            *(Layout(3, (), "gpu", critic_ranks=4, critic_tensor=4), {"n1": 3, "n2": 4}),
            *("n1:0 n1:1 n1:2", [], ["n2:0 n2:1 n2:2 n2:3"]),
        ),
    ],
    ids=[
        "by number of address and device",
        "a critic after the learner",
        "a critic beside colocated engines",
        "colocated engines on one node each",
        "engines on one node each",
        "auxiliary models last",
        "only the policy shares",
        "a tensor-parallel group on one node",
        "larger engines before tensor-parallel groups",
        "a group that no node holds",
        "a tensor-parallel group of the critic",
    ],
)
def test_seats(layout: Layout, nodes: dict[str, int], learner: str, engines: list[str], others: list[str]) -> None:
    seats = assign(layout, bundles=bundles(**nodes)[::-1])
    assert (where(seats.learner), [where(engine) for engine in seats.engines]) == (learner, engines)
    assert [where(block) for block in (seats.critic, *seats.auxiliary) if block] == others


@pytest.mark.parametrize(
    ("layout", "nodes", "numbers"),
    [
        (Layout(0, (4, 4), "gpu"), {"n1": 6, "n2": 2}, r"2 engines of 4 GPUs.*left are 10\.0\.0\.1: 2, 10\.0\.0\.2: 2"),
        (Layout(8, (), "gpu", tensor=4), {"n1": 6, "n2": 2}, r" 2 tensor-parallel groups of 4 .*: 2, .*: 2\."),
        (Layout(3, (), "gpu", critic_ranks=4, critic_tensor=4), {"n1": 4, "n2": 3}, "1 tensor-parallel .* 4 critic"),
    ],
)
def test_what_fits_no_node_any_more_is_an_error(layout: Layout, nodes: dict[str, int], numbers: str) -> None:
    with pytest.raises(PlacementError, match=numbers):
        assign(layout, bundles=bundles(**nodes))


def placed(*blocks: tuple[PlacedBundle, ...]) -> list[ActorPlacement]:
    return [ActorPlacement(GROUP, block[0], 0, 0, block=block) for block in blocks]


def test_an_engine_reads_from_the_ranks_on_its_devices_or_the_first_of_its_node() -> None:
    colocated = assign(Layout(4, (2, 2), "gpu", colocated=True, tensor=2), bundles=bundles(n1=2, n2=2))
    learner = placed(*((bundle,) for bundle in colocated.learner))
    assert nearest_ranks(placed(*colocated.engines), learner) == ((0, 1), (2, 3))
    apart = assign(Layout(2, (1, 1), "gpu"), bundles=bundles(n1=2, n2=2))
    ranks, engines = placed(*((bundle,) for bundle in apart.learner)), placed(*apart.engines)
    assert nearest_ranks(engines, ranks) == ((0,), (0,))
    assert nearest_ranks([engines[1], ranks[0]], [engines[0], ranks[1]]) == ((0,), (1,))


def test_an_engine_that_is_larger_than_every_node_takes_equal_parts_of_as_few_as_hold_it() -> None:
    layout = Layout(2, (6, 6), "gpu", auxiliary=(2,))
    largest = plan(layout, capacity=Capacity(64, 20, 4)).largest_node
    seats = assign(layout, bundles=bundles(n1=4, n2=4, n3=4, n4=4, n5=4), largest_node=largest)
    assert where(seats.auxiliary[0]) == "n5:2 n5:3"
    assert [where(engine) for engine in seats.engines] == [
        "n1:1 n1:2 n1:3 n2:1 n2:2 n2:3",
        "n3:1 n3:2 n3:3 n4:1 n4:2 n4:3",
    ]
    assert where(seats.learner) == "n1:0 n2:0"


def test_an_engine_that_a_node_could_hold_is_not_spread() -> None:
    layout = Layout(0, (4,), "gpu")
    with pytest.raises(PlacementError, match=r"4 GPUs.* one node.* 10\.0\.0\.1: 2, 10\.0\.0\.2: 2"):
        assign(layout, bundles=bundles(n1=2, n2=2), largest_node=8)
    with pytest.raises(PlacementError, match=r"4 GPUs.* 2 nodes, 2 .* 10\.0\.0\.1: 3, 10\.0\.0\.2: 1"):
        assign(layout, bundles=bundles(n1=3, n2=1), largest_node=3)


def config(**changes: object) -> RunConfig:
    run = RunConfig()
    models = (
        EngineModel(name="judge", model_path=Path("judge"), num_gpus=2, num_gpus_per_engine=2),
        EngineModel(name="score", model_path=Path("score")),
    )
    groups = EngineGroup(num_gpus=1), EngineGroup(num_gpus=2, num_gpus_per_engine=2)
    engine = run.engine.model_copy(update={"engine_groups": groups, "engine_models": models, **changes})
    cluster = run.cluster.model_copy(update={"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3})
    return run.model_copy(update={"engine": engine, "cluster": cluster})


def test_settings_become_a_layout_in_which_engines_that_only_evaluate_come_last() -> None:
    layout = Layout(2, (1, 2), "gpu", auxiliary=(2, 1))
    assert requested_layout(config(), "gpu", learner_ranks=2) == layout
    assert " ".join(re.sub(r"\(.*?\)", "", str(layout)).split()) == "2 + 1 x 1 + 1 x 2 + 1 x 2 + 1 x 1 = 8"
    evaluating = config().model_copy(update={"eval": EvalConfig(eval_num_gpus=4, eval_num_gpus_per_engine=2)})
    layout = requested_layout(evaluating, "gpu", learner_ranks=2)
    assert (layout.auxiliary, layout.bundles) == ((2, 1, 2, 2), 12)
    external = config(rollout_external_engine_addrs=("a:1",), engine_models=())
    assert requested_layout(external, "cpu", learner_ranks=2).bundles == 2


NGRAM = (("speculative_algorithm", "NGRAM"),)
PREFILL = EngineGroup(num_gpus=1, worker_type="prefill"), EngineGroup(num_gpus=1, worker_type="decode")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (config(engine_groups=PREFILL), "prefill_num_servers"),
        (config(engine_groups=(EngineGroup(num_gpus=1, overrides=NGRAM),)), "speculative_algorithm"),
        (config().model_copy(update={"sglang": SGLangConfig(given=NGRAM)}), "speculative_algorithm"),
    ],
    ids=["prefill and decode", "drafts of a group", "drafts"],
)
def test_what_needs_gpus_is_refused_without(settings: RunConfig, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        require_device_support(settings, requested_layout(settings, "cpu", learner_ranks=1))
    require_device_support(settings, requested_layout(settings, "gpu", learner_ranks=1))
