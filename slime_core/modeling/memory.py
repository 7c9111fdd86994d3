"""GPU memory of training, in bytes on each rank, for every layout on a number of GPUs.

Counted, in bytes a number: weights (2 in bfloat16), gradients (4), Adam's state, which is distributed over
data-parallel ranks (12: float32 copy, mean and variance; 8 if the weights are float32), the activations of one
micro-batch, and its logits (2), which their gradient overwrites, with a chunk of them in float32 (4; see
:func:`slime_core.ops.log_probs.log_probs_and_entropy`); with fp32_lm_head only that chunk and the gradient of the
output weights (4). Not counted: memory that CUDA and NCCL reserve, unequal numbers of tokens for experts, and
fragmentation, for which a tenth of the memory is reserved; reference, teacher and old actor, which are in host memory;
the float32 logits and their gradient that a plugin's loss of logits needs.

One of Megatron's local layers stores, for each token of a row::

    6 h + 6 q + 3 k + 8 d + 3 w
    6 h + 6 q + 3 k + 8 d + n h + 3 (n e + s) + 1.25 E      in a layer with n of E experts a token

entries: h hidden, q and k of all query and key heads, d of one head; w, e and s inside the MLP, an expert and shared
experts. torch stores this for the backward pass in float32 on a CPU, within 10 %; fused norms of a GPU store 2 h less.
Without sequence parallelism the 6 h are on every tensor-parallel rank; the rest is shared.

Recomputing the MLP stores 3 w less in a layer without experts, and has them for one layer at a time. Recomputing whole
layers stores h a layer (or h for several together), and has all of the above for one of these at a time. Recomputing
attention alone counts as none: a GPU's kernels store almost nothing inside attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from slime_core.config.model_config import SHARED, num_experts
from slime_core.modeling.layout import ParallelLayout
from slime_core.types import JsonValue

__all__ = [
    "GIB",
    "GPUS_OF_A_NODE",
    "PAUSED_ENGINE_GIB",
    "RECOMPUTE",
    "SHARE",
    "Cut",
    "ModelSize",
    "Recompute",
    "Training",
    "Usage",
    "layouts",
    "usable",
    "usage",
]

GIB = 2**30
GRADIENT, MOMENTS, MASTER, LOGIT = 4, 8, 4, 4
"""Bytes of a gradient (float32), of Adam's moments (two float32), of a master weight, of a logit in a chunk."""

SHARE = 0.9
"""Fraction of the memory that the counted parts may use."""

PAUSED_ENGINE_GIB = 6.0
"""Most GiB of a GPU that a colocated engine keeps while the learner trains, after it has released weights and KV cache:
CUDA contexts, decode graphs, workspaces. The upper end of an estimate of 3 to 6; no GPU has measured it yet."""

GPUS_OF_A_NODE = 8

BUCKETS = 2
"""Buckets of weights that a rank holds at once while it publishes: one that engines load, and the next one."""

GATHERED_BYTES = GIB
"""Largest block of experts that ranks gather at once while weights are exported; one expert may be larger."""

