"""Joins a learner process to the process group and to Megatron's parallel groups."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime_core.cpu.accelerator import accelerator
from slime_core.errors import RunError
from slime_core.learner.settings import LearnerSettings
from slime_core.modeling.layout import ParallelLayout
from slime_core.weights.update_group import serve_store

__all__ = ["initialize_model_parallel", "prepare_process"]

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
        # Ray shows every actor only its own device, as number 0.
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


def initialize_model_parallel(layout: ParallelLayout, *, seed: int) -> None:
    """Create Megatron's parallel groups over the default process group, and seed its random number generators.

    Collective over all ranks; a process does it once.

    Arguments:
        layout: the same on every rank.
        seed: the same on every rank; Megatron derives different ones for ranks that hold different slices.

    Raises:
        ConfigError: the layout does not fit the number of ranks.
        RunError: there is no default process group, or Megatron's groups exist already.
    """
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        raise RunError(
            "Megatron's process groups need torch.distributed; call torch.distributed.init_process_group first"
        )
    if parallel_state.model_parallel_is_initialized():
        raise RunError(
            "Megatron's groups exist already in this process; it holds one layout, a second one needs other processes"
        )
    layout.data_size(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _repeat_bit_for_bit(*, strict: bool) -> None:
    """Use torch's deterministic operations, so that training on the same rollouts again gives the same bits.

    An operation without a deterministic version fails, or warns unless ``strict``.
    """
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    # By default it fills fresh memory with NaN, which costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _rendezvous_store(settings: LearnerSettings) -> Any:
    """torch's store where the ranks find each other; rank 0 serves it, on the address of the settings only."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = settings.address.rpartition(":")
    if settings.rank == 0:
        return serve_store(host, world_size=settings.world_size, timeout=COLLECTIVE_TIMEOUT, port=int(port))
    return TCPStore(host, int(port), settings.world_size, is_master=False, timeout=COLLECTIVE_TIMEOUT)
