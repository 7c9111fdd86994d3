"""Weights travel by broadcast: any network, learner and engines on devices of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from slime_core.weights.bucket import Bucket, flatten
from slime_core.weights.endpoints import EngineControl
from slime_core.weights.group import UpdateGroup

if TYPE_CHECKING:
    import torch

__all__ = ["DistributedTransport"]


class DistributedTransport:
    """A :class:`~slime_core.weights.transport.Transport` over ``group``.

    Arguments:
        control: the engines.
        group: spans this process and all of them; closed with the transport.
    """

    def __init__(self, control: EngineControl, group: UpdateGroup) -> None:
        self._control, self._group = control, group
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
