"""The parallel layout of a model over ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from slime_core.config.learning import ParallelConfig
from slime_core.errors import ConfigError

__all__ = ["ParallelLayout", "initialize_model_parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the axes along which a model is split; the rest of the world is data parallel.

    Example: ``ParallelLayout(tensor=2, pipeline=2)`` on 8 ranks leaves 2 data-parallel replicas.

    Arguments:
        tensor: ranks that share every matrix.
        pipeline: ranks that share the stack of layers.
        context: ranks that share every sequence.
        expert: ranks that share the experts of a mixture.
        expert_tensor: ranks that share every matrix of an expert; 0: ``tensor``. With fewer, the remaining
            tensor-parallel ranks share experts.
        virtual_pipeline: chunks of layers of each pipeline rank, interleaved; 1: not interleaved.
        sequence: True: tensor-parallel ranks also share the tokens between matrices (sequence parallelism).
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    virtual_pipeline: int = 1
    sequence: bool = False

    @classmethod
    def of(cls, settings: ParallelConfig) -> ParallelLayout:
        """Return the layout that the settings of a run request."""
        return cls(
            tensor=settings.tensor_model_parallel_size,
            pipeline=settings.pipeline_model_parallel_size,
            context=settings.context_parallel_size,
            expert=settings.expert_model_parallel_size,
            # Without expert parallelism the size is the tensor size, or there are no experts.
            expert_tensor=(settings.expert_tensor_parallel_size or 0) if settings.expert_model_parallel_size > 1 else 0,
            virtual_pipeline=settings.num_virtual_stages_per_pipeline_rank,
            # Megatron-core refuses it without tensor-parallel ranks, so it is switched off as in Megatron's arguments.
            sequence=settings.sequence_parallel and settings.tensor_model_parallel_size > 1,
        )

    def __post_init__(self) -> None:
        if self.expert_tensor == 0:
            object.__setattr__(self, "expert_tensor", self.tensor)
        too_small = {name: size for name, size in asdict(self).items() if name != "sequence" and size < 1}
        if too_small:
            raise ConfigError(f"parallel sizes must be at least 1, not {too_small}")
        if self.expert == 1 and self.expert_tensor != self.tensor:
            raise ConfigError(
                f"expert tensor size {self.expert_tensor} with tensor size {self.tensor} and expert size 1; "
                "a different size needs experts that ranks share: an expert size of at least 2"
            )

    @property
    def model_size(self) -> int:
        """Number of ranks that together have one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def row_multiple(self) -> int:
        """Divisor of the number of tokens of a packed row, so that its ranks get equal shares."""
        chunks = 2 * self.context if self.context > 1 else 1
        return chunks * (self.tensor if self.sequence else 1)

    def stages(self, num_layers: int) -> list[list[str]]:
        """Return the modules of each chunk of a pipeline, as Megatron's ``pipeline_model_parallel_layout``.

        Chunk ``i`` belongs to pipeline rank ``i % pipeline``. Layers are distributed evenly; remaining layers go to the
        first chunks, because the last chunk also computes the logits.

        Example: 3 layers over 2 ranks: ``[["embedding", "decoder", "decoder"], ["decoder", "loss"]]``.

        Raises:
            ConfigError: a chunk other than the last would have no layer.
        """
        count = self.pipeline * self.virtual_pipeline
        base, more = divmod(num_layers, count)
        if num_layers < max(count - 1, 1):
            raise ConfigError(
                f"pipeline size {self.pipeline} with {self.virtual_pipeline} chunks a rank needs more layers than "
                f"the {num_layers} of the model; at most {num_layers + 1} chunks altogether are accepted"
            )
        chunks = [["decoder"] * (base + (number < more)) for number in range(count)]
        chunks[0].insert(0, "embedding")
        chunks[-1].append("loss")
        return chunks

    def data_rank(self, rank: int, *, world_size: int) -> int:
        """Return the data-parallel replica of process ``rank``; all ranks of one replica train the same shard.

        Megatron numbers tensor ranks first, then context, data and pipeline ranks (parallel_state.py, order
        "tp-cp-ep-dp-pp").
        """
        return self.coordinates(rank, world_size=world_size)["data"]

    def coordinates(self, rank: int, *, world_size: int) -> dict[str, int]:
        """Return the index of process ``rank`` on each axis, in Megatron's order (see :meth:`data_rank`).

        Example: with 2 tensor and 2 pipeline ranks, rank 5 of 8 is ``{"tensor": 1, "context": 0, "data": 0,
        "pipeline": 1}``.
        """
        sizes = {"tensor": self.tensor, "context": self.context, "data": self.data_size(world_size)}
        indices = {}
        for axis, size in sizes.items():
            rank, indices[axis] = divmod(rank, size)
        return {**indices, "pipeline": rank}

    def data_size(self, world_size: int) -> int:
        """Return the number of data-parallel replicas on ``world_size`` ranks.

        Raises:
            ConfigError: the ranks are not a multiple of a copy of the model, or the experts do not divide the replicas.
        """
        data, remainder = divmod(world_size, self.model_size)
        if remainder or data == 0:
            raise ConfigError(
                f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} on "
                f"{world_size} ranks; the number of ranks must be a multiple of {self.model_size}"
            )
        sharing = data * self.context * self.tensor
        if sharing % (self.expert * self.expert_tensor):
            raise ConfigError(
                f"expert size {self.expert} x expert tensor size {self.expert_tensor} on the {sharing} ranks of a "
                f"pipeline stage (data {data} x context {self.context} x tensor {self.tensor}); the former must divide "
                "the latter"
            )
        return data


def initialize_model_parallel(layout: ParallelLayout, *, seed: int) -> None:
    """Create Megatron's parallel groups over the default process group, and seed its random number generators.

    Collective over all ranks; a process does it once.

    Arguments:
        layout: the same on every rank.
        seed: the same on every rank; Megatron derives different ones for ranks that hold different slices.

    Raises:
        ConfigError: the layout does not fit the number of ranks.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    layout.data_size(dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
