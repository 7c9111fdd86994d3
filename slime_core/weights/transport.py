"""How the bytes of a publication reach the engines.

    DistributedTransport   one broadcast a bucket over a process group of learner rank 0 and all engines
    tensor.py              one block of shared memory a bucket, on the learner's own machine
    disk.py                a Hugging Face folder a version, which the engines read

A transport carries weights that :class:`~slime_core.weights.publisher.Publisher` has compared with the plan, in the
planned buckets. After :meth:`Transport.end` all engines report the version and have flushed the cache of earlier
weights; checksums then prove what they hold, for every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from slime_core.weights.bucket import Bucket, flatten
from slime_core.weights.engine_control import EngineControl
from slime_core.weights.update_group import UpdateGroup

if TYPE_CHECKING:
    import torch

__all__ = ["DistributedTransport", "Transport", "TransportName"]

TransportName = Literal["distributed", "tensor", "disk"]


class Transport(Protocol):
    """Carries publications to all engines; used by the learner's first rank only, one publication at a time."""

    def begin(self, version: str) -> None:
        """Start a publication of ``version``; the engines are paused."""

    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        """Send ``tensors``, the weights of ``bucket`` in its order; the caller may change them afterwards.

        Arguments:
            last: no bucket follows.

        Raises:
            WeightSyncError: an engine refused or died, or the bytes cannot be carried.
        """

    def end(self) -> None:
        """Finish: every engine holds the weights, reports the version and has flushed its cache.

        Raises:
            WeightSyncError: an engine refused or died, or the bytes cannot be carried.
        """

    def close(self) -> None:
        """Release everything, on this side and on the engines'."""


class DistributedTransport:
    """Weights travel by broadcast: over any network, to engines on devices of their own.

    Arguments:
        control: the engines.
        group: spans this process and all of them; closed with the transport.
    """

    def __init__(self, control: EngineControl, group: UpdateGroup) -> None:
        self._control = control
        self._group = group
        self._version = ""

    def begin(self, version: str) -> None:
        """See the protocol."""
        self._version = version
        self._control.begin_update()

    def send(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, last: bool) -> None:
        """See the protocol."""
        self._control.update_from_distributed(
            bucket,
            group=self._group.name,
            send=partial(self._group.broadcast, flatten(tensors)),
            version=self._version if last else None,
            flush_cache=last,
        )

    def end(self) -> None:
        """See the protocol."""
        self._control.end_update()

    def close(self) -> None:
        """See the protocol."""
        self._group.close()
