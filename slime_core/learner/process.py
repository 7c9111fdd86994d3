"""How one learner process joins the others."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.cpu.accelerator import accelerator
from slime_core.learner.layout import initialize
from slime_core.learner.settings import LearnerSettings
from slime_core.weights.group import listening_store

__all__ = ["prepare_process"]

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Limit of one collective operation; torch's own default for gloo is half an hour."""


def prepare_process(settings: LearnerSettings) -> torch.device:
    """Join the process group, seed every generator and initialise Megatron; returns the device of this rank."""
    kind = accelerator(settings.config.cluster.device)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    if not settings.config.debug.generates:
        _repeat_bit_for_bit(strict=kind == "cpu")
    device = torch.device("cpu")
    if kind == "cuda":
        # Ray shows every actor its own device only, which is then number 0.
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=_meeting_point(settings),
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    seed = settings.config.run.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    initialize(settings.layout, seed=seed)
    return device


def _repeat_bit_for_bit(*, strict: bool) -> None:
    """Training on the same rollouts again gives the same bits: operations that add up in the order in which threads
    come are replaced, and where there is no other, they fail (or warn, unless ``strict``)."""
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # It would fill fresh memory with NaN, which costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _meeting_point(settings: LearnerSettings) -> Any:
    """The store where the ranks find each other; rank 0 serves it, on the agreed address only."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = settings.address.rpartition(":")
    if settings.rank == 0:
        return listening_store(host, world_size=settings.world_size, timeout=COLLECTIVE_TIMEOUT, port=int(port))
    return TCPStore(host, int(port), settings.world_size, is_master=False, timeout=COLLECTIVE_TIMEOUT)
