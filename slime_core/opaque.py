"""Arrays that samples carry in addition to their tokens as inputs of the model, such as the pixels of images.

The core does not interpret them: each has a name, a dtype and a shape whose first dimension may have any length, and
files and shards preserve all three.

    as_json, from_json    in files: an object with dtype, shape and the bytes in base 64; reading runs nothing
    array_of              a tensor, array or list of user code as a NumPy array
    column, part          in shards: every distinct array once, and for each sample the place of its array

NumPy has no bfloat16 and no 8-bit floats; such numbers become float32, which holds them exactly.
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


@dataclass(frozen=True, slots=True)
class Opaque:
    """The arrays of one name of b samples, each different one once.

    Example: samples with 2, 0 and again the same 2 rows have ``values`` of 2 rows, ``starts_B = [0, 0, 0]`` and
    ``counts_B = [2, 0, 2]``.

    Arguments:
        values: [n, ...], the rows of all of them.
        starts_B, counts_B: int64 [b], start and number of the rows of each sample; 0 rows if it has none.
    """

    values: np.ndarray
    starts_B: np.ndarray
    counts_B: np.ndarray


def array_of(value: Any) -> np.ndarray:
    """Convert ``value`` (a tensor, an array, or lists of numbers) to an array in this machine's byte order.

    Raises:
        ValueError: it has no first dimension, or does not hold numbers.
    """
    import numpy as np

    torch = sys.modules.get("torch")  # a tensor exists only if torch was imported
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value if not value.is_floating_point() or hasattr(np, str(value.dtype)[6:]) else value.float()).numpy()
    values = np.asarray(value)
    if values.dtype.kind not in KINDS or not values.ndim:
        raise ValueError(f"shape {list(values.shape)} of {values.dtype}; accepted: numbers with at least one dimension")
    return np.ascontiguousarray(values, values.dtype.newbyteorder("="))


# --- In files ---------------------------------------------------------------------------------------------------------


def as_json(value: Any) -> Any:
    """Return an object for JSON that encodes the tensor or array ``value``; any other value unchanged."""
    if not hasattr(value, "ndim"):
        return value
    values = array_of(value)
    data = base64.b64encode(values.tobytes()).decode()
    return {ARRAY: values.dtype.str, "shape": list(values.shape), "data": data}


def from_json(value: dict[str, Any]) -> Any:
    """Decode the array in ``value``; return any other object unchanged.

    Raises:
        ValueError, TypeError: it does not encode an array of numbers.
    """
    if ARRAY not in value:
        return value
    import numpy as np

    return np.frombuffer(base64.b64decode(value.get("data", "")), value[ARRAY]).reshape(value.get("shape", ())).copy()


def json_of(inputs: Any) -> Any:
    """Replace the arrays in a mapping by objects for JSON; return any other value unchanged."""
    return {name: as_json(value) for name, value in inputs.items()} if isinstance(inputs, Mapping) else inputs


def read_json(inputs: Any) -> Any:
    """Undo :func:`json_of`; arrays that are decoded already stay."""
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: from_json(value) if isinstance(value, dict) else value for name, value in inputs.items()}


# --- In shards --------------------------------------------------------------------------------------------------------


def column(parts: Sequence[np.ndarray]) -> Opaque:
    """Make the column of samples with ``parts``: at least one array [n, ...], of one dtype and equal shapes after n."""
    import numpy as np

    starts: dict[bytes, int] = {}
    distinct, end, starts_B = [parts[0][:0]], 0, []
    for array in parts:
        start = starts.setdefault(_digest(array), end)
        if start == end and len(array):
            distinct.append(array)
            end += len(array)
        starts_B.append(start if len(array) else 0)
    counts_B = np.array([len(array) for array in parts], np.int64)
    return Opaque(np.concatenate(distinct), np.array(starts_B, np.int64), counts_B)


def part(of: Opaque, sample: int) -> np.ndarray:
    """Return the rows of one sample, a view."""
    start, count = int(of.starts_B[sample]), int(of.counts_B[sample])
    return of.values[start : start + count]


def _digest(values: np.ndarray) -> bytes:
    return hashlib.blake2b(values.tobytes(), digest_size=16, salt=len(values).to_bytes(8, "little")).digest()
