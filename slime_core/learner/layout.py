"""Megatron's record of how a model is cut over ranks."""

from __future__ import annotations

from slime_core.errors import RunError
from slime_core.modeling.layout import ParallelLayout

__all__ = ["initialize"]


def initialize(layout: ParallelLayout, *, seed: int) -> None:
    """Cut the default process group of torch.distributed into Megatron's groups, and seed its random number generators.

    Collective over all ranks; a process does it once.

    Arguments:
        layout: the same on every rank.
        seed: the same on every rank; Megatron derives different ones for ranks that hold different slices.

    Raises:
        ConfigError: the layout does not fit the number of ranks.
        RunError: there is no default process group, or Megatron's groups exist already.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        raise RunError("Megatron's groups were asked for before torch.distributed.init_process_group was called")
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
