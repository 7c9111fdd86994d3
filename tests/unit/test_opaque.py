"""Opaque arrays keep dtype, shape and bits in files and in columns, and stand in a column once."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from slime_core.opaque import array_of, as_json, column, from_json, json_of, part, read_json
from slime_core.types import Sample

NUMPY = ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64"]
TORCH = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(3, 2), (0, 4), (5,)])
def test_an_array_comes_back_from_json_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).normal(size=shape).astype(dtype)
    again = from_json(json.loads(json.dumps(as_json(values))))
    assert (again.dtype, again.shape, again.tobytes()) == (values.dtype, shape, values.tobytes())
    assert array_of(values).dtype == dtype


@pytest.mark.parametrize("dtype", TORCH)
def test_a_tensor_of_a_dtype_that_numpy_lacks_becomes_float32(dtype: str) -> None:
    values = torch.tensor([[0.5, -2.0], [1.0, 0.0]]).to(getattr(torch, dtype))
    again = from_json(json.loads(json.dumps(as_json(values))))
    assert (again.dtype, again.tolist()) == (np.float32, values.float().tolist())
    assert array_of(values).dtype == np.float32


def test_values_that_are_no_arrays_are_unchanged() -> None:
    for value in ({"a": [1]}, "text", None):
        assert as_json(value) is value
        assert json_of([value])[0] is value
    assert from_json({"a": 1}) == {"a": 1}
    assert read_json({"grid": [[1, 2, 3]]}) == {"grid": [[1, 2, 3]]}
    assert (json_of(None), read_json(None)) == (None, None)


@pytest.mark.parametrize("value", [3.0, np.array(["a"]), ["a"], [None], np.array([1j])])
def test_arrays_without_rows_of_numbers_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"shape \[.*\] of "):
        array_of(value)


def test_lists_and_foreign_byte_orders_become_arrays_of_this_machine() -> None:
    assert array_of([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    found = array_of(np.array([1, 2], ">f4"))
    assert (found.dtype, found.tolist()) == (np.dtype("float32"), [1, 2])


def test_equal_arrays_stand_in_a_column_once() -> None:
    pixels, other = np.array([[1, 2], [3, 4]]), np.array([[5, 6]])
    found = column([pixels[:0], pixels, other, pixels.copy(), pixels])
    assert found.values.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert found.starts_B.tolist() == [0, 0, 2, 0, 0]
    assert found.counts_B.tolist() == [0, 2, 1, 2, 2]
    assert [part(found, sample).tolist() for sample in (0, 2, 3)] == [[], [[5, 6]], [[1, 2], [3, 4]]]


def test_rows_of_no_numbers_keep_their_count() -> None:
    found = column([np.empty((2, 0)), np.empty((3, 0))])
    assert [part(found, sample).shape for sample in (0, 1)] == [(2, 0), (3, 0)]


def test_a_sample_says_in_json_what_it_carries() -> None:
    sample = Sample(index=1, multimodal_train_inputs={"pixels": torch.ones(2, 3), "grid": None})
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again == sample
    assert again.multimodal_train_inputs["pixels"].tolist() == [[1, 1, 1]] * 2
    assert again.multimodal_train_inputs["grid"] is None
