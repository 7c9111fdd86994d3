"""The numbers of one step: named once, finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real

from slime_core.errors import NonFiniteError

__all__ = ["Metrics"]


class Metrics(Mapping[str, float]):
    """Names and finite numbers, in the order they came; a name can be given once.

    Example::

        >>> metrics = Metrics({"train/loss": 0.5})
        >>> metrics["rollout/raw_reward"] = 1
        >>> dict(metrics)
        {'train/loss': 0.5, 'rollout/raw_reward': 1.0}

    Raises:
        ValueError: a name is given twice: two places would report under one name and the reader would see either.
        TypeError: a value is not a real number (a tensor, a string).
        NonFiniteError: a value is NaN or infinite.
    """

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._values: dict[str, float] = {}
        self.update(values or {})

    def __setitem__(self, name: str, value: float) -> None:
        if name in self._values:
            raise ValueError(
                f"Metric {name!r} is already {self._values[name]} in this step; name the second differently."
            )
        self._values[name] = _finite(name, value)

    def update(self, values: Mapping[str, float]) -> None:
        """Add all of ``values``; the same rules as for one."""
        for name, value in values.items():
            self[name] = value

    def add(self, name: str, amount: float) -> None:
        """Add ``amount`` to what ``name`` holds, or to 0: for times and counts that come in parts."""
        self._values[name] = self._values.get(name, 0.0) + _finite(name, amount)

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _finite(name: str, value: float) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"Metric {name!r} is a {type(value).__name__}; give a number (a tensor's .item()).")
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(
            f"Metric {name!r} is {number}. Nothing computed from it may be trained on or published; "
            "look at the samples and the gradient norm of the step before."
        )
    return number
