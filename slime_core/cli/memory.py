"""The memory that a run needs: of this machine, and of each GPU; rows and recomputation that fit a GPU.

    Needs                   lower bounds of what a run needs of a machine without GPUs: memory and shared memory.
                            Counted: weights, gradients and Adam's state of actor and critic, the reference, the
                            engines' weights, and the processes themselves. Left out: activations, the KV cache,
                            buffers while weights are loaded or saved.
    GpuPlan                 the memory of each GPU, by the arithmetic of :mod:`slime_core.modeling.memory`
    with_memory_defaults    rows and recomputation that fit, where a run does not name them

The memory of a GPU is ``--gpu-memory-gib``, or what ``nvidia-smi`` says on this machine.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from slime_core.components.selection import has_critic
from slime_core.config.learning import ParallelConfig
from slime_core.config.load import DEFAULT, Provenance, Resolved
from slime_core.config.model_config import context_length, described, num_experts, start_weights
from slime_core.config.schema import RunConfig
from slime_core.config.settings import as_words
from slime_core.errors import ConfigError, PluginError, WeightSyncError
from slime_core.modeling.layout import ParallelLayout
from slime_core.modeling.memory import (
    BUCKETS,
    GATHERED_BYTES,
    GIB,
    PAUSED_ENGINE_GIB,
    RECOMPUTE,
    SHARE,
    Cut,
    ModelSize,
    Training,
    Usage,
    layouts,
    usable,
    usage,
)
from slime_core.plugins.registry import Registry
from slime_core.weights import bucket_bytes
from slime_core.weights.hugging_face import expected_specs

RUN_BYTES = int(0.9 * GIB)
RANK_BYTES = int(0.4 * GIB)
ENGINE_BYTES = int(0.5 * GIB)
"""Proportional set sizes (PSS) in the embedded run on two cores: driver, sampler, router and Ray 1.0 GB, a learner rank
before its first step 0.43 GB, an engine 0.73 GB; less a margin, because processes share what they import."""

SEMAPHORE_BYTES = 24 * 2**10
"""All that a run of two steps put into a /dev/shm of 1 MiB."""

FLOAT32 = 4

OUTPUT_LAYER = "lm_head.weight"
"""A critic has no output layer; its head is one row."""

NVIDIA_SMI_LIMIT_S = 10

ROWS = (8192, 4096, 2048)
FITS = "that fits GPUs of"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The needs of one run.

    Example, a model of 1e9 parameters in float32, one rank and one engine: 16e9 bytes of learner (weights, gradients
    and two moments), 4e9 of engine, and those of the processes.

    Arguments:
        parameters: of the model.
        item: bytes of one weight in the run's dtype: 4, or 2 with bf16.
        ranks: learner processes; 0: nothing trains.
        copies: of the model that the ranks hold together.
        engines: inference servers.
        roles: weight sets in addition to the actor's that the ranks hold: reference, teacher, old actor.
        buffer: bytes of a bucket of weights that travels through shared memory, two at once; 0: they travel otherwise.
        critic_parameters: of the critic; 0: there is none.
        critic_ranks: processes of a separate critic; 0: it shares the learner's.
        critic_copies: of the critic that its ranks hold together.
        sizes: Hugging Face name -> parameters, of the model.
    """

    parameters: int
    item: int
    ranks: int
    copies: int
    engines: int
    roles: int
    buffer: int
    critic_parameters: int = 0
    critic_ranks: int = 0
    critic_copies: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, config: RunConfig, *, trains: bool, critic: bool = False) -> Needs:
        """The needs of a run; reads the headers of the start weights.

        Arguments:
            critic: the advantage estimator reads values.

        Raises:
            ConfigError: there are no weights, or they cannot be read.
        """
        trains = trains and config.debug.trains
        trains_critic = trains and critic
        sizes = _sizes(start_weights(config), needed=trains)
        algorithm, parameters = config.algorithm, sum(sizes.values())
        roles = (algorithm.use_kl_loss or algorithm.kl_coef > 0) + algorithm.use_opd + algorithm.keep_old_actor
        cut = config.critic_parallel if config.num_critic_ranks else config.parallel
        critic_copies = (config.num_critic_ranks or config.num_learner_ranks) // cut.model_size
        return cls(
            parameters=parameters,
            item=2 if config.model.bf16 else FLOAT32,
            ranks=config.num_learner_ranks if trains else 0,
            copies=config.num_data_ranks * config.parallel.context_parallel_size if trains else 0,
            engines=sum(group.num_engines for group in (*config.engine_groups, *config.eval_groups)),
            roles=roles if trains else 0,
            buffer=bucket_bytes(config.weights.update_weight_buffer_size, parameters)
            if trains and config.transport == "tensor"
            else 0,
            critic_parameters=parameters - sizes.get(OUTPUT_LAYER, 0) if trains_critic else 0,
            critic_ranks=config.num_critic_ranks if trains_critic else 0,
            critic_copies=critic_copies * cut.context_parallel_size if trains_critic else 0,
            sizes=sizes,
        )

    @property
    def memory(self) -> int:
        """Bytes of memory that the whole run needs."""
        return sum(self._parts().values())

    @property
    def memory_sum(self) -> str:
        """The sum that gives :attr:`memory`, in GiB."""
        listed = " + ".join(f"{size / GIB:.1f} {name}" for name, size in self._parts().items() if size)
        return f"{listed} = {self.memory / GIB:.1f}"

    @property
    def of_engine(self) -> int:
        """Bytes of weights that one engine holds, on all its devices together."""
        return self.parameters * self.item

    @property
    def shared_memory(self) -> int:
        """Bytes of /dev/shm: semaphores, and weights on their way. What has no room there, Ray keeps in /tmp."""
        return SEMAPHORE_BYTES + min(2 * self.buffer, self.of_engine)

    def _parts(self) -> dict[str, int]:
        """Name -> bytes."""
        fixed = RUN_BYTES + (self.ranks + self.critic_ranks) * RANK_BYTES + self.engines * ENGINE_BYTES
        return {
            "learner": self.parameters * self._bytes_of_parameter(self.copies, self.roles),
            "critic": self.critic_parameters * self._bytes_of_parameter(self.critic_copies),
            "engines": self.engines * self.of_engine,
            "processes": fixed,
        }

    def _bytes_of_parameter(self, copies: int, roles: int = 0) -> int:
        """Bytes of a parameter in all ranks together, which hold ``copies`` with float32 gradients. Adam's moments and,
        for bfloat16, a float32 master are there once, because Megatron shards them over the copies."""
        optimizer = 2 * FLOAT32 + (FLOAT32 if self.item < FLOAT32 else 0)
        return copies * (self.item * (1 + roles) + FLOAT32) + optimizer if copies else 0


