"""Token ids, log-probabilities and masks: flat arrays that behave like the lists that user code expects."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["LogProbs", "Mask", "Numbers", "TokenIds"]


class Numbers(array):  # type: ignore[type-arg]
    """A flat array that reads, adds and compares like a list of numbers, at 1 to 4 bytes an entry."""

    __slots__ = ()
    code = "i"

    def __new__(cls, values: Iterable[float] = ()) -> Numbers:
        return super().__new__(cls, cls.code, values)

    def __add__(self, other: Iterable[Any]) -> Any:
        return type(self)([*self, *other])

    def __radd__(self, other: Iterable[Any]) -> Any:
        return type(self)([*other, *self])

    def __iadd__(self, other: Iterable[Any]) -> Any:
        self.extend(type(self)(other))
        return self

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return type(self)(found) if isinstance(index, slice) else found

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence | array) else NotImplemented

    __hash__ = None

    def __copy__(self) -> Any:
        return type(self)(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)(self)


class TokenIds(Numbers):
    """Token ids, int32."""

    code = "i"


class LogProbs(Numbers):
    """Natural-log probabilities, float32."""

    code = "f"


class Mask(Numbers):
    """Zeros and ones, int8."""

    code = "b"
