"""What the samples of a rollout carry for the model beside tokens, as columns of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.opaque import Array, Opaque, array_of, column
from slime_core.types import Sample

__all__ = ["TrainInputs"]

ACCEPTED = "accepted is a table of names and arrays or tensors of numbers, [n, ...], alike but for n in all samples"


class TrainInputs:
    """``Sample.multimodal_train_inputs`` of a rollout; false where no sample has any.

    Raises:
        ValueError: they are no arrays by name, or differ between samples in dtype or in shape behind the first
            dimension.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        given = [_named(sample) for sample in samples]
        names = sorted({name for own in given for name in own})
        self._like = {name: next(own[name] for own in given if name in own) for name in names}
        self._parts = {
            name: [self._fitting(own.get(name), name, sample) for own, sample in zip(given, samples, strict=True)]
            for name in names
        }

    def __bool__(self) -> bool:
        return bool(self._parts)

    def columns(self, members: Sequence[int]) -> dict[str, Opaque]:
        """Those of some samples; a name that none of them has is there all the same, with no rows."""
        return {
            name: column([parts[i] for i in members], self._like[name].dtype) for name, parts in self._parts.items()
        }

    def _fitting(self, found: Array | None, name: str, sample: Sample) -> Any:
        like = self._like[name]
        if found is None:
            return like.values[:0]
        if (found.dtype, found.values.shape[1:]) != (like.dtype, like.values.shape[1:]):
            raise _refusal(sample, f"{name} of {_words(found)}, where another sample has {_words(like)}")
        return found.values


def _named(sample: Sample) -> dict[str, Array]:
    inputs: object = sample.multimodal_train_inputs
    if inputs is None:
        return {}
    if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
        raise _refusal(sample, f"{inputs!r:.60}")
    return {name: _array(sample, name, value) for name, value in inputs.items() if value is not None}


def _array(sample: Sample, name: str, value: Any) -> Array:
    try:
        return array_of(value)
    except (ValueError, TypeError) as problem:
        raise _refusal(sample, f"{name}: {problem}") from None


def _words(array: Array) -> str:
    return f"{array.dtype} [n{''.join(f', {size}' for size in array.values.shape[1:])}]"


def _refusal(sample: Sample, found: str) -> ValueError:
    return ValueError(f"sample {sample.index}: multimodal_train_inputs: {found}; {ACCEPTED}")