def _sizes(folder: Path, *, needed: bool) -> dict[str, int]:
    """Hugging Face name -> number of parameters."""
    if not needed and not any(folder.glob("*.safetensors")):
        return {}  # an engine also takes weights of other formats, a learner does not
    try:
        return {name: math.prod(spec.shape) for name, spec in expected_specs(folder).items()}
    except WeightSyncError as error:
        raise ConfigError(f"hf_checkpoint: {error}") from error


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


def gpu_memory_gib(config: RunConfig) -> float | None:
    """Memory of one GPU; None: it is neither given nor to be found here."""
    return config.cluster.gpu_memory_gib or _smallest_here()


def model_size(config: RunConfig, sizes: Mapping[str, int]) -> ModelSize | None:
    """The sizes that memory depends on; None: ``config.json`` does not say them, or there are no weights.

    Arguments:
        sizes: Hugging Face name -> parameters.
    """
    found = described(start_weights(config))
    if found is None or not sizes:
        return None
    embedding = sum(size for name, size in sizes.items() if "embed_tokens" in name)
    output = sizes.get(OUTPUT_LAYER, 0)
    routed = sum(size for name, size in sizes.items() if ".experts." in name)
    try:
        return ModelSize.of(
            found,
            has_dense_layers=not num_experts(found) or any(".mlp.gate_proj." in name for name in sizes),
            embedding=embedding,
            output=0 if found.get("tie_word_embeddings") else output,
            routed=routed,
            dense=sum(sizes.values()) - embedding - output - routed,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """The memory of each GPU of a run that trains.

    Arguments:
        memory: GiB of one GPU; None: it is not known.
    """

    config: RunConfig
    needs: Needs
    size: ModelSize
    memory: float | None

    @classmethod
    def of(cls, config: RunConfig, needs: Needs) -> GpuPlan | None:
        """The plan of a run; None: nothing trains, or the sizes of the model are not known."""
        size = model_size(config, needs.sizes)
        if size is None or not needs.ranks:
            return None
        return cls(config=config, needs=needs, size=size, memory=gpu_memory_gib(config))

    def usages(self) -> dict[str, Usage]:
        """``learner``, with a critic that shares its ranks, and a separate ``critic`` -> memory of one of its ranks."""
        found = {"learner": self._usage(self.size, self.config.parallel, self.config.num_learner_ranks)}
        if self.needs.critic_ranks:
            critic = self.config.critic_parallel
            found["critic"] = self._usage(self._critic_size, critic, self.needs.critic_ranks, publishes=False)
        return found

    def too_large(self) -> dict[str, Usage]:
        """``learner`` and ``critic``, where a rank of it needs more than a GPU has."""
        if self.memory is None:
            return {}
        found = self.usages().items()
        return {role: rank for role, rank in found if rank.total > usable(self.memory, self._reserved(role))}

    def training(self, *, context: int = 1) -> Training:
        """The load of ranks, ``context`` of which share a row; a sample longer than a row gets one of its own."""
        settings, longest = self.config.learner, self._longest
        given, tokens = self.config.megatron.optimizer, settings.max_tokens_per_gpu * context
        if settings.micro_batch_size is not None:
            tokens = settings.micro_batch_size * longest
        elif not settings.hard_token_budget:
            tokens = max(tokens, longest)
        return Training(
            tokens=tokens,
            item=self.needs.item,
            chunk=settings.log_probs_chunk_size,
            on_host=given.get("optimizer_offload_fraction", 1.0) if given.get("optimizer_cpu_offload") else 0.0,
            holds_logits=not settings.fp32_lm_head,
            critic=bool(self.needs.critic_parameters and not self.needs.critic_ranks),
            published=0 if self.config.cluster.colocate else self._published,
        )

    def lines(self) -> Iterator[str]:
        """The contents of a GPU of the learner and of one of an engine, line by line."""
        held = "of an unknown size (--gpu-memory-gib)" if self.memory is None else f"of {self.memory:g} GiB"
        for role, found in self.usages().items():
            parts = " + ".join(f"{number / GIB:.1f} {name}" for name, number in found.parts.items())
            context = found.cut.layout.context
            yield (
                f"memory of a {role} GPU {held}, in GiB: {parts} = {found.total / GIB:.1f}, for "
                f"{self.training(context=context).tokens // context} tokens per micro-batch, "
                f"recomputing {found.cut.recompute}"
            )
        if self._reserved("learner"):
            yield (
                f"memory of a GPU that learner and engine share: a paused engine keeps {PAUSED_ENGINE_GIB:g} GiB (CUDA "
                "contexts, decode graphs, workspaces)"
            )
        if host := self._host_parts():
            ranks = self.config.cluster.actor_num_gpus_per_node
            listed = " + ".join(f"{ranks * size / GIB:.1f} {name}" for name, size in host.items())
            yield f"host memory of a node with {ranks} learner ranks, in GiB: {listed}"
        if self.memory is not None and self.needs.engines:
            gpus = self.config.cluster.rollout_num_gpus_per_engine
            token = self.size.cached(gpus) * self.needs.item * gpus
            weights, room = self.needs.of_engine / gpus / GIB, self._room(self.memory, gpus)
            yield (
                f"memory of a GPU of an engine: {weights:.1f} GiB of weights; the engine's cache has room for {room:,} "
                f"tokens of {token / 1024:.0f} KiB, at most"
            )

    def mistakes(self) -> Iterator[str]:
        """Why the run does not fit its GPUs: the part that is too large, and the nearest layout that fits."""
        if self.memory is None:
            return
        for role, found in self.too_large().items():
            name, largest = max(found.parts.items(), key=lambda part: part[1])
            yield (
                f"GPU memory: a {role} rank needs {found.total / GIB:.1f} GiB, most of it {name} "
                f"({largest / GIB:.1f}), and {self._limit(self.memory, role)}; {self._what_fits(self.memory, role)}"
            )
        if self.config.engine_groups:
            yield from self._engine_mistakes(self.memory)

    def _reserved(self, role: str) -> float:
        """GiB that a paused engine keeps on the GPUs of ``role``; a separate critic shares none with engines."""
        shares = role == "learner" and self.config.cluster.colocate and self.config.engine_groups
        return PAUSED_ENGINE_GIB if shares else 0.0

    def _limit(self, memory: float, role: str) -> str:
        """How much of a GPU of ``role`` may be used, as a clause."""
        reserved = self._reserved(role)
        less = f", less {reserved:g} of the paused engine," if reserved else ""
        return f"{SHARE:.0%} of {memory:g} GiB{less} are {usable(memory, reserved) / GIB:.1f}"

    def host_mistakes(self, free: int) -> Iterator[str]:
        """Why the learner's part of a node's host memory does not fit.

        Arguments:
            free: bytes of host memory that a node has left.
        """
        ranks, parts = self.config.cluster.actor_num_gpus_per_node, self._host_parts()
        total = ranks * sum(parts.values())
        if total > free:
            listed = " + ".join(f"{ranks * size / GIB:.1f} {name}" for name, size in parts.items())
            steps = ["spread the ranks over more nodes (--actor-num-nodes)"]
            steps += ["leave --colocate out"] if self.config.cluster.colocate else []
            steps += ["lower --optimizer-offload-fraction"] if self.training().on_host else []
            yield (
                f"host memory of a node, in GiB: {listed} = {total / GIB:.1f} for {ranks} learner ranks, and this one "
                f"has {free / GIB:.1f} left; {' or '.join(steps)}"
            )

    def _host_parts(self) -> dict[str, int]:
        """Page-locked memory of one learner rank, in bytes, by its purpose.

        A colocated learner moves weights and optimizer to the host while engines generate, but not its gradients,
        which are zero between steps.
        """
        cut, on_host = self.usages()["learner"].cut, self.training().on_host
        training = replace(self.training(context=cut.layout.context), on_host=0.0)
        held = usage(self.size, cut, training).parts
        of_model = usage(self.size, cut, replace(training, critic=False)).parts["weights"]
        parts = {
            "of Adam's state (--optimizer-cpu-offload)": int(on_host * held["optimizer"]),
            "of weights and optimizer while engines generate (--colocate)": (
                held["weights"] + int((1 - on_host) * held["optimizer"]) if self.config.cluster.colocate else 0
            ),
            "of reference, teacher and old actor": self.needs.roles * of_model,
        }
        return {name: size for name, size in parts.items() if size}

    @property
    def _longest(self) -> int:
        """Tokens of the longest prompt, as far as it has a limit, and its response."""
        config = self.config
        tokens = (config.data.rollout_max_prompt_len or 0) + config.rollout.rollout_max_response_len
        return min(tokens, config.engine.sglang_context_length or context_length(start_weights(config)) or tokens)

    @property
    def _critic_size(self) -> ModelSize:
        """The size of a critic, which has no output weights and no logits."""
        return replace(self.size, output=0, vocab=0)

    @property
    def _published(self) -> int:
        """Bytes of buckets that a learner rank holds while weights are published."""
        if not self.needs.engines:
            return 0
        bucket = bucket_bytes(self.config.weights.update_weight_buffer_size, self.needs.parameters)
        shared = self.config.parallel.expert_model_parallel_size > 1
        return min(BUCKETS * bucket + (GATHERED_BYTES if shared else 0), BUCKETS * self.needs.of_engine)

    def _usage(self, size: ModelSize, parallel: ParallelConfig, ranks: int, *, publishes: bool = True) -> Usage:
        layout, given = ParallelLayout.of(parallel), self.config.megatron.transformer
        cut = Cut(layout=layout, data=max(1, ranks // layout.model_size), recompute="none")
        kind, number = given.get("recompute_granularity"), int(given.get("recompute_num_layers") or 1)
        if kind == "full":
            together, first = (1, number) if given.get("recompute_method") == "block" else (number, 0)
            cut = replace(cut, recompute="full", together=together, first=first)
        elif kind == "selective" and "mlp" in (given.get("recompute_modules") or ()):
            cut = replace(cut, recompute="mlp")
        training = self.training(context=layout.context)
        return usage(size, cut, training if publishes else replace(training, published=0))

    def _room(self, memory: float, gpus: int) -> int:
        """Tokens in the cache of an engine of ``gpus``."""
        left = memory * GIB * (self.config.engine.sglang_mem_fraction_static or SHARE) - self.needs.of_engine / gpus
        return max(0, int(left / (self.size.cached(gpus) * self.needs.item)))

    def _engine_mistakes(self, memory: float) -> Iterator[str]:
        """Why an engine has no room for one prompt and its response, or for its weights while they are published."""
        gpus, longest = min(group.size for group in self.config.engine_groups), self._longest
        weights, room = self.needs.of_engine / gpus, self._room(memory, gpus)
        if room < longest:
            share = self.config.engine.sglang_mem_fraction_static or SHARE
            yield (
                f"GPU memory: an engine of {gpus} GPUs has {weights / GIB:.1f} GiB of weights on each, and "
                f"{share:.0%} of {memory:g} GiB leave its cache room for {room:,} tokens, while a prompt and its "
                f"response may take {longest:,}; raise --rollout-num-gpus-per-engine, or lower "
                "--rollout-max-response-len"
            )
        of_learner = self.usages()["learner"].parts["weights"]
        reserved = self._reserved("learner")
        if reserved and of_learner + self._published + weights > usable(memory, reserved):
            yield (
                f"GPU memory: while weights are published, a colocated GPU holds {of_learner / GIB:.1f} GiB of the "
                f"learner's weights, {self._published / GIB:.1f} of buckets and {weights / GIB:.1f} of the engine's "
                f"weights, and {self._limit(memory, 'learner')}; raise --rollout-num-gpus-per-engine, lower "
                "--update-weight-buffer-size, or leave --colocate out"
            )

    def _what_fits(self, memory: float, role: str) -> str:
        """The next step: the best layout of as many GPUs that fits."""
        gpus = self.config.num_learner_ranks
        reserved = self._reserved(role)
        found = layouts(self.size, gpus, memory, self.training(), reserved_gib=reserved) if role == "learner" else []
        if found:
            return f"this fits ({found[0].total / GIB:.1f} GiB): {found[0].cut.flags}"
        return f"give the {role} more GPUs or larger parallel sizes, or lower --max-tokens-per-gpu"


# --- Rows and recomputation that a run leaves open --------------------------------------------------------------------


def with_memory_defaults(resolved: Resolved, registry: Registry) -> Resolved:
    """``resolved``, of a run on GPUs, with rows and recomputation that fit them.

    The first that fits is taken, in an order that follows from arithmetic and that no GPU has confirmed: shorter rows
    before recomputation, because 2,048 tokens are enough for the matrix products of a layer, while computing MLPs or
    whole layers again adds up to a third to the work.

    What the run gives stays. Nothing changes where the memory of a GPU or the sizes of the model are not known, and
    where nothing fits; the preflight refuses that.
    """
    config = resolved.config
    if gpu_memory_gib(config) is None:
        return resolved
    try:
        plan = GpuPlan.of(config, Needs.of(config, trains=True, critic=has_critic(config, registry)))
    except (ConfigError, PluginError):  # the preflight reports it
        return resolved
    if plan is None:
        return resolved
    fits = (one for one in _choices(resolved) if not replace(plan, config=one).too_large())
    found = replace(resolved, config=next(fits, config))
    before = {key: value for key, (_, value) in resolved.values().items()}
    changed = [key for key, (_, value) in found.values().items() if before.get(key) != value]
    origin = Provenance("default", f"{FITS} {plan.memory:g} GiB")
    return replace(found, provenance={**resolved.provenance, **dict.fromkeys(changed, origin)})


def _choices(resolved: Resolved) -> Iterator[RunConfig]:
    """The settings with each kind of recomputation and length of rows that the run leaves open, the fastest first."""
    config, given = resolved.config, dict(resolved.config.megatron.given)
    learner = config.learner
    # A budget that no sample may exceed, and rows that are counted in samples, are as the user wants them.
    is_free = not learner.hard_token_budget and learner.micro_batch_size is None
    is_free &= resolved.provenance.get("max_tokens_per_gpu", DEFAULT) == DEFAULT
    rows = ROWS if is_free else (learner.max_tokens_per_gpu,)
    open_kinds = [{}] if any(name.startswith("recompute") for name in given) else RECOMPUTE.values()
    for recompute in open_kinds:
        flags = config.megatron.model_copy(update={"given": tuple(sorted({**given, **recompute}.items()))})
        for tokens in rows:
            row = learner.model_copy(update={"max_tokens_per_gpu": tokens})
            yield config.model_copy(update={"learner": row, "megatron": flags})


def chosen(resolved: Resolved) -> Iterator[str]:
    """A line with what was chosen, as flags; none where nothing was."""
    origins = {key: resolved.provenance.get(key, DEFAULT) for key in resolved.values()}
    found = {key: origin for key, origin in origins.items() if origin.where.startswith(FITS)}
    if found:
        flags = " ".join(
            f"{one.flag} {as_words(value)}" for key, (one, value) in resolved.values().items() if key in found
        )
        yield f"memory: {flags} ({next(iter(found.values()))})"
