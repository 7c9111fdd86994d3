"""The functions that slime calls for ``--device cpu``; see ``Registration.device``."""

from __future__ import annotations

import ctypes

from slime_cpu import serve

SERVER = serve.MODULE

server_arguments = serve.server_arguments
server_environment = serve.server_environment


def prepare_megatron() -> None:
    """Patch Megatron-core and mbridge, and keep the memory of freed tensors.

    Raises:
        RunError: Megatron-core is already imported.
    """
    from slime_cpu import megatron  # imports torch

    megatron.install()
    keep_freed_memory()


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8
"""Options of mallopt(3), by the numbers of glibc's malloc.h."""

KEEP = {
    M_TRIM_THRESHOLD: -1,  # the heap never shrinks
    M_TOP_PAD: 64 * 2**20,
    M_MMAP_MAX: 0,  # large tensors are in the heap, too
    M_ARENA_MAX: 1,  # there is one heap for all threads
}


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors in this process, if the C library is glibc.

    By default glibc returns it to the kernel, which clears every page before the process gets it again: a tenth of a
    training step on a CPU.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in KEEP.items():
            mallopt(option, value)
