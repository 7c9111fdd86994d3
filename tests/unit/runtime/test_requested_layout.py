"""Engine groups and auxiliary models as bundles, and where Ray places them."""

from __future__ import annotations

import re

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

LAYOUT = Layout(2, (1, 2), "gpu", auxiliary=(2, 1))


def bundles(**nodes: int) -> list[PlacedBundle]:
    places = [(node, place) for node, count in nodes.items() for place in range(count)]
    return [PlacedBundle(index, node, node.strip("n"), str(place)) for index, (node, place) in enumerate(places)]


def numbers(blocks: object) -> list[list[int]]:
    return [[bundle.index for bundle in block] for block in blocks]  # type: ignore[attr-defined]


def config(**changes: object) -> RunConfig:
    whole = RunConfig()
    engine = whole.engine.model_copy(
        update={
            "engine_groups": (EngineGroup(num_gpus=1), EngineGroup(num_gpus=2, num_gpus_per_engine=2)),
            "engine_models": (
                EngineModel(name="judge", model_path="judge", num_gpus=2, num_gpus_per_engine=2),
                EngineModel(name="score", model_path="score"),
            ),
            **changes,
        }
    )
    cluster = whole.cluster.model_copy(update={"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3})
    return whole.model_copy(update={"engine": engine, "cluster": cluster})


def test_settings_become_a_layout():
    assert requested_layout(config(), "gpu", learner_ranks=2) == LAYOUT


def test_the_sum_names_every_part():
    assert LAYOUT.bundles == 8
    assert " ".join(re.sub(r"\(.*?\)", "", str(LAYOUT)).split()) == "2 + 1 x 1 + 1 x 2 + 1 x 2 + 1 x 1 = 8"


def test_engines_that_only_evaluate_take_seats_after_all_others():
    whole = config()
    evaluating = whole.model_copy(update={"eval": EvalConfig(eval_num_gpus=4, eval_num_gpus_per_engine=2)})
    layout = requested_layout(evaluating, "gpu", learner_ranks=2)
    assert (layout.auxiliary, layout.bundles) == ((2, 1, 2, 2), LAYOUT.bundles + 4)


def test_external_engines_need_no_seat():
    layout = requested_layout(config(rollout_external_engine_addrs=("a:1",), engine_models=()), "cpu", learner_ranks=2)
    assert (layout.bundles, layout.engines) == (2, ())


def test_auxiliary_models_take_seats_after_the_engines_and_the_learner_the_first():
    found = assign(LAYOUT, bundles=bundles(n1=8))
    assert [bundle.index for bundle in found.learner] == [0, 1]
    assert numbers(found.engines) == [[2], [3, 4]]
    assert numbers(found.auxiliary) == [[5, 6], [7]]


def test_no_engine_straddles_two_nodes():
    found = assign(LAYOUT, bundles=bundles(n1=4, n2=4))
    assert numbers(found.auxiliary) == [[5, 6], [7]]
    assert numbers(found.engines) == [[4], [2, 3]]
    assert [bundle.index for bundle in found.learner] == [0, 1]


def test_colocated_only_the_policy_shares():
    layout = Layout(4, (2, 1, 1), "gpu", colocated=True, auxiliary=(2,))
    assert layout.bundles == 6
    found = assign(layout, bundles=bundles(n1=6))
    assert [bundle.index for bundle in found.learner] == [0, 1, 2, 3]
    assert numbers(found.engines) == [[0, 1], [2], [3]]
    assert numbers(found.auxiliary) == [[4, 5]]


def test_an_engine_that_is_larger_than_every_node_takes_equal_parts_of_as_few_as_hold_it():
    layout = Layout(2, (6, 6), "gpu", auxiliary=(2,))
    wanted = plan(layout, capacity=Capacity(64, 20, 4))
    found = assign(layout, bundles=bundles(n1=4, n2=4, n3=4, n4=4, n5=4), largest_node=wanted.largest_node)
    assert numbers(found.auxiliary) == [[18, 19]]
    assert numbers(found.engines) == [[1, 2, 3, 5, 6, 7], [9, 10, 11, 13, 14, 15]]
    assert [bundle.node for bundle in found.engines[0]] == ["n1"] * 3 + ["n2"] * 3
    assert [bundle.index for bundle in found.learner] == [0, 4]


def test_an_engine_that_a_node_could_hold_is_not_spread():
    layout = Layout(0, (4,), "gpu")
    with pytest.raises(PlacementError, match=r"4 GPUs.* one node.* 1: 2, 2: 2"):
        assign(layout, bundles=bundles(n1=2, n2=2), largest_node=8)
    with pytest.raises(PlacementError, match=r"4 GPUs.* 2 nodes, 2 .* 1: 3, 2: 1"):
        assign(layout, bundles=bundles(n1=3, n2=1), largest_node=3)


def test_separate_prefill_and_decode_engines_are_refused_without_gpus():
    split = EngineGroup(num_gpus=1, worker_type="prefill"), EngineGroup(num_gpus=1, worker_type="decode")
    message = (
        r"separate prefill and decode engines send the KV cache from GPU to GPU, but this run has no GPU: device = "
        r"auto means cpu here\. Leave prefill_num_servers and worker_type out, or run on GPUs\."
    )
    settings = config(engine_groups=split)
    with pytest.raises(ConfigError, match=message):
        require_device_support(settings, requested_layout(settings, "cpu", learner_ranks=1))
    require_device_support(settings, requested_layout(settings, "gpu", learner_ranks=1))


@pytest.mark.parametrize("where", ["sglang", "group"])
def test_drafts_are_refused_without_gpus(where):
    flags = (("speculative_algorithm", "NGRAM"),)
    groups = (EngineGroup(num_gpus=1, overrides=flags if where == "group" else ()),)
    settings = config(engine_groups=groups)
    if where == "sglang":
        settings = settings.model_copy(update={"sglang": SGLangConfig(given=flags)})
    message = (
        r"speculative_algorithm needs compiled kernels that SGLang has for GPUs only, and this run has none: device = "
        r"auto means cpu here\. Leave it out, or run on GPUs\."
    )
    with pytest.raises(ConfigError, match=message):
        require_device_support(settings, requested_layout(settings, "cpu", learner_ranks=1))
    require_device_support(settings, requested_layout(settings, "gpu", learner_ranks=1))
