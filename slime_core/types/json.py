"""What JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

__all__ = ["JsonValue"]

JsonValue = Union[None, bool, int, float, str, Sequence["JsonValue"], Mapping[str, "JsonValue"]]  # noqa: UP007 - recursive
"""A value that JSON can hold. Reading JSON gives lists and dictionaries; any sequence or mapping may be given."""
