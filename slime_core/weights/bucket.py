"""Buckets of weights that are sent together, as bytes in the server's ``flattened_bucket`` format.

A bucket is one broadcast: the bytes of its weights one after the other, nothing between them. The server views each
piece at its offset, which has to be a multiple of the item size, so a bucket holds one dtype (sglang 0.5.23,
srt/weight_sync/tensor_bucket.py, ``FlattenedTensorBucket.empty``).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime_core.weights.specs import WeightSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Bucket", "checksum", "flatten", "plan_buckets", "spec_of"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Weights of one dtype that are sent together, in this order."""

    specs: tuple[WeightSpec, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def names(self) -> list[str]:
        """Hugging Face names."""
        return [spec.name for spec in self.specs]

    @property
    def dtypes(self) -> list[str]:
        """torch's names of the dtypes."""
        return [spec.dtype for spec in self.specs]

    @property
    def shapes(self) -> list[list[int]]:
        """Sizes."""
        return [list(spec.shape) for spec in self.specs]


def plan_buckets(specs: Sequence[WeightSpec], *, bytes_limit: int) -> list[Bucket]:
    """Every weight in exactly one bucket, in the order in which the buckets are complete when weights arrive as in
    ``specs``.

    Inside a bucket the order of ``specs`` is kept. At most one bucket a dtype is open at a time.

    Arguments:
        specs: all weights in the order of the export.
        bytes_limit: largest bucket in bytes; one larger weight gets a bucket of its own.
    """
    done: list[Bucket] = []
    opened: dict[str, list[WeightSpec]] = {}
    for spec in specs:
        current = opened.setdefault(spec.dtype, [])
        if current and sum(one.nbytes for one in current) + spec.nbytes > bytes_limit:
            done.append(Bucket(tuple(current)))
            current.clear()
        current.append(spec)
    return done + [Bucket(tuple(rest)) for rest in opened.values() if rest]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """uint8 [bytes]: the bytes of ``tensors`` one after the other, a copy on their device."""
    import torch

    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def checksum(flat: torch.Tensor, *, start: int = 0) -> int:
    """CRC-32 of the bytes of a flattened bucket, continuing from ``start``."""
    return zlib.crc32(flat.cpu().numpy().tobytes(), start)


def spec_of(name: str, tensor: torch.Tensor) -> WeightSpec:
    """The spec of ``tensor`` under ``name``."""
    return WeightSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
