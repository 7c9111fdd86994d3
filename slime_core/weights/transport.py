"""How the bytes of a publication get to the engines: what every transport does.

    distributed.py   one broadcast a bucket over a process group that spans learner rank 0 and all engines
    tensor.py        one block of shared memory a bucket, on the learner's own machine
    disk.py          a Hugging Face folder a version, which the engines read

The rule between them: a transport carries what :class:`~slime_core.weights.publisher.Publisher` has checked against the
plan, in the planned buckets, and after :meth:`Transport.end` all engines report the version and have forgotten keys and
values of earlier weights. What they then hold is proven by checksums, whatever the way it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from slime_core.weights.bucket import Bucket

if TYPE_CHECKING:
    import torch

__all__ = ["Transport", "TransportName"]

TransportName = Literal["distributed", "tensor", "disk"]


class Transport(Protocol):
    """Carries publications to all engines; used by the learner's first rank only, one publication at a time."""

    def begin(self, version: str) -> None:
        """A publication of ``version`` begins; the engines are paused."""

    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        """``tensors`` are the weights of ``bucket``, in its order; they may change after the return.

        Arguments:
            last: no bucket follows.

        Raises:
            WeightSyncError: an engine refused or died, or the bytes cannot be carried.
        """

    def end(self) -> None:
        """Every engine holds what was sent, reports its version and has forgotten its cache.

        Raises:
            WeightSyncError: an engine refused or died, or the bytes cannot be carried.
        """

    def close(self) -> None:
        """Nothing of the transport is left, on this side or on the engines'."""
