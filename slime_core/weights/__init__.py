"""Sends weights from the learner to the engines by name, in buckets, checked before and after.

    publisher       one publication from pause to resume; the plan of buckets
    checksums       the engines' checksums against those of the sent weights
    transports      how buckets reach the engines: a process group, shared memory, files
    engine_control  control calls to the servers over HTTP
    hugging_face    names, dtypes and shapes of a Hugging Face folder's weights; writes such folders, for disk and for
                    checkpoints

The rule between the parts: nothing is sent before :func:`~.publisher.require_matching_specs` has passed, because a
weight of a wrong shape kills a server; and no engine resumes before all engines have loaded all weights.

The driver creates :class:`PublisherSettings` and does not load torch. So this file, ``engine_control`` and
``hugging_face`` import torch only in functions that use it; the others import it at the top.

PUBLIC: the names in ``__all__``, for programs that read and write Hugging Face folders. The modules are private.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_core.weights.engine_control import PauseMode
from slime_core.weights.hugging_face import (
    HuggingFaceFolder,
    WeightSpec,
    WrittenFile,
    copy_small_files,
    expected_specs,
    require_complete_files,
    weight_files,
)

__all__ = [
    "HuggingFaceFolder",
    "WeightSpec",
    "WrittenFile",
    "copy_small_files",
    "expected_specs",
    "require_complete_files",
    "weight_files",
]

Backend = Literal["gloo", "nccl"]
TransportName = Literal["distributed", "tensor", "disk"]


LARGE_MODEL = 30 * 10**9
"""Parameters from which larger buckets save more time than their memory is worth."""


def bucket_bytes(limit: int | None, num_parameters: int) -> int:
    """Return the largest bucket in bytes; ``limit``: ``--update-weight-buffer-size``, None if it is not given."""
    if limit is not None:
        return limit
    return (2 * 1024 if num_parameters >= LARGE_MODEL else 512) * 1024**2


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Settings of publications.

    Arguments:
        model: Hugging Face folder that the engines were started from.
        dtype: of the engines' weights, torch's name.
        bytes_limit: largest bucket in bytes; with ``gloo`` at most ``CPU_BUCKET_BYTES``. None: :func:`bucket_bytes`.
        backend: ``nccl`` where learner and engines have GPUs, else ``gloo``.
        devices_per_engine: processes of one engine; one number for all engines, or one per engine.
        address: of the learner's first rank as the engines see it; that rank binds it.
        timeout_s: limit of every call.
        transport: how weights travel; ``tensor`` needs each engine on the machine of the rank that shares its weights.
        disk_folder: for ``disk``: a folder that learner and engines see.
        engine_gpus: for ``tensor`` on GPUs: UUID of the GPU of each process of each engine, one tuple per engine;
            empty: the processes read the weights from host memory, which is slower.
        holders: for ``tensor``: the learner rank whose memory each process of each engine reads, one tuple per engine;
            empty: the first rank.
        pause_mode: whether requests in flight are aborted, retracted or kept.
        rearranges: whether the engines quantize weights, or split or store them in a way that is unknown here; their
            checksums are then compared with each other only.
        resumes: whether the publisher resumes the engines after an update; False: the caller does.
    """

    model: Path
    dtype: str = "float32"
    bytes_limit: int | None = None
    backend: Backend = "gloo"
    devices_per_engine: int | tuple[int, ...] = 1
    address: str = "127.0.0.1"
    timeout_s: float = 120.0
    transport: TransportName = "distributed"
    disk_folder: Path | None = None
    engine_gpus: tuple[tuple[str, ...], ...] = ()
    holders: tuple[tuple[int, ...], ...] = ()
    pause_mode: PauseMode = "retract"
    rearranges: bool = False
    resumes: bool = True
