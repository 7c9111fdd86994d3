"""How many bytes of GPU memory training takes on each rank, for every layout of a number of GPUs.

Counted: weights in bfloat16, gradients in float32, Adam's state (float32 copy, mean and variance of every weight),
which is spread over data-parallel ranks; the input of every layer of one micro-batch under full recomputation, one
layer's intermediate values, and the logits of a micro-batch with their gradient. Not counted: what CUDA and NCCL
reserve, and fragmentation, for which a tenth of the memory is left; engines on the same GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slime_models.count import Parameters, count
from slime_models.shape import Shape

__all__ = ["Layout", "Usage", "layouts", "usage"]

GIB = 2**30
WEIGHT, GRADIENT, STATE, ACTIVATION, LOGIT = 2, 4, 12, 2, 8
"""Bytes of a number: bfloat16, float32, three of float32, bfloat16, float32 with its gradient."""

SHARE = 0.9
"""Of the memory that the counted parts may take."""

GPUS_OF_A_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is cut; the rest of the GPUs are data-parallel."""

    tensor: int
    pipeline: int
    expert: int
    data: int

    @property
    def flags(self) -> str:
        """As flags to paste."""
        gpus = self.tensor * self.pipeline * self.data
        nodes, each = max(1, gpus // GPUS_OF_A_NODE), min(gpus, GPUS_OF_A_NODE)
        found = [f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {each}"]
        if self.tensor > 1:
            found.append(f"--tensor-model-parallel-size {self.tensor} --sequence-parallel")
        if self.pipeline > 1:
            found.append(f"--pipeline-model-parallel-size {self.pipeline}")
        if self.expert > 1:
            found.append(f"--expert-model-parallel-size {self.expert}")
        return " ".join([*found, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes on the fullest rank, by part."""

    layout: Layout
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All counted parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits


def layouts(shape: Shape, gpus: int, memory_gib: float, *, tokens: int) -> list[Usage]:
    """Those that fit, the best first: few ranks for one copy of the model, then few pipeline stages, few expert ranks.

    Arguments:
        gpus: for training; a whole number of nodes of 8 above 8.
        memory_gib: of one GPU.
        tokens: of one micro-batch.
    """
    counted = count(shape)
    found = [usage(shape, counted, layout, tokens=tokens) for layout in _layouts(shape, gpus)]
    fitting = [one for one in found if one.total <= memory_gib * GIB * SHARE]
    return sorted(fitting, key=lambda one: _rank(one.layout))


def _rank(layout: Layout) -> tuple[int, ...]:
    return layout.tensor * layout.pipeline, layout.pipeline, layout.expert


def _layouts(shape: Shape, gpus: int) -> Iterator[Layout]:
    experts = shape.experts.n_routed_experts if shape.experts else 1
    heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.vocab_size)
    for tensor in _powers(min(gpus, GPUS_OF_A_NODE)):
        if any(number % tensor for number in heads):
            continue
        for pipeline in _powers(gpus // tensor):
            data, rest = divmod(gpus, tensor * pipeline)
            if rest or pipeline > shape.num_hidden_layers:
                continue
            sizes = [size for size in _powers(data) if experts % size == 0 and data % size == 0]
            yield from (Layout(tensor=tensor, pipeline=pipeline, expert=size, data=data) for size in sizes)


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(max(most, 1).bit_length())]


def usage(shape: Shape, counted: Parameters, layout: Layout, *, tokens: int) -> Usage:
    """Bytes on the fullest rank.

    Arguments:
        counted: the parameters of ``shape``.
        tokens: of one micro-batch.
    """
    layers = math.ceil(shape.num_hidden_layers / layout.pipeline)
    share = layers / shape.num_hidden_layers / layout.tensor
    ends = counted.embedding + counted.output if layout.pipeline == 1 else max(counted.embedding, counted.output)
    dense = counted.dense * share + ends / layout.tensor
    experts = counted.experts * share / layout.expert
    spread = dense / layout.data + experts / (layout.data / layout.expert)
    row = tokens * shape.hidden_size * ACTIVATION
    width = 4 * shape.hidden_size + 3 * _width(shape)
    # A stage holds the inputs of as many micro-batches as there are stages before it is their turn backwards.
    kept = layers * layout.pipeline * row / layout.tensor
    return Usage(
        layout=layout,
        weights=int(WEIGHT * (dense + experts)),
        gradients=int(GRADIENT * (dense + experts)),
        optimizer=int(STATE * spread),
        activations=int(kept + tokens * width * ACTIVATION * 2 / layout.tensor),
        logits=int(tokens * shape.vocab_size * LOGIT / layout.tensor),
    )


def _width(shape: Shape) -> int:
    """Of the widest MLP that a token passes."""
    if shape.experts is None:
        return shape.intermediate_size
    each = shape.experts.moe_intermediate_size
    return max(shape.intermediate_size, each * (shape.experts.num_experts_per_tok + shape.experts.n_shared_experts))
