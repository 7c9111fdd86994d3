"""Plans the memory of one GPU by the arithmetic of :mod:`slime_core.modeling.memory`, and suggests settings that fit.

Needs the memory of a GPU: ``--gpu-memory-gib``, or what ``nvidia-smi`` says on this machine.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from slime_core.cli.needs import OUTPUT_LAYER, Needs
from slime_core.config.model_config import EXPERTS, context_length, described, start_weights
from slime_core.config.schema import ParallelConfig, RunConfig
from slime_core.modeling.layout import ParallelLayout
from slime_core.modeling.memory import GIB, GPUS_OF_A_NODE, SHARE, Cut, ModelSize, Training, Usage, layouts, usage

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
        latent=int(found["kv_lora_rank"]) + int(found["qk_rope_head_dim"]) if is_latent else 0,
    )


def longest_response(config: RunConfig) -> int:
    """Tokens of the longest prompt, as far as it has a limit, and its response."""
    tokens = (config.data.rollout_max_prompt_len or 0) + config.rollout.rollout_max_response_len
    return min(tokens, config.engine.sglang_context_length or context_length(start_weights(config)) or tokens)


def training_of(config: RunConfig, needs: Needs, *, context: int) -> Training:
    """The training load of ranks, ``context`` of which share a row; a sample longer than a row gets one of its own."""
    settings, longest = config.learner, longest_response(config)
    given, tokens = config.megatron.optimizer, settings.max_tokens_per_gpu * context
    if settings.micro_batch_size is not None:
        tokens = settings.micro_batch_size * longest
    elif not settings.hard_token_budget:
        tokens = max(tokens, longest)
    share = given.get("optimizer_offload_fraction", 1.0) if given.get("optimizer_cpu_offload") else 0.0
    return Training(tokens=tokens, item=needs.item, chunk=settings.log_probs_chunk_size, on_host=share)


def cut_of(config: RunConfig, parallel: ParallelConfig, ranks: int) -> Cut:
    """The division of a model over ``ranks``, and the activations that they recompute."""
    layout, given = ParallelLayout.of(parallel), config.megatron.transformer
    kind, number = given.get("recompute_granularity"), int(given.get("recompute_num_layers") or 1)
    cut = Cut(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        data=max(1, ranks // layout.model_size),
        sequence=layout.sequence or layout.tensor == 1,
        recompute="none",
    )
    if kind == "full":
        if given.get("recompute_method") == "block":
            return replace(cut, recompute="full", first=number)
        return replace(cut, recompute="full", together=number)
    is_of_mlp = kind == "selective" and "mlp" in (given.get("recompute_modules") or ())
    return replace(cut, recompute="mlp") if is_of_mlp else cut


def of_learner(config: RunConfig, size: ModelSize, needs: Needs) -> Usage:
    """The memory of a learner rank of the run, with a critic that shares it."""
    cut = cut_of(config, config.parallel, config.num_learner_ranks)
    training = training_of(config, needs, context=cut.context)
    return usage(size, cut, replace(training, critic=bool(needs.critic_parameters and not needs.critic_ranks)))


def of_critic(config: RunConfig, size: ModelSize, needs: Needs) -> Usage | None:
    """The memory of a rank of a separate critic; None: there is none."""
    if not needs.critic_ranks:
        return None
    cut = cut_of(config, config.critic_parallel, needs.critic_ranks)
    found = usage(replace(size, output=0), cut, training_of(config, needs, context=cut.context))
    return replace(found, logits=0)


def _roles(config: RunConfig, size: ModelSize, needs: Needs) -> Iterator[tuple[str, Usage]]:
    yield "learner", of_learner(config, size, needs)
    if (critic := of_critic(config, size, needs)) is not None:
        yield "critic", critic


def too_large(config: RunConfig, size: ModelSize, needs: Needs, memory: float) -> dict[str, Usage]:
    """``learner`` and ``critic``, where a rank of it needs more than GPUs of ``memory`` GiB have for it."""
    return {role: found for role, found in _roles(config, size, needs) if found.total > memory * SHARE * GIB}


def lines(config: RunConfig, size: ModelSize | None, needs: Needs) -> Iterator[str]:
    """The contents of a GPU of the learner and of one of an engine, line by line."""
    if size is None or not needs.ranks:
        return
    memory = gpu_memory_gib(config)
    held = "of an unknown size (--gpu-memory-gib)" if memory is None else f"of {memory:g} GiB"
    for role, found in _roles(config, size, needs):
        parts = " + ".join(f"{number / GIB:.1f} {name}" for name, number in found.parts.items())
        tokens = training_of(config, needs, context=found.cut.context).tokens // found.cut.context
        yield (
            f"memory of a {role} GPU {held}, in GiB: {parts} = {found.total / GIB:.1f}, for {tokens} tokens a "
            f"micro-batch, recomputing {found.cut.recompute}"
        )
    if memory is not None and needs.engines:
        gpus = config.cluster.rollout_num_gpus_per_engine
        token = size.cached(gpus) * needs.item * gpus
        room = _room(config, size, needs, memory, gpus)
        yield f"an engine's cache: room for {room:,} tokens of {token / 1024:.0f} KiB, at most"


def _room(config: RunConfig, size: ModelSize, needs: Needs, memory: float, gpus: int) -> int:
    """Tokens in the cache of an engine of ``gpus``."""
    left = memory * GIB * (config.engine.sglang_mem_fraction_static or SHARE) - needs.of_engine / gpus
    return max(0, int(left / (size.cached(gpus) * needs.item)))


def mistakes(config: RunConfig, size: ModelSize | None, needs: Needs) -> Iterator[str]:
    """Why the run does not fit its GPUs: the part that is too large, and the nearest layout that fits."""
    memory = gpu_memory_gib(config)
    if memory is None or size is None or not needs.ranks:
        return
    found = too_large(config, size, needs, memory)
    if "learner" in found:
        yield f"{_too_much('learner', found['learner'], memory)}; {_what_fits(config, size, needs, memory)}"
    if "critic" in found:
        yield f"{_too_much('critic', found['critic'], memory)}; {_what_fits_critic(config, size, needs, memory)}"
    if config.engine_groups:
        yield from _engine_mistakes(config, size, needs, memory)
        yield from _publishing_mistakes(config, of_learner(config, size, needs), needs, memory)


def _too_much(role: str, found: Usage, memory: float) -> str:
    name, largest = max(found.parts.items(), key=lambda part: part[1])
    return (
        f"GPU memory: a {role} rank needs {found.total / GIB:.1f} GiB, most of it {name} ({largest / GIB:.1f}), "
        f"and {SHARE:.0%} of {memory:g} GiB are {memory * SHARE:.1f}"
    )


def _engine_mistakes(config: RunConfig, size: ModelSize, needs: Needs, memory: float) -> Iterator[str]:
    """An engine that has no room for one prompt and its response answers none of that length."""
    gpus, longest = min(group.size for group in config.engine_groups), longest_response(config)
    room = _room(config, size, needs, memory, gpus)
    if room < longest:
        sizes = (2**power for power in range(GPUS_OF_A_NODE.bit_length()))
        fits = next((one for one in sizes if _room(config, size, needs, memory, one) >= longest), None)
        step = "lower --rollout-max-response-len" if fits is None else f"--rollout-num-gpus-per-engine {fits} fits"
        share = config.engine.sglang_mem_fraction_static or SHARE
        yield (
            f"GPU memory: an engine of {gpus} GPUs has {needs.of_engine / gpus / GIB:.1f} GiB of weights on each, and "
            f"{share:.0%} of {memory:g} GiB leave its cache room for {room:,} tokens, while a prompt and its response "
            f"may take {longest:,}; {step}"
        )


def _publishing_mistakes(config: RunConfig, learner: Usage, needs: Needs, memory: float) -> Iterator[str]:
    """Colocated ranks and engines both hold their weights while these are published."""
    gpus = min(group.size for group in config.engine_groups)
    weights = learner.weights + needs.of_engine / gpus
    if config.cluster.colocate and weights > memory * SHARE * GIB:
        yield (
            f"GPU memory: while weights are published, a colocated GPU holds {learner.weights / GIB:.1f} GiB of the "
            f"learner's and {needs.of_engine / gpus / GIB:.1f} of the engine's, and {SHARE:.0%} of {memory:g} GiB are "
            f"{memory * SHARE:.1f}; raise --rollout-num-gpus-per-engine, or leave --colocate out"
        )


NOTHING_FITS = "no layout of up to 64 times as many GPUs fits; lower --max-tokens-per-gpu"


def _more(gpus: int) -> Iterator[int]:
    """``gpus`` and up to 64 times as many: doubled within a node, then node by node."""
    most = 64 * gpus
    while gpus <= most:
        yield gpus
        gpus = 2 * gpus if gpus < GPUS_OF_A_NODE else gpus + GPUS_OF_A_NODE


def _what_fits(config: RunConfig, size: ModelSize, needs: Needs, memory: float) -> str:
    shared = bool(needs.critic_parameters and not needs.critic_ranks)
    training = replace(training_of(config, needs, context=1), critic=shared)
    fits = (one for gpus in _more(config.num_learner_ranks) for one in layouts(size, gpus, memory, training))
    found = next(fits, None)
    return NOTHING_FITS if found is None else f"this fits ({found.total / GIB:.1f} GiB): {found.cut.flags}"


def _what_fits_critic(config: RunConfig, size: ModelSize, needs: Needs, memory: float) -> str:
    """The nearest sizes of a separate critic, which recomputes what the actor does and has no logits."""
    critic = replace(size, output=0, vocab=GPUS_OF_A_NODE)
    own, training = cut_of(config, config.critic_parallel, needs.critic_ranks), training_of(config, needs, context=1)
    for gpus in _more(needs.critic_ranks):
        for one in layouts(critic, gpus, memory, training):
            cut = one.cut
            if (cut.recompute, cut.expert) == (own.recompute, own.expert):
                tensor = f" --critic-tensor-model-parallel-size {cut.tensor}"
                more = f"{tensor} --critic-sequence-parallel" if cut.tensor > 1 else tensor
                pipeline = f" --critic-pipeline-model-parallel-size {cut.pipeline}"
                return f"this fits ({one.total / GIB:.1f} GiB): --critic-num-gpus {gpus}{more}{pipeline}"
    return NOTHING_FITS


def host_mistakes(config: RunConfig, size: ModelSize | None, needs: Needs, free: int) -> Iterator[str]:
    """Why the optimizer's state does not fit the memory of a node, where it is on the host.

    Arguments:
        free: bytes of host memory that a node has left.
    """
    given = config.megatron.optimizer
    if size is None or not needs.ranks or not given.get("optimizer_cpu_offload"):
        return
    share, ranks = given.get("optimizer_offload_fraction", 1.0), config.cluster.actor_num_gpus_per_node
    cut = cut_of(config, config.parallel, config.num_learner_ranks)
    training = training_of(config, needs, context=cut.context)
    whole = usage(size, cut, replace(training, on_host=0.0, critic=bool(needs.critic_parameters))).optimizer
    needed = int(share * whole * ranks)
    if needed > free:
        yield (
            f"host memory: --optimizer-cpu-offload keeps {needed / GIB:.1f} GiB of Adam's state on a node, "
            f"{whole * share / GIB:.1f} for each of {ranks} learner ranks, and this one has {free / GIB:.1f} GiB left; "
            "spread the ranks over more nodes (--actor-num-nodes), or lower --optimizer-offload-fraction"
        )
