"""The adapter of one Hugging Face module (LoRA, 2106.09685): ``output += scale * B (A input)``.

    Adapter         matrices A [rank, in] and B [out, rank], or their parts on this rank
    Adapters        all adapters of a chunk; a child of the chunk
    AdaptedForward  the forward pass of a linear layer with adapters

With tensor parallelism a column-parallel layer has parts of B, a row-parallel layer parts of A; the other matrix is the
same on every rank. The product with A comes first, so ranks exchange [tokens, rank] instead of [tokens, hidden].

    layer            without sequence parallelism           with it
    column-parallel  copy A x (backward: all-reduce)        gather A x (backward: reduce-scatter)
    row-parallel     all-reduce A x                         reduce-scatter A x

With sequence parallelism a rank has some tokens only, so Megatron sums the gradient of the replicated matrix over
ranks (the mark ``sequence_parallel``). For experts the dispatcher gathers and scatters tokens, and outputs are sums
over ranks; there the gradient of the replicated matrix is summed in the backward pass.

A starts with random numbers that depend on the seed and the module's name, not on the layout; B starts with zeros.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.functional import linear

from slime_lora.targets import Target

__all__ = ["AdaptedForward", "Adapter", "Adapters"]

OUTPUTS, INPUTS = 0, 1
"""Dimensions of a matrix."""


class Adapter(torch.nn.Module):
    """Low-rank correction of one Hugging Face module.

    Arguments:
        module: its name.
        target: the linear layer of Megatron that contains it.
        rows: its output rows on this rank.
        rank: of the product.
        seed: of the start values.

    Attributes:
        A: [rank, in], or this rank's columns.
        B: [rows, rank].
        split: name of the matrix that tensor-parallel ranks share -> its dimension that is split.
    """

    def __init__(self, module: str, target: Target, rows: int, *, rank: int, seed: int) -> None:
        super().__init__()
        layer, weight = target.linear, target.linear.weight
        start = _start(module, rank, layer.input_size, seed=seed)
        if not target.is_column_parallel:
            start = start.chunk(layer.tp_group.size(), INPUTS)[layer.tp_group.rank()]
        self.A = torch.nn.Parameter(start.to(weight.device, weight.dtype).contiguous())
        self.B = torch.nn.Parameter(weight.new_zeros(rows, rank))
        self.split = {"B": OUTPUTS} if target.is_column_parallel else {"A": INPUTS}
        self.is_expert = bool(layer.is_expert)
        self.group = layer.tp_group
        for name, parameter in self.named_parameters():
            set_tensor_model_parallel_attributes(parameter, name in self.split, self.split.get(name, -1), 1)
            summed = layer.sequence_parallel and not layer.is_expert and name not in self.split
            vars(parameter)["sequence_parallel"] = summed and layer.tp_group.size() > 1
            vars(parameter)["allreduce"] = not (layer.is_expert and layer.expert_parallel)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's descriptions of both matrices for a checkpoint, independent of the layout."""
        data_ranks = (
            parallel_state.get_expert_data_parallel_group()
            if self.is_expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, self.split, tp_group=self.group, dp_cp_group=data_ranks
        )
        return state


def _start(module: str, rank: int, size: int, *, seed: int) -> torch.Tensor:
    """Return the start values of A, float32 [rank, size]: uniform, as peft's ``kaiming_uniform_(a=sqrt(5))``."""
    digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (2 * torch.rand(rank, size, generator=generator) - 1) / math.sqrt(size)


class Adapters(torch.nn.Module):
    """The adapters of a chunk, by module.

    Attributes:
        of: module -> adapter.
        is_on: whether forward passes add them.
    """

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        super().__init__()
        self.of = dict(adapters)
        self.is_on = True
        for module, adapter in adapters.items():
            self.add_module(module.replace(".", "/"), adapter)  # torch forbids dots in the names of modules

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return Megatron's descriptions of all matrices; their names are the same in every layout."""
        states = [child.sharded_state_dict(f"{prefix}{name}.") for name, child in self._adapters()]
        return {key: tensor for state in states for key, tensor in state.items()}

    def _adapters(self) -> Iterator[tuple[str, Adapter]]:
        yield from ((name, child) for name, child in self.named_children() if isinstance(child, Adapter))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block, forward passes add no adapter."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class AdaptedForward:
    """Replaces ``forward`` of a linear layer.

    Arguments:
        target: the layer.
        adapters: of its chunk.
        scale: factor of the products.
    """

    def __init__(self, target: Target, adapters: Adapters, *, scale: float) -> None:
        self._forward: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = target.linear.forward
        self._target = target
        self._all = adapters
        self._adapters = [adapters.of.get(module) for module in target.modules]
        self._scale = scale
        self._needs_sum = target.linear.is_expert and target.linear.tp_group.size() > 1
        self._exchanges = not target.linear.is_expert and target.linear.tp_group.size() > 1

    def __call__(self, inputs: torch.Tensor, *others: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output and bias of the layer, with the adapters added to the output."""
        output, bias = self._forward(inputs, *others, **options)
        return (output + self._scale * self._product(inputs) if self._all.is_on else output), bias

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return B (A inputs) of all modules, arranged as the layer's output."""
        adapters = [adapter for adapter in self._adapters if adapter is not None]
        inner = self._inner(inputs, torch.cat([adapter.A for adapter in adapters]))
        parts = iter(inner.chunk(len(adapters), dim=-1))
        outputs = [
            inner.new_zeros(*inner.shape[:-1], rows) if adapter is None else linear(next(parts), self._outer(adapter.B))
            for adapter, rows in zip(self._adapters, self._target.rows, strict=True)
        ]
        return self._target.join(outputs)

    def _inner(self, inputs: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Return A inputs, [tokens, ..., rank], exchanged between tensor-parallel ranks."""
        group, is_column = self._target.linear.tp_group, self._target.is_column_parallel
        if self._needs_sum and is_column:
            matrix = copy_to_tensor_model_parallel_region(matrix, group=group)
        inner = linear(inputs, matrix)
        if not self._exchanges:
            return inner
        exchanges: Sequence[Callable[..., torch.Tensor]] = (
            (gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region)
            if self._target.linear.sequence_parallel
            else (copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region)
        )
        return exchanges[0 if is_column else 1](inner, group=group)

    def _outer(self, matrix: torch.Tensor) -> torch.Tensor:
        if self._needs_sum and not self._target.is_column_parallel:
            matrix = copy_to_tensor_model_parallel_region(matrix, group=self._target.linear.tp_group)
        return matrix
