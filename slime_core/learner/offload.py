"""Moves everything a learner rank holds from its device to host memory, and back to where it was.

Tensors keep their identity: only the memory under them is released. That keeps Megatron intact, whose DDP buffers,
optimizer shards and parameters are views of one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from slime_core.learner.trained_model import TrainedModel

__all__ = ["Offloader"]


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """A storage without memory; ``content`` is its copy in host memory, None where it comes back as zeros."""

    storage: torch.UntypedStorage
    nbytes: int
    content: torch.Tensor | None


class Offloader:
    """Copies tensors to host memory and releases their device memory until :meth:`restore`.

    Arguments:
        tensors: their content is kept; views of one memory count once.
        scratch: their content is not kept, as of gradients between steps. They come back as zeros.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._scratch = list(scratch)
        self._offloaded: list[_Offloaded] = []

    @classmethod
    def of(cls, models: Iterable[TrainedModel]) -> Offloader:
        """For all that ``models`` hold now; their gradients, and what Megatron can compute again, are dropped."""
        trained_models = list(models)
        for trained in trained_models:
            trained.optimizer.zero_grad()
        _drop_caches()
        found = [_device_tensors(trained.model, trained.optimizer) for trained in trained_models]
        tensors, scratch = zip(*found, strict=True)
        return cls(chain.from_iterable(tensors), chain.from_iterable(scratch))

    def offload(self) -> int:
        """Release the device memory; returns its bytes. A second call changes nothing."""
        if not self._offloaded:
            kept = _storages(self._tensors)
            for pointer, storage in (_storages(self._scratch) | kept).items():
                self._offloaded.append(_release(storage, keeps_content=pointer in kept))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return sum(one.nbytes for one in self._offloaded)

    def restore(self) -> None:
        """Put everything back on the device as it was; scratch is zero. A second call changes nothing."""
        while self._offloaded:
            one = self._offloaded.pop()
            one.storage.resize_(one.nbytes)
            flat = torch.empty(0, dtype=torch.uint8, device=one.storage.device).set_(one.storage)
            flat.zero_() if one.content is None else flat.copy_(one.content)


def _device_tensors(model: Iterable[Any], optimizer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What Megatron's DDP chunks and optimizer hold: tensors to keep, and gradients.

    Arguments:
        model: chunks under Megatron's DistributedDataParallel.
        optimizer: of Megatron, chained or not.
    """
    gradients = [buffer.grad_data for chunk in model for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    parameters = [tensor for chunk in model for tensor in [*chunk.parameters(), *chunk.module.buffers()]]
    return [*parameters, *_optimizer_tensors(optimizer)], gradients


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:  # of weights that are all frozen
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    # Memory that is not torch's own cannot be given back: on a CPU, what was read through numpy.
    return {pointer: storage for pointer, storage in found.items() if pointer and storage.resizable()}


def _release(storage: torch.UntypedStorage, *, keeps_content: bool) -> _Offloaded:
    nbytes, content = storage.nbytes(), None
    if keeps_content:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        content = torch.empty(nbytes, dtype=torch.uint8).copy_(flat)
    storage.resize_(0)
    return _Offloaded(storage, nbytes, content)


def _drop_caches() -> None:
    """Empty Megatron's caches: tables of rotary angles, and the buffer of gathered activations."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()
    parallel_state.get_global_memory_buffer().buffer.clear()
