"""Weights that four ranks gather: those of mbridge's own export, in fewer collectives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LAYOUTS = {
    "TP2 PP2": {"tensor": 2, "pipeline": 2},
    "TP2 EP2": {"tensor": 2, "expert": 2},
    "PP2 VPP2 EP2": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
    "TP2 EP4 ETP1": {"tensor": 2, "expert": 4, "expert_tensor": 1},
}

RANK = """
import json, sys
from unittest import mock
import torch
import torch.distributed as dist

rank, store, layouts = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
from slime_core.modeling import ParallelLayout, export, prepare_megatron
prepare_megatron()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
torch.set_num_threads(1)
from megatron.core import parallel_state
from slime_core import RunView
from slime_core.modeling.layout import initialize_model_parallel
from slime_core.modeling.spec import MBridgeSpec, NamedForMBridge
from tests.engines.families import HEADS, MIXTURE, SIZES

counts = {}
def counted(name):
    call = getattr(dist, name)
    def count(*values, **more):
        counts[name] = counts.get(name, 0) + 1
        return call(*values, **more)
    return mock.patch.object(dist, name, count)

def export_of(spec, chunks):
    counts.clear()
    names = [(name, weight.clone()) for name, weight in spec.export_weights(chunks)]
    objects = sum(number for name, number in counts.items() if "object" in name)
    return names, objects, counts.get("all_gather_into_tensor", 0)

found = {}
for label, sizes in layouts.items():
    layout = ParallelLayout(**sizes)
    initialize_model_parallel(layout, seed=1)
    config = {"model_type": "qwen3_moe", **SIZES, **HEADS, **MIXTURE, "norm_topk_prob": True,
              "num_hidden_layers": 4, "tie_word_embeddings": label == "TP2 PP2"}
    spec = MBridgeSpec(None, RunView())
    chunks = spec.build(config, dtype=torch.float32, parallel=layout)
    views = [NamedForMBridge(chunk) for chunk in chunks]
    expected = {name: weight.clone() for name, weight in spec._bridge.export_weights(views)}
    names = ("all_gather_object", "broadcast_object_list", "gather_object", "all_gather_into_tensor")
    with counted(names[0]), counted(names[1]), counted(names[2]), counted(names[3]):
        first, objects_first, _ = export_of(spec, chunks)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data += 1
        second, objects, gathers = export_of(spec, chunks)
        with mock.patch.object(export, "GATHERED_BYTES", 1):
            one_by_one, _, more = export_of(spec, chunks)
    orders = [None] * 4
    dist.all_gather_object(orders, [name for name, _ in second])
    equal = {key: {name: torch.equal(weight, expected[name] + add) for name, weight in weights}
             for key, weights, add in (("first", first, 0), ("second", second, 1), ("one by one", one_by_one, 1))}
    found[label] = {
        "wrong": sorted(f"{key} {name}" for key, names in equal.items() for name, same in names.items() if not same),
        "names": [sorted(name for name, _ in weights) == sorted(expected) for weights in (first, second, one_by_one)],
        "orders": all(order == orders[0] for order in orders),
        "objects": [objects_first, objects], "gathers": [gathers, more],
    }
    parallel_state.destroy_model_parallel()
if rank == 0:
    print(json.dumps(found), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    store = tmp_path_factory.mktemp("ranks") / "store"
    words = [str(store), json.dumps(LAYOUTS)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), *words],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    printed = [rank.communicate(timeout=580)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4
    report: dict[str, dict[str, Any]] = json.loads(printed[0].splitlines()[-1])
    return report


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_exports_the_weights_of_mbridge_in_one_order(found, layout):
    report = found[layout]
    assert (report["wrong"], report["names"], report["orders"]) == ([], [True] * 3, True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_exchange_objects_only_to_learn_the_shapes_of_other_pipeline_ranks(found, layout):
    assert found[layout]["objects"] == [int("PP2" in layout), 0]


def test_the_experts_of_a_layer_are_gathered_together(found):
    # 4 layers of 2 stacks, which ranks share; 8 experts, of which each of 4 ranks has 2.
    layers, stacks, local = 4, 2, 2
    whole, single = found["TP2 EP4 ETP1"]["gathers"]
    assert single - whole == layers * stacks * (local - 1)
