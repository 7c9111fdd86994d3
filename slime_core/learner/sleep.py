"""Takes everything a learner rank holds off its device, and puts it back where it was.

Tensors keep their identity: only the memory under them goes. That is what makes it safe beside Megatron, whose DDP
buffers, optimizer shards and parameters are views of one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from slime_core.learner.trained import TrainedModel

__all__ = ["Bed"]


@dataclass(frozen=True, slots=True)
class _Asleep:
    storage: torch.UntypedStorage
    nbytes: int
    content: torch.Tensor | None


class Bed:
    """Where what a rank holds is kept while it sleeps, in host memory.

    Arguments:
        kept: tensors whose content matters; views of one memory count once.
        scratch: tensors whose content does not: gradients between steps. They come back as zeros.
    """

    def __init__(self, kept: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()) -> None:
        self._kept, self._scratch = list(kept), list(scratch)
        self._asleep: list[_Asleep] = []

    @classmethod
    def of(cls, models: Iterable[TrainedModel]) -> Bed:
        """For all that ``models`` hold now; their gradients, and what Megatron can compute again, are dropped."""
        found = list(models)
        for trained in found:
            trained.optimizer.zero_grad()
        _drop_scratch()
        held = [_device_tensors(trained.model, trained.optimizer) for trained in found]
        kept, scratch = zip(*held, strict=True)
        return cls(chain.from_iterable(kept), chain.from_iterable(scratch))

    def sleep(self) -> int:
        """Give the device memory away; returns its bytes. Nothing to do for one who sleeps."""
        if not self._asleep:
            kept = _storages(self._kept)
            for pointer, storage in (_storages(self._scratch) | kept).items():
                self._asleep.append(_leave(storage, keeps=pointer in kept))
            _empty_cache()
        return sum(one.nbytes for one in self._asleep)

    def wake(self) -> None:
        """Everything is on the device again, as it was; scratch is zero. Nothing to do for one who is awake."""
        while self._asleep:
            one = self._asleep.pop()
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


def _leave(storage: torch.UntypedStorage, *, keeps: bool) -> _Asleep:
    nbytes, content = storage.nbytes(), None
    if keeps:
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        content = torch.empty(nbytes, dtype=torch.uint8).copy_(flat)
    storage.resize_(0)
    return _Asleep(storage, nbytes, content)


def _drop_scratch() -> None:
    """Megatron forgets what it can compute again: tables of rotary angles, and the buffer of gathered activations."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()
    parallel_state.get_global_memory_buffer().buffer.clear()


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
