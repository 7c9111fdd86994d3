"""What a run needs of the memory of one GPU, by the arithmetic of :mod:`slime_core.modeling.memory`, and what fits.

Needs the memory of a GPU: ``--gpu-memory-gib``, or what ``nvidia-smi`` says on this machine.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from slime_core.cli.needs import OUTPUT_LAYER, Needs
from slime_core.config.model_config import EXPERTS, described, start_weights
from slime_core.config.schema import RunConfig
from slime_core.modeling.layout import ParallelLayout
from slime_core.modeling.memory import GIB, GPUS_OF_A_NODE, SHARE, Cut, ModelSize, Usage, layouts, usage

NVIDIA_SMI_LIMIT_S = 10


def gpu_memory_gib(config: RunConfig) -> float | None:
    """Memory of one GPU; None: it is neither given nor to be found here."""
    return config.cluster.gpu_memory_gib or _smallest_here()


@cache
def _smallest_here() -> float | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_LIMIT_S)
        return min(float(line) for line in done.stdout.split()) / 1024  # MiB
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def model_size(config: RunConfig, sizes: Mapping[str, int]) -> ModelSize | None:
    """The sizes that memory depends on; None: ``config.json`` does not say them, or there are no weights.

    Arguments:
        sizes: Hugging Face name -> parameters.
    """
    found = described(start_weights(config))
    if found is None or not sizes:
        return None
    try:
        return _model_size(found, sizes)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _model_size(found: Mapping[str, Any], sizes: Mapping[str, int]) -> ModelSize:
    hidden, layers, heads = (int(found[name]) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    experts = next((int(found[name]) for name in EXPERTS if found.get(name)), 0)
    inner = int(found.get("moe_intermediate_size") or 0) if experts else 0
    is_latent = bool(found.get("kv_lora_rank"))
    head = found["qk_nope_head_dim"] + found["qk_rope_head_dim"] if is_latent else found.get("head_dim")
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    has_dense = not experts or any(".mlp.gate_proj." in name for name in sizes)
    embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    output = 0 if found.get("tie_word_embeddings") else sizes.get(OUTPUT_LAYER, 0)
    shared = int(found.get("shared_expert_intermediate_size") or 0)
    return ModelSize(
        layers=layers,
        hidden=hidden,
        vocab=int(found["vocab_size"]),
        heads=heads,
        key_heads=heads if is_latent else int(found.get("num_key_value_heads") or heads),
        head=int(head or hidden // heads),
        inner=int(found["intermediate_size"]) if has_dense else 0,
        experts=experts,
        taken=int(found.get("num_experts_per_tok") or 0) if experts else 0,
        expert_inner=inner,
        shared_inner=shared or inner * int(found.get("n_shared_experts") or 0),
        embedding=embedding,
        output=output,
        dense=sum(sizes.values()) - embedding - sizes.get(OUTPUT_LAYER, 0) - routed,
        routed=routed,
    )


def of_learner(config: RunConfig, size: ModelSize, needs: Needs) -> Usage:
    """What a learner rank of the run needs."""
    layout = ParallelLayout.of(config.parallel)
    cut = Cut(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        data=max(1, config.num_data_ranks),
        recompute="full" if config.megatron.transformer.get("recompute_granularity") == "full" else "none",
    )
    return usage(size, cut, tokens=config.learner.max_tokens_per_gpu, item=needs.item, roles=needs.roles)


def lines(config: RunConfig, size: ModelSize | None, needs: Needs) -> Iterator[str]:
    """What a GPU of the learner and one of an engine hold."""
    if size is None or not needs.ranks:
        return
    found, memory = of_learner(config, size, needs), gpu_memory_gib(config)
    parts = " + ".join(f"{number / GIB:.1f} {name}" for name, number in found.parts.items())
    held = "of an unknown size (--gpu-memory-gib)" if memory is None else f"of {memory:g} GiB"
    yield (
        f"memory of a learner GPU {held}, in GiB: {parts} = {found.total / GIB:.1f}, for "
        f"{config.learner.max_tokens_per_gpu} tokens a micro-batch, recomputing {found.cut.recompute}"
    )
    if memory is not None and needs.engines:
        yield from _cache_line(config, size, needs, memory)


def _cache_line(config: RunConfig, size: ModelSize, needs: Needs, memory: float) -> Iterator[str]:
    each = config.cluster.rollout_num_gpus_per_engine
    token = 2 * size.layers * size.key_heads * size.head * needs.item
    left = memory * GIB * (config.engine.sglang_mem_fraction_static or SHARE) * each - needs.of_engine
    yield f"an engine's cache: room for {max(0, int(left / token)):,} tokens of {token / 1024:.0f} KiB, at most"


def mistakes(config: RunConfig, size: ModelSize | None, needs: Needs) -> Iterator[str]:
    """Why the run does not fit its GPUs: the part that is too large, and the nearest layout that fits."""
    memory = gpu_memory_gib(config)
    if memory is None or size is None or not needs.ranks:
        return
    found, limit = of_learner(config, size, needs), memory * SHARE
    if found.total > limit * GIB:
        name, largest = max(found.parts.items(), key=lambda part: part[1])
        yield (
            f"GPU memory: a learner rank needs {found.total / GIB:.1f} GiB, most of it {name} ({largest / GIB:.1f}), "
            f"and {SHARE:.0%} of {memory:g} GiB are {limit:.1f}; {_what_fits(config, size, needs, memory)}"
        )


def _what_fits(config: RunConfig, size: ModelSize, needs: Needs, memory: float) -> str:
    tokens, gpus = config.learner.max_tokens_per_gpu, config.num_learner_ranks
    while gpus <= 64 * config.num_learner_ranks:
        found = layouts(size, gpus, memory, tokens=tokens, item=needs.item, roles=needs.roles)
        if found:
            return f"this fits ({found[0].total / GIB:.1f} GiB): {found[0].cut.flags}"
        gpus = 2 * gpus if gpus < GPUS_OF_A_NODE else gpus + GPUS_OF_A_NODE
    return "no layout of up to 64 times as many GPUs fits; lower --max-tokens-per-gpu"