Recompute = Literal["none", "mlp", "full"]
RECOMPUTE: Mapping[Recompute, Mapping[str, str | int | tuple[str, ...]]] = {
    "none": {},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Recomputed parts of the backward pass -> Megatron's settings for them, fastest first."""

ONE_RANK = ParallelLayout()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a decoder on which its memory depends.

    Arguments:
        layers, hidden, vocab, heads, key_heads: numbers of layers, hidden entries, vocabulary entries and heads.
        head: entries of a head.
        inner: inner size of the MLP of a layer without experts; 0: every layer has experts.
        experts, taken, expert_inner, shared_inner: experts of a layer, experts of a token, their inner size and that of
            shared experts; 0: there are none.
        embedding, output, routed, dense: parameters of the embedding, of output weights (0: tied), of routed experts,
            and of the rest.
        latent: entries that an engine caches for a token in a layer of multi-latent attention; 0: keys and values.
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
    latent: int = 0

    @classmethod
    def of(cls, config: Mapping[str, JsonValue], *, has_dense_layers: bool, **parameters: int) -> ModelSize:
        """Return the sizes of the decoder that the object of a ``config.json`` describes.

        Arguments:
            has_dense_layers: a layer has an MLP without experts.
            parameters: ``embedding``, ``output``, ``routed`` and ``dense``.

        Raises:
            KeyError, TypeError, ValueError: a size is missing, or is not a number.
        """
        found: Mapping[str, Any] = config
        hidden, heads = int(found["hidden_size"]), int(found["num_attention_heads"])
        # Compressed keys and values are expanded to all heads before attention.
        rank, rotary = (int(found.get(name) or 0) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        experts = num_experts(found)
        inner = int(found.get("moe_intermediate_size") or 0) if experts else 0
        return cls(
            layers=int(found["num_hidden_layers"]),
            hidden=hidden,
            vocab=int(found["vocab_size"]),
            heads=heads,
            key_heads=heads if rank else int(found.get("num_key_value_heads") or heads),
            head=int(found["qk_nope_head_dim"]) + rotary if rank else int(found.get("head_dim") or hidden // heads),
            inner=int(found["intermediate_size"]) if has_dense_layers else 0,
            experts=experts,
            taken=int(found.get("num_experts_per_tok") or 0) if experts else 0,
            expert_inner=inner,
            shared_inner=int(found.get(SHARED) or inner * int(found.get("n_shared_experts") or 0)),
            latent=rank + rotary if rank else 0,
            **parameters,
        )

    @property
    def in_mlp(self) -> int:
        """The part of :attr:`kept` that is not stored if the MLP is recomputed."""
        return 0 if self.experts else 3 * self.inner

    def cached(self, gpus: int) -> int:
        """Return the entries that each GPU of an engine caches for a token; latents are on every GPU."""
        if self.latent:
            return self.layers * self.latent
        return 2 * self.layers * math.ceil(self.key_heads / gpus) * self.head

    @property
    def kept(self) -> float:
        """Entries that the larger kind of layer stores for each token."""
        attention = 6 * self.hidden + 6 * self.heads * self.head + 3 * self.key_heads * self.head + 8 * self.head
        inner = self.taken * self.expert_inner + self.shared_inner
        mixture = self.taken * self.hidden + 3 * inner + 1.25 * self.experts
        return attention + max(3 * self.inner, mixture)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The layout and recomputation of a model.

    Arguments:
        data: data-parallel replicas.
        together: number of layers that are recomputed together, if whole layers are.
        first: number of layers of each stage that are recomputed, the first ones; 0: all.
    """

    layout: ParallelLayout = ONE_RANK
    data: int = 1
    recompute: Recompute = "full"
    together: int = 1
    first: int = 0

    @property
    def flags(self) -> str:
        """The layout as command-line flags."""
        cut = self.layout
        gpus = cut.model_size * self.data
        nodes, each = max(1, gpus // GPUS_OF_A_NODE), min(gpus, GPUS_OF_A_NODE)
        found = [f"--actor-num-nodes {nodes} --actor-num-gpus-per-node {each}"]
        if cut.tensor > 1:
            found.append(f"--tensor-model-parallel-size {cut.tensor} --sequence-parallel")
        if cut.pipeline > 1:
            found.append(f"--pipeline-model-parallel-size {cut.pipeline}")
        if cut.expert > 1:
            found.append(f"--expert-model-parallel-size {cut.expert}")
        if cut.expert_tensor != cut.tensor:
            found.append(f"--expert-tensor-parallel-size {cut.expert_tensor}")
        for name, value in RECOMPUTE[self.recompute].items():
            found.append(f"--{name.replace('_', '-')} {' '.join(value) if isinstance(value, tuple) else value}")
        return " ".join(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Bytes of each part on the rank that needs most.

    Arguments:
        parts: ``weights``, ``gradients``, ``optimizer``, ``activations`` and ``logits`` -> bytes. ``publication``: the
            bytes by which publishing needs more than activations and logits, whose memory it uses.
    """

    cut: Cut
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        """Sum of all counted parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Properties of the training that its memory depends on.

    Arguments:
        tokens: tokens of one micro-batch, over all ranks that share a row.
        item: bytes of a weight, 2 or 4.
        chunk: rows of logits that are computed with in float32 at a time; None: all.
        on_host: fraction of the optimizer's state that is in host memory.
        critic: True: a critic shares the ranks; it has no output weights, and needs activations after the actor's are
            freed.
        holds_logits: False: only a chunk of the logits exists at a time.
        published: bytes of buckets while weights are published beside gradients and optimizer.
    """

    tokens: int
    item: int = 2
    chunk: int | None = 1024
    on_host: float = 0.0
    critic: bool = False
    holds_logits: bool = True
    published: int = 0


def usable(memory_gib: float, reserved_gib: float = 0.0) -> float:
    """Return the bytes that the counted parts may use.

    Arguments:
        reserved_gib: memory of another process on the GPU.
    """
    return (memory_gib * SHARE - reserved_gib) * GIB


def layouts(
    size: ModelSize, gpus: int, memory_gib: float, training: Training, *, reserved_gib: float = 0.0
) -> list[Usage]:
    """Return the layouts that fit, best first: few ranks for a copy of the model, few stages, few expert ranks.

    Arguments:
        gpus: number of GPUs for training; above 8, a multiple of 8.
        memory_gib: memory of one GPU, in GiB.
        reserved_gib: memory of another process on each GPU.
    """
    limit = usable(memory_gib, reserved_gib)
    found = (usage(size, cut, training) for cut in _cuts(size, gpus))
    return sorted((one for one in found if one.total <= limit), key=lambda one: _rank(one.cut))


def _rank(cut: Cut) -> tuple[int, ...]:
    layout, effort = cut.layout, list(RECOMPUTE).index(cut.recompute)
    whole = layout.expert_tensor == layout.tensor
    return layout.model_size, layout.pipeline, layout.expert, not whole, effort


def _cuts(size: ModelSize, gpus: int) -> Iterator[Cut]:
    kinds: tuple[Recompute, ...] = ("none", "mlp", "full") if size.in_mlp else ("none", "full")
    for tensor in _powers(min(gpus, GPUS_OF_A_NODE)):
        if any(number % tensor for number in (size.heads, size.key_heads, size.vocab)):
            continue
        for pipeline in _powers(gpus // tensor):
            data, rest = divmod(gpus, tensor * pipeline)
            if rest or pipeline > size.layers:
                continue
            for expert, each in _expert_cuts(size, tensor, data):
                layout = ParallelLayout(
                    tensor=tensor, pipeline=pipeline, expert=expert, expert_tensor=each, sequence=tensor > 1
                )
                yield from (Cut(layout=layout, data=data, recompute=kind) for kind in kinds)


def _expert_cuts(size: ModelSize, tensor: int, data: int) -> Iterator[tuple[int, int]]:
    """Yield expert and expert tensor sizes."""
    for each in dict.fromkeys((tensor, 1)):
        ranks = data * tensor // each
        for expert in _powers(ranks):
            divides = (size.experts or 1) % expert == 0 and ranks % expert == 0
            if divides and (expert > 1 or each == tensor):
                yield expert, each


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(max(most, 1).bit_length())]


def usage(size: ModelSize, cut: Cut, training: Training) -> Usage:
    """Return the bytes on the rank that needs most."""
    item, layout = training.item, cut.layout
    held = [_held(size, layout), *([_held(replace(size, output=0), layout)] if training.critic else [])]
    parameters = sum(dense + routed for dense, routed in held)
    state = MOMENTS + (MASTER if item < MASTER else 0)
    replicas = cut.data * layout.context
    # Ranks of a stage that share neither experts nor their matrices have copies of them.
    copies = replicas * layout.tensor / (layout.expert * layout.expert_tensor)
    spread = sum(dense / replicas + routed / copies for dense, routed in held)
    part = training.tokens / layout.context
    chunk = min(part, training.chunk or part) * LOGIT
    logits = chunk + (part * item if training.holds_logits else size.hidden * GRADIENT)
    parts = {
        "weights": item * parameters,
        "gradients": GRADIENT * parameters,
        "optimizer": state * (1 - training.on_host) * spread,
        "activations": part * _entries(size, cut) * item,
        "logits": logits * size.vocab / layout.tensor,
    }
    if (more := training.published - parts["activations"] - parts["logits"]) > 0:
        parts["publication"] = more
    return Usage(cut=cut, parts={name: int(number) for name, number in parts.items()})


def _held(size: ModelSize, cut: ParallelLayout) -> tuple[float, float]:
    """Return the parameters on the rank with the most: (all but routed experts, routed experts)."""
    share = math.ceil(size.layers / cut.pipeline) / size.layers
    ends = size.embedding + size.output if cut.pipeline == 1 else max(size.embedding, size.output or size.embedding)
    return (size.dense * share + ends) / cut.tensor, size.routed * share / (cut.expert * cut.expert_tensor)


def _entries(size: ModelSize, cut: Cut) -> float:
    """Return the stored activation entries for each token of a rank's row."""
    layout = cut.layout
    # Six of the stored entries of a token have the hidden size; without sequence parallelism they are on every rank.
    everywhere = 1 if layout.sequence else layout.tensor
    layers, stream = math.ceil(size.layers / layout.pipeline), size.hidden * everywhere / layout.tensor
    kept = (size.kept + 6 * size.hidden * (everywhere - 1)) / layout.tensor
    in_mlp = size.in_mlp / layout.tensor
    # With 1F1B, the first stage stores the activations of as many micro-batches as there are stages.
    batches = min(layout.pipeline, size.layers)
    if cut.recompute == "mlp":
        return layers * batches * (kept - in_mlp) + in_mlp
    if cut.recompute == "none":
        return layers * batches * kept
    again = min(cut.first or layers, layers)
    return batches * (again / cut.together * stream + (layers - again) * kept) + cut.together * kept
