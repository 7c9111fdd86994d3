"""Which weights travel together, and as which bytes."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.weights.engine_control import Bucket
from slime_core.weights.hugging_face import WeightSpec
from slime_core.weights.publisher import plan_buckets
from slime_core.weights.transports import flatten


def spec(name: str, size: int, dtype: str = "float32") -> WeightSpec:
    return WeightSpec(name, dtype, (size,))


def names(buckets: list[Bucket]) -> list[list[str]]:
    return [bucket.names for bucket in buckets]


@pytest.mark.parametrize(
    ("specs", "limit", "expected"),
    [
        ([spec("a", 2), spec("b", 2), spec("c", 1)], 16, [["a", "b"], ["c"]]),
        ([spec("a", 2), spec("b", 2), spec("c", 1)], 20, [["a", "b", "c"]]),
        ([spec("a", 1), spec("big", 100), spec("c", 1)], 16, [["a"], ["big"], ["c"]]),
        ([spec("a", 1), spec("half", 1, "bfloat16"), spec("b", 1)], 64, [["a", "b"], ["half"]]),
    ],
)
def test_a_bucket_holds_weights_of_one_dtype_up_to_its_limit(
    specs: list[WeightSpec], limit: int, expected: list[list[str]]
) -> None:
    assert names(plan_buckets(specs, bytes_limit=limit)) == expected


def test_an_attention_module_is_never_split() -> None:
    layer = "model.layers.0."
    first, last = spec(f"{layer}self_attn.q_a_proj.weight", 3), spec(f"{layer}self_attn.kv_a_proj_with_mqa.weight", 3)
    norm, later = spec(f"{layer}input_layernorm.weight", 1), spec("model.layers.1.self_attn.q_a_proj.weight", 3)
    assert names(plan_buckets([norm, first, later, last], bytes_limit=16)) == [
        [norm.name],
        [first.name, last.name],
        [later.name],
    ]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["float32", "bfloat16"])), max_size=30), st.integers(1, 100)
)
def test_every_weight_travels_once_and_no_bucket_is_too_large(sizes: list[tuple[int, str]], limit: int) -> None:
    specs = [spec(str(number), size, dtype) for number, (size, dtype) in enumerate(sizes)]
    buckets = plan_buckets(specs, bytes_limit=limit)
    assert sorted(one.name for bucket in buckets for one in bucket.specs) == sorted(one.name for one in specs)
    assert all(sum(one.nbytes for one in bucket.specs) <= limit or len(bucket.specs) == 1 for bucket in buckets)


def test_flattened_bytes_are_those_of_the_tensors_one_after_the_other() -> None:
    columns = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
    flat = flatten([columns, torch.tensor([5.0])])
    assert flat.dtype == torch.uint8
    assert bytes(flat.tolist()) == struct.pack("<5f", 1, 3, 2, 4, 5)
