"""How many bytes of GPU memory training takes on each rank, for every layout of a number of GPUs.

Counted, in bytes a number: weights (2 in bfloat16), gradients (4), Adam's state, which is spread over data-parallel
ranks (12: float32 copy, mean and variance; 8 where the weights are float32), the activations of one micro-batch, and
its logits with their gradient (8). Not counted: what CUDA and NCCL reserve, unequal numbers of tokens for experts, and
fragmentation, for which a tenth of the memory is left.

A layer of Megatron's local ones keeps, for each token of a row::

    6 h + 6 q + 3 k + 8 d + 5 w
    6 h + 6 q + 3 k + 8 d + n h + 5 (n e + s) + 1.25 E      in a layer that takes n of E experts

entries: h hidden, q and k of all query and key heads, d of one head; inside the MLP, an expert and shared ones w, e and
s. That is what torch keeps for the backward pass in float32 on a CPU, within 10 %; fused norms of a GPU keep 2 h less.
With full recomputation a layer keeps h, and one layer at a time has all of the above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["GIB", "GPUS_OF_A_NODE", "SHARE", "Cut", "ModelSize", "Recompute", "Usage", "layouts", "usage"]

GIB = 2**30
GRADIENT, MOMENTS, MASTER, LOGIT = 4, 8, 4, 8
"""Bytes of a number: float32, two of float32, one of float32, float32 with its gradient."""

SHARE = 0.9
"""Of the memory that the counted parts may take."""

GPUS_OF_A_NODE = 8

Recompute = Literal["none", "full"]
FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the memory of a decoder depends on.

    Arguments:
        layers, hidden, vocab, heads, key_heads: how many.
        head: entries of a head.
        inner: of the MLP of a layer without experts; 0: every layer has experts.
        experts, taken, expert_inner, shared_inner: experts of a layer, those that a token takes, their inner size and
            that of shared ones; 0: there are none.
        embedding, output, routed, dense: parameters of the embedding, of output weights (0: tied), of routed experts,
            and of the rest.
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    key_heads: int
    head: int
    inner: int
    embedding: int
    output: int
    dense: int
    experts: int = 0
    taken: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    routed: int = 0

    @property
    def kept(self) -> float:
        """Entries that the larger kind of layer keeps for each token."""
        attention = 6 * self.hidden + 6 * self.heads * self.head + 3 * self.key_heads * self.head + 8 * self.head
        mixture = 0.0
        if self.experts:
            inner = self.taken * self.expert_inner + self.shared_inner
            mixture = self.taken * self.hidden + 5 * inner + 1.25 * self.experts
        return attention + max(5 * self.inner, mixture)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the model is cut; the rest of the GPUs are data-parallel.

    Arguments:
        expert_tensor: ranks that share a matrix of an expert; 0: as many as ``tensor``.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 0
    data: int = 1
    recompute: Recompute = "full"

    @property
    def flags(self) -> str:
        """As flags to paste."""
        gpus = self.tensor * self.pipeline * self.context * self.data
        nodes, each = max(1, gpus // GPUS_OF_A_NODE), min(gpus, GPUS_OF_A_NODE)
        found = [f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {each}"]
        if self.tensor > 1:
            found.append(f"--tensor-model-parallel-size {self.tensor} --sequence-parallel")
        if self.pipeline > 1:
            found.append(f"--pipeline-model-parallel-size {self.pipeline}")
        if self.context > 1:
            found.append(f"--context-parallel-size {self.context}")
        if self.expert > 1:
            found.append(f"--expert-model-parallel-size {self.expert}")
            if self.expert_tensor not in (0, self.tensor):
                found.append(f"--expert-tensor-parallel-size {self.expert_tensor}")
        return " ".join([*found, *([FULL_RECOMPUTE] if self.recompute == "full" else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes on the fullest rank, by part."""

    cut: Cut
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All counted parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        names = ("weights", "gradients", "optimizer", "activations", "logits")
        return {name: getattr(self, name) for name in names}


def layouts(
    size: ModelSize, gpus: int, memory_gib: float, *, tokens: int, item: int = 2, roles: int = 0
) -> list[Usage]:
    """Those that fit, the best first: few ranks for a copy of the model, few stages, few expert ranks.

    Arguments:
        gpus: for training; a whole number of nodes of 8 above 8.
        memory_gib: of one GPU.
        tokens, item, roles: as :func:`usage` takes them.
    """
    found = (usage(size, cut, tokens=tokens, item=item, roles=roles) for cut in _cuts(size, gpus))
    return sorted((one for one in found if one.total <= memory_gib * GIB * SHARE), key=lambda one: _rank(one.cut))


def _rank(cut: Cut) -> tuple[int, ...]:
    whole = cut.expert_tensor in (0, cut.tensor)
    return cut.tensor * cut.pipeline, cut.pipeline, cut.expert, not whole, cut.recompute == "full"


def _cuts(size: ModelSize, gpus: int) -> Iterator[Cut]:
    for tensor in _powers(min(gpus, GPUS_OF_A_NODE)):
        if any(number % tensor for number in (size.heads, size.key_heads, size.vocab)):
            continue
        for pipeline in _powers(gpus // tensor):
            data, rest = divmod(gpus, tensor * pipeline)
            if rest or pipeline > size.layers:
                continue
            for expert, each in _expert_cuts(size, tensor, data):
                for kind in ("none", "full"):
                    yield Cut(
                        tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=each, data=data, recompute=kind
                    )


def _expert_cuts(size: ModelSize, tensor: int, data: int) -> Iterator[tuple[int, int]]:
    """Expert and expert tensor sizes."""
    for each in dict.fromkeys((tensor, 1)):
        ranks = data * tensor // each
        for expert in _powers(ranks):
            divides = (size.experts or 1) % expert == 0 and ranks % expert == 0
            if divides and (expert > 1 or each == tensor):
                yield expert, each


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(max(most, 1).bit_length())]


def usage(size: ModelSize, cut: Cut, *, tokens: int, item: int = 2, roles: int = 0) -> Usage:
    """Bytes on the fullest rank.

    Arguments:
        tokens: of one micro-batch.
        item: bytes of a weight, 2 or 4.
        roles: further copies of the weights: reference, teacher.
    """
    layers = math.ceil(size.layers / cut.pipeline)
    share, each = layers / size.layers, cut.expert_tensor or cut.tensor
    ends = size.embedding + size.output if cut.pipeline == 1 else max(size.embedding, size.output or size.embedding)
    dense = (size.dense * share + ends) / cut.tensor
    routed = size.routed * share / (cut.expert * each)
    replicas = cut.data * cut.context
    # Experts are copied by the ranks of a stage that neither share them nor their matrices.
    copies = replicas * cut.tensor / (cut.expert * each)
    state = MOMENTS + (MASTER if item < MASTER else 0)
    # A stage holds the activations of as many micro-batches as there are stages before it is their turn backwards.
    held = layers * min(cut.pipeline, size.layers) * (size.hidden if cut.recompute == "full" else size.kept)
    entries = held + (size.kept if cut.recompute == "full" else 0)
    part = tokens / (cut.tensor * cut.context)
    return Usage(
        cut=cut,
        weights=int(item * (dense + routed) * (1 + roles)),
        gradients=int(GRADIENT * (dense + routed)),
        optimizer=int(state * (dense / replicas + routed / copies)),
        activations=int(part * entries * item),
        logits=int(part * size.vocab * LOGIT),
    )
