"""One learner process: its groups, and the memory that it holds on its device.

:func:`prepare_process` joins the process group and Megatron's parallel groups. :class:`Offloader` moves everything
that the rank holds from its device to host memory, and back. Tensors keep their identity: only the
memory under them is released. That keeps Megatron intact, whose DDP buffers, optimizer shards and parameters are views
of one another.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.learner import LearnerSettings
from slime_core.learner.trained_model import TrainedModel
from slime_core.modeling.layout import initialize_model_parallel
from slime_core.modeling.patches import accelerator
from slime_core.weights.engine_control import serve_store

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Limit of one collective operation; torch's default for gloo is half an hour."""


def prepare_process(settings: LearnerSettings) -> torch.device:
    """Join the process group, seed every generator and initialise Megatron; returns the device of this rank."""
    kind = accelerator(settings.config.cluster.device)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    if settings.config.is_deterministic:
        _repeat_bit_for_bit()
    device = torch.device("cpu")
    if kind == "cuda":
        # Ray shows every actor only the device of this actor, as number 0.
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=_rendezvous_store(settings),
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    seed = settings.config.run.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    initialize_model_parallel(settings.layout, seed=seed)
    return device


def leave_process_groups() -> None:
    """Leave Megatron's parallel groups and the process group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""Variables with which cuBLAS (its documentation, "Results reproducibility") and TransformerEngine repeat results. The
libraries read them at their first operation on a GPU."""


def _repeat_bit_for_bit() -> None:
    """Use torch's deterministic operations, so that training on the same rollouts again gives the same bits.

    An operation without a deterministic version fails. With ``warn_only`` attention would keep its faster backward
    pass, which adds in any order (aten/native/transformers/cuda/attention_backward.cu).
    """
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # By default it fills fresh memory with NaN, which costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _rendezvous_store(settings: LearnerSettings) -> Any:
    """Return torch's store, in which the ranks find each other; rank 0 serves it, only on the settings' address."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = settings.address.rpartition(":")
    if settings.rank == 0:
        return serve_store(host, world_size=settings.world_size, timeout=COLLECTIVE_TIMEOUT, port=int(port))
    return TCPStore(host, int(port), settings.world_size, is_master=False, timeout=COLLECTIVE_TIMEOUT)


CHUNK = 2**28
"""Bytes of a host buffer, a power of two: torch rounds page-locked memory up to one, so that a buffer for each tensor
would take up to twice its size."""

ALIGNMENT = 256
"""Bytes, of which the place of a tensor in a host buffer is a multiple."""


class HostChunks:
    """Host memory for a number of tensors, in chunks that they share.

    With a GPU the memory is page-locked, because the driver copies pageable memory through a small buffer. Page-locking
    takes longer than the copy, but torch keeps freed page-locked memory and uses it again.

    Arguments:
        sizes: bytes of every tensor that will be copied.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._left = sum(map(_aligned, sizes))
        self._room = torch.empty(0, dtype=torch.uint8)

    def copy(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a copy of ``flat``, a tensor of bytes; complete after a synchronisation on a GPU."""
        parts = []
        while len(flat):
            if not len(self._room):
                self._room = self._next_chunk()
            part, flat = flat[: len(self._room)], flat[len(self._room) :]
            parts.append(self._room[: len(part)].copy_(part, non_blocking=True))
            self._room = self._room[_aligned(len(part)) :]
        return parts

    def _next_chunk(self) -> torch.Tensor:
        nbytes = min(CHUNK, self._left)
        self._left -= nbytes
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """A storage whose memory is released; ``content`` is its copy in host memory, None if it is restored as zeros."""

    storage: torch.UntypedStorage
    nbytes: int
    content: list[torch.Tensor] | None


class Offloader:
    """Copies tensors to host memory and releases their device memory until :meth:`restore`.

    Arguments:
        tensors: tensors whose content is kept; views of one storage count once.
        scratch: tensors whose content is not kept, such as gradients between steps. They are restored as zeros.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._scratch = list(scratch)
        self._offloaded: list[_Offloaded] = []

    @classmethod
    def of(cls, models: Sequence[TrainedModel]) -> Offloader:
        """Build an offloader of all tensors that ``models`` hold; drop their gradients and Megatron's caches."""
        for trained in models:
            trained.optimizer.zero_grad()
        _drop_caches()
        tensors, scratch = zip(*(_device_tensors(trained.model, trained.optimizer) for trained in models), strict=True)
        return cls(chain.from_iterable(tensors), chain.from_iterable(scratch))

    def offload(self, *, but: Iterable[torch.Tensor] = ()) -> int:
        """Release the device memory of all tensors except ``but``; return the bytes released so far.

        May be called again with fewer exceptions.
        """
        copied, excepted = _storages(self._tensors), _storages(but)
        storages = _storages(self._scratch) | copied
        leaving = {pointer: storage for pointer, storage in storages.items() if pointer not in excepted}
        host = HostChunks(storage.nbytes() for pointer, storage in leaving.items() if pointer in copied)
        released = [
            _Offloaded(storage, storage.nbytes(), host.copy(_flat(storage)) if pointer in copied else None)
            for pointer, storage in leaving.items()
        ]
        _synchronize()
        for offloaded in released:
            offloaded.storage.resize_(0)
        self._offloaded += released
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return sum(offloaded.nbytes for offloaded in self._offloaded)

    def restore(self) -> None:
        """Restore everything on the device; scratch is zero. A second call changes nothing."""
        for offloaded in self._offloaded:
            offloaded.storage.resize_(offloaded.nbytes)
            flat, parts = _flat(offloaded.storage), offloaded.content
            if parts is None:
                flat.zero_()
                continue
            for target, part in zip(flat.split([len(part) for part in parts]), parts, strict=True):
                target.copy_(part, non_blocking=True)
        _synchronize()
        self._offloaded.clear()


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device_tensors(model: Iterable[Any], optimizer: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors of Megatron's DDP chunks and optimizer: the ones to keep, and the gradients.

    Arguments:
        model: chunks under Megatron's DistributedDataParallel.
        optimizer: of :func:`~slime_core.learner.optimizer.build_optimizer`.
    """
    gradients = [buffer.grad_data for chunk in model for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    parameters = [tensor for chunk in model for tensor in [*chunk.parameters(), *chunk.module.buffers()]]
    return [*parameters, *_optimizer_tensors(optimizer)], gradients


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Iterate over master weights and state on the model's device; a hybrid optimizer has others on the host."""
    for part in optimizer.chained_optimizers:
        adams = [part.optimizer, *getattr(part.optimizer, "sub_optimizers", ())]
        held = [tensor for adam in adams for group in adam.param_groups for tensor in group["params"]]
        states = (state.values() for state in part.optimizer.state.values())
        held += [value for values in states for value in values if isinstance(value, torch.Tensor)]
        yield from (tensor for tensor in held if tensor.is_cuda == held[0].is_cuda)


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    # Memory that torch did not allocate cannot be released: on a CPU, tensors that were read through numpy.
    return {pointer: storage for pointer, storage in storages.items() if pointer and storage.resizable()}


def _drop_caches() -> None:
    """Empty Megatron's caches: tables of rotary angles, and the buffer of gathered activations."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()
    parallel_state.get_global_memory_buffer().buffer.clear()
