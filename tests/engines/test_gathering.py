"""Weights that four ranks gather are those of mbridge's own export; parts of unequal size over gloo."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.engines.families import HEADS, MIXTURE, SIZES
from tests.engines.learners import Learners, Make

LAYOUTS = {
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
    "TP2 EP2": {"tensor": 2, "expert": 2},
    "PP2 VPP2 EP2": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
    "TP2 EP4 ETP1": {"tensor": 2, "expert": 4, "expert_tensor": 1},
}
COUNTED = ("all_gather_object", "broadcast_object_list", "gather_object", "all_gather_into_tensor")


def export_of(spec: Any, chunks: list[Any]) -> tuple[dict[str, torch.Tensor], int, int]:
    """The weights, and the number of collectives of objects and of tensors."""
    counts: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def count(*values: Any, **more: Any) -> Any:
            counts[name] += 1
            return call(*values, **more)

        return mock.patch.object(dist, name, count)

    with ExitStack() as stack:
        for name in COUNTED:
            stack.enter_context(counted(name, getattr(dist, name)))
        weights = {name: weight.clone() for name, weight in spec.export_weights(chunks)}
    gathers = counts.pop("all_gather_into_tensor", 0)
    return weights, counts.total(), gathers


def compare(label: str) -> dict[str, Any]:
    """Export three times: first, after a change of 1, and once more with one gather a weight."""
    from megatron.core import parallel_state

    from slime_core import RunView
    from slime_core.modeling import ParallelLayout, export
    from slime_core.modeling.layout import initialize_model_parallel
    from slime_core.modeling.spec import MBridgeSpec, NamedForMBridge

    layout = ParallelLayout(**LAYOUTS[label])
    initialize_model_parallel(layout, seed=1)
    config = {"model_type": "qwen3_moe", **SIZES, **HEADS, **MIXTURE, "norm_topk_prob": True}
    config |= {"num_hidden_layers": 4, "tie_word_embeddings": label == "TP2 PP2"}
    spec = MBridgeSpec(RunView())
    chunks = spec.build(config, dtype=torch.float32, parallel=layout)
    views = [NamedForMBridge(chunk) for chunk in chunks]
    expected = {name: weight.clone() for name, weight in spec._bridge.export_weights(views)}
    first, objects_first, _ = export_of(spec, chunks)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data += 1
    second, objects, gathers = export_of(spec, chunks)
    with mock.patch.object(export, "GATHERED_BYTES", 1):
        singly, _, more = export_of(spec, chunks)
    parallel_state.destroy_model_parallel()
    wrong = [
        f"{number} {name}"
        for number, (weights, change) in enumerate(((first, 0), (second, 1), (singly, 1)))
        for name in weights.keys() | expected.keys()
        if name not in weights or not torch.equal(weights[name], expected[name] + change)
    ]
    return {"wrong": wrong, "order": [*second], "objects": [objects_first, objects], "gathers": [gathers, more]}


@pytest.fixture(scope="module")
def ranks(learners: Learners, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, its report of every layout."""
    store: Path = tmp_path_factory.mktemp("ranks") / "store"

    def compare_all(make: Make) -> dict[str, Any]:
        make.join(store)
        return {label: compare(label) for label in LAYOUTS}

    return learners(compare_all, ranks=4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_exports_the_weights_of_mbridge_in_one_order(ranks, layout) -> None:
    assert [rank[layout]["wrong"] for rank in ranks] == [[]] * 4
    assert [rank[layout]["order"] for rank in ranks] == [ranks[0][layout]["order"]] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_exchange_objects_only_to_learn_the_shapes_of_other_pipeline_ranks(ranks, layout) -> None:
    assert ranks[0][layout]["objects"] == [int("PP2" in layout), 0]


def test_the_experts_of_a_layer_are_gathered_together(ranks) -> None:
    # 4 layers of 2 stacks, which ranks share; 8 experts, of which each of 4 ranks has 2.
    layers, stacks, local = 4, 2, 2
    together, singly = ranks[0]["TP2 EP4 ETP1"]["gathers"]
    assert singly - together == layers * stacks * (local - 1)


# --- Parts of unequal size over gloo ----------------------------------------------------------------------------------

ROWS = ((1, 3), (4, 0), (0, 0), (2, 2))
"""Rows of the two ranks, of one collective after another."""


def part(rank: int, rows: int) -> torch.Tensor:
    return torch.arange(2.0 * rows).reshape(rows, 2) + 100 * rank


@pytest.fixture(scope="module")
def parts_of_ranks(learners: Learners, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of both ranks, what each gathered, and what it got of the sum."""
    store: Path = tmp_path_factory.mktemp("gloo") / "store"

    def exchange(make: Make) -> list[tuple[torch.Tensor, torch.Tensor]]:
        from slime_cpu.megatron import all_gather_parts, reduce_scatter_parts

        make.join(store)
        results = []
        for sizes in ROWS:
            gathered = all_gather_parts(part(make.rank, sizes[make.rank]), sizes)
            results.append((gathered, reduce_scatter_parts(gathered * (1 + make.rank), sizes)))
        return results

    return learners(exchange, ranks=2)


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_rank_gathers_all_parts_in_order_and_gets_its_rows_of_the_sum(parts_of_ranks, number) -> None:
    parts = [part(rank, rows) for rank, rows in enumerate(ROWS[number])]
    for results, local in zip(parts_of_ranks, parts, strict=True):
        gathered, scattered = results[number]
        assert torch.equal(gathered, torch.cat(parts))
        assert torch.equal(scattered, 3 * local)  # once from rank 0, twice from rank 1
