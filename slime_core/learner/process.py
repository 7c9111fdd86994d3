"""What one learner process is told, and how it joins the others."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.config.schema import RunConfig
from slime_core.cpu.accelerator import accelerator
from slime_core.learner.layout import ParallelLayout, initialize
from slime_core.weights.group import listening_store

__all__ = ["LearnerSettings", "prepare_process"]

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Limit of one collective operation; torch's own default for gloo is half an hour."""


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """What a learner rank needs to know.

    Arguments:
        config: the run's settings.
        folder: Hugging Face folder with the start weights.
        architecture: the checkpoint's architecture string; a plugin's model spec fits it.
        policy_loss: name of the policy loss component.
        options: plugin name -> its options object.
        num_steps: optimizer steps of the whole run, for the schedule.
        rank, world_size: of the process among the learner's.
        address: ``host:port`` where rank 0 listens for the others.
        num_threads: threads of one operation on a CPU; 0: torch decides.
    """

    config: RunConfig
    folder: Path
    architecture: str
    policy_loss: str
    options: dict[str, Any]
    num_steps: int
    rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1:29500"
    num_threads: int = 0
    layout: ParallelLayout = field(default_factory=ParallelLayout)


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
