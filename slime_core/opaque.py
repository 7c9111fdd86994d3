"""Arrays that samples carry in addition to their tokens as inputs of the model, such as the pixels of images.

The core does not interpret them: each has a name, a dtype and a shape whose first dimension may have any length, and
files and shards preserve all three.

    as_json, from_json    in files: an object with dtype, shape and the bytes in base 64; reading runs nothing
    array_of              a tensor, array or list of user code as a NumPy array and the name of its dtype
    column, part          in shards: every distinct array once, and for each sample the place of its array

NumPy has no bfloat16 and no 8-bit floats. Such numbers are held as integers of the same bits, under the dtype's name.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


ARRAY = "__array__"
"""Key of an object that encodes an array: its dtype; ``shape`` and the bytes in base 64 are further keys."""

KINDS = "biuf"
"""Kinds of the accepted NumPy dtypes: truth values, integers, floats."""

BITS = {1: "uint8", 2: "int16"}
"""Bytes of a number whose dtype NumPy lacks -> the NumPy dtype that holds its bits."""


@dataclass(frozen=True, slots=True)
class Array:
    """``values`` [n, ...] of the dtype named ``dtype``, which is NumPy's own name unless NumPy has none."""

    values: np.ndarray
    dtype: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """The arrays of one name of b samples, each different one once.

    Example: samples with 2, 0 and again the same 2 rows have ``values`` of 2 rows, ``starts_B = [0, 0, 0]`` and
    ``counts_B = [2, 0, 2]``.

    Arguments:
        values: [n, ...], the rows of all of them.
        starts_B, counts_B: int64 [b], where the rows of each sample start, and how many they are; 0: it has none.
        dtype: its name; ``bfloat16`` and others that NumPy does not know are held as integers of the same bits.
    """

    values: np.ndarray
    starts_B: np.ndarray
    counts_B: np.ndarray
    dtype: str


# --- What user code gives ---------------------------------------------------------------------------------------------


def array_of(value: Any) -> Array:
    """Convert ``value`` (a tensor, an array, or lists of numbers) to an array.

    Raises:
        ValueError: it has no first dimension, or does not hold numbers.
    """
    import numpy as np

    found = _held(value)
    values = np.ascontiguousarray(found.values) if found.values.ndim else found.values
    if values.dtype.kind not in KINDS or not values.ndim:
        shape = f"shape {list(values.shape)} of {found.dtype}"
        raise ValueError(f"{shape}; accepted: numbers or truth values with at least one dimension")
    return Array(values.astype(values.dtype.newbyteorder("="), copy=False), found.dtype)


def _held(value: Any) -> Array:
    import numpy as np

    torch = sys.modules.get("torch")  # a tensor exists only if torch was imported
    if torch is None or not isinstance(value, torch.Tensor):
        values = np.asarray(value)
        return Array(values, values.dtype.name)
    name, tensor = str(value.dtype).removeprefix("torch."), value.detach().cpu().contiguous()
    if not hasattr(np, name) and name != "bool":
        return Array(tensor.view(getattr(torch, BITS[tensor.element_size()])).numpy(), name)
    return Array(tensor.numpy(), name)


# --- In files ---------------------------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """Return an object for JSON that encodes the tensor or array ``value``; any other value unchanged."""
    import numpy as np

    torch = sys.modules.get("torch")
    if not (isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))):
        return value
    found = _held(value)
    if found.values.dtype.kind not in KINDS:
        return value
    data = base64.b64encode(np.ascontiguousarray(found.values).tobytes()).decode()
    name = found.values.dtype.str if found.values.dtype.name == found.dtype else found.dtype
    return {ARRAY: name, "shape": list(found.values.shape), "data": data}


def from_json(found: dict[str, Any]) -> Any:
    """Decode the array in ``found`` (a tensor if NumPy lacks the dtype); return any other object unchanged.

    Raises:
        ValueError, TypeError: it does not encode an array of numbers.
    """
    if ARRAY not in found:
        return found
    import numpy as np

    name, text, shape = str(found[ARRAY]), found.get("data"), found.get("shape")
    if not (isinstance(text, str) and isinstance(shape, list)):
        raise ValueError("an array without data or shape")
    data = base64.b64decode(text)
    if name.startswith(("bfloat", "float8_")):
        return _tensor(name, data, shape)
    dtype = np.dtype(name)
    if dtype.kind not in KINDS:
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _tensor(name: str, data: bytes, shape: Sequence[int]) -> Any:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"an array of {name}")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(list(shape))


def json_of(inputs: Any) -> Any:
    """Replace the arrays in a mapping by objects for JSON; return any other value unchanged."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: as_json(value) for name, value in inputs.items()}


def read_json(inputs: Any) -> Any:
    """Undo :func:`json_of`; arrays that are decoded already stay."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: from_json(value) if isinstance(value, dict) else value for name, value in inputs.items()}


# --- In shards --------------------------------------------------------------------------------------------------------


def column(parts: Sequence[np.ndarray], dtype: str) -> Opaque:
    """Make the column of samples with ``parts``: at least one array [n, ...], of one dtype and equal shapes after n."""
    import numpy as np

    starts: dict[bytes, int] = {}
    known: dict[int, int] = {}
    kept, end, starts_B = [parts[0][:0]], 0, []
    for one in parts:
        start = known.get(id(one))
        if start is None:
            start = known[id(one)] = starts.setdefault(_digest(one), end) if len(one) else 0
            if len(one) and start == end:
                kept.append(one)
                end += len(one)
        starts_B.append(start)
    counts_B = np.array([len(one) for one in parts], np.int64)
    return Opaque(np.concatenate(kept), np.array(starts_B, np.int64), counts_B, dtype)


def part(of: Opaque, sample: int) -> np.ndarray:
    """Return the rows of one sample, a view."""
    start, count = int(of.starts_B[sample]), int(of.counts_B[sample])
    return of.values[start : start + count]


def _digest(values: np.ndarray) -> bytes:
    return hashlib.blake2b(values.tobytes(), digest_size=16, salt=len(values).to_bytes(8, "little")).digest()
