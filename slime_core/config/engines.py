"""Sections [engine], [megatron] and [sglang]: the SGLang servers of the policy and of auxiliary models, and the flags
that a run passes on to Megatron and SGLang.

A run passes on the flags of Megatron that take effect in slime's models, as ``tests/engines/test_megatron_flags.py``
proves, and refuses the others. slime-compat accepts flags of launch scripts that describe the model correctly, and
names the replacement of other flags.

SGLang's flags become arguments of its servers, except those that the core sets.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, BeforeValidator, Field

from slime_core.config.options import Conflicts, Needs
from slime_core.config.section import (
    Distinct,
    EngineSection,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Value,
    rejected,
)
from slime_core.errors import ConfigError

WorkerType = Literal["regular", "prefill", "decode"]
"""The part of each request that an engine computes."""

RouterPolicy = Literal[
    "cache_aware", "consistent_hashing", "manual", "power_of_two", "prefix_hash", "random", "round_robin"
]
"""Policies by which sglang-router 0.3.2 chooses an engine."""


Dtype = Literal["auto", "bfloat16", "float16", "float32"]
"""SGLang's names of dtypes."""


def _pairs(value: Any) -> Any:
    """Return a table as pairs of a name and a value, which can be hashed."""
    entries = value.items() if isinstance(value, Mapping) else value
    return tuple(map(_pairs, entries)) if isinstance(entries, list | tuple | ItemsView) else entries


Overrides = Annotated[tuple[tuple[str, Value], ...], BeforeValidator(_pairs)]
"""SGLang's flags for some engines, by SGLang's names; a table in a file."""


class EngineGroup(Section):
    """Engines with the same settings.

    Example, two engines of two GPUs each: ``EngineGroup(num_gpus=4, num_gpus_per_engine=2)``.
    """

    num_gpus: PositiveInt
    """GPUs of the group; on a CPU, server processes."""
    num_gpus_per_engine: PositiveInt | None = None
    """GPUs per engine. None: num_gpus_per_engine of its model, or rollout_num_gpus_per_engine."""
    worker_type: WorkerType = "regular"
    """regular: whole requests. prefill: only prompts. decode: only responses."""
    overrides: Overrides = ()
    """SGLang's flags for these engines. They override [sglang]."""

    @property
    def size(self) -> int:
        """GPUs of one engine."""
        return self.num_gpus_per_engine or 1

    @property
    def num_engines(self) -> int:
        """Engines of the group."""
        return self.num_gpus // self.size


LOG_NAMES = frozenset({"engine", "eval", "eval-engine", "router"})
"""Log files of the run's other servers."""


def _model_name(name: str) -> str:
    if name in LOG_NAMES or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        reserved = ", ".join(sorted(LOG_NAMES))
        raise rejected(f"found {name!r}; accepted: letters, digits and . _ -, and none of the log files {reserved}")
    return name


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536) or "/" in text:
        raise rejected(f"found {text!r}; accepted: HOST:PORT, as 10.0.0.7:30000")
    return text


Address = Annotated[Name, AfterValidator(_address)]
"""An address as ``host:port``."""


class EngineModel(Section):
    """An auxiliary model, which is served and not trained.

    Example: ``EngineModel(name="judge", model_path=Path("Qwen3-8B"), num_gpus=2, num_gpus_per_engine=2)``.
    """

    name: Annotated[Name, AfterValidator(_model_name)]
    """Name by which functions and reward models find the model."""
    model_path: Path
    """Hugging Face folder with weights and tokenizer."""
    num_gpus: PositiveInt | None = None
    """GPUs of all engines of the model, in addition to those of the policy. None: the sum of its groups, or 1."""
    num_gpus_per_engine: PositiveInt | None = None
    """GPUs per engine. None: 1."""
    is_embedding: bool = False
    """Serve scores or embeddings instead of text, for reward models."""
    dtype: Dtype | None = None
    """Dtype of weights and computation. auto: as in config.json of the model. None: as the policy (bf16)."""
    overrides: Overrides = ()
    """SGLang's flags for the engines of the model. They override [sglang]."""
    engine_groups: tuple[EngineGroup, ...] = ()
    """Groups of the model's engines. Empty: one group."""

    @property
    def groups(self) -> tuple[EngineGroup, ...]:
        """The groups, each with the size of its engines and the flags of the model."""
        size = self.num_gpus_per_engine or 1
        groups = self.engine_groups or (EngineGroup(num_gpus=self.num_gpus or size),)
        return tuple(_resolved(group, size, self.overrides) for group in groups)


class EngineConfig(Section):
    """The SGLang servers."""

    sglang_mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of an engine's memory for weights and KV cache. None: SGLang decides."""
    sglang_context_length: PositiveInt | None = None
    """Maximum tokens of prompt plus response. None: as in the model's config.json."""
    engine_start_timeout_s: PositiveFloat | None = None
    """Seconds until a starting engine must answer, and again until its first response. None: 600, plus the time to read
    the weights at 0.5 GB/s."""
    use_fault_tolerance: Annotated[
        bool | None,
        Conflicts(
            "colocate", when=True, because="a starting engine would take memory that the learner holds; it ends the run"
        ),
        Conflicts("rollout_external_engine_addrs", when=True, because="the run does not start those engines"),
        Conflicts(
            "use_rollout_routing_replay",
            when=True,
            because="requests bypass the router there, so a starting engine would get some before its weights",
        ),
    ] = None
    """Restart engines and the router that die or hang. False: the run ends. None: restart them if there are two engines
    or more."""
    engine_max_restarts: NonNegativeInt = 3
    """Restarts of an engine, or of the router, within an hour. Its next failure ends the run."""
    rollout_health_check_interval: PositiveFloat = 10.0
    """Seconds between probes of an engine."""
    rollout_health_check_timeout: PositiveFloat = 15.0
    """Seconds in which an engine's scheduler must answer a probe. An engine that fails three probes in a row hangs.
    Before its first response, a GPU engine has engine_start_timeout_s."""
    rollout_health_check_first_wait: NonNegativeFloat = 0.0
    """Seconds from the start of an engine to its first probe."""
    engine_groups: tuple[EngineGroup, ...] = ()
    """Groups of the policy's engines with different settings; their GPUs add up to rollout_num_gpus. Empty: one group.

    A file has a table [[engine.engine_groups]] for each group: num_gpus, num_gpus_per_engine, worker_type, overrides.
    """
    engine_models: tuple[EngineModel, ...] = ()
    """Auxiliary models on separate engines and GPUs, such as a judge or a reward model. Empty: none.

    A file has a table [[engine.engine_models]] for each model: name, model_path, num_gpus, num_gpus_per_engine,
    is_embedding, dtype, overrides, engine_groups.
    """
    prefill_num_servers: Annotated[
        PositiveInt | None, Conflicts("engine_groups", because="both set which engines only prefill")
    ] = None
    """Engines that only prefill; the others only decode. Needs GPUs. None: all engines do both."""
    rollout_external_engine_addrs: Annotated[
        tuple[Address, ...],
        Distinct,
        Conflicts(
            "engine_groups",
            "prefill_num_servers",
            "sglang_context_length",
            "sglang_mem_fraction_static",
            "colocate",
            because="the run does not start those engines",
        ),
        Conflicts("debug_rollout_only", because="no learner publishes weights to engines whose weights are unknown"),
    ] = ()
    """External engines as host:port, which the run neither starts nor stops. Empty: the run starts engines."""
    sglang_router_ip: Annotated[Name | None, Needs("sglang_router_port")] = None
    """Host of an external router. None: the run starts a router."""
    sglang_router_port: Annotated[int | None, Field(ge=1, le=65535), Needs("sglang_router_ip")] = None
    """Port of the external router at sglang_router_ip. None: the run starts a router."""
    sglang_router_policy: Annotated[
        RouterPolicy, Conflicts("sglang_router_ip", because="the policy of an external router is fixed")
    ] = "cache_aware"
    """Policy by which the router chooses an engine. consistent_hashing and manual send all requests of a sample
    (session_id) to one engine."""

    def groups(self, *, num_gpus: int, num_gpus_per_engine: int) -> tuple[EngineGroup, ...]:
        """Return the groups of the policy's engines with their sizes, prefill before decode.

        Arguments:
            num_gpus: GPUs of all engines, if there are no groups.
            num_gpus_per_engine: size of the engines of groups that have none.
        """
        groups = self.engine_groups or self._default_groups(num_gpus, num_gpus_per_engine)
        return tuple(_resolved(group, num_gpus_per_engine, ()) for group in groups)

    def _default_groups(self, num_gpus: int, size: int) -> tuple[EngineGroup, ...]:
        if self.prefill_num_servers is None:
            return (EngineGroup(num_gpus=num_gpus),)
        prefill = self.prefill_num_servers * size
        # A rule refuses a run without GPUs for decoding, after these groups are built.
        decode = max(size, num_gpus - prefill)
        return EngineGroup(num_gpus=prefill, worker_type="prefill"), EngineGroup(num_gpus=decode, worker_type="decode")


def _resolved(group: EngineGroup, size: int, overrides: tuple[tuple[str, Value], ...]) -> EngineGroup:
    merged = tuple(sorted({**dict(overrides), **dict(group.overrides)}.items()))
    return group.model_copy(
        update={"num_gpus_per_engine": group.num_gpus_per_engine or size, "overrides": merged},
    )


def model_url(models: Mapping[str, str], name: str, endpoint: str = "") -> str:
    """Return the address of model ``name``, followed by ``endpoint``.

    Example: ``model_url({"judge": "http://127.0.0.1:4000"}, "judge", "/generate")`` is
    ``"http://127.0.0.1:4000/generate"``.

    Arguments:
        models: name -> URL, as in ``GenerateContext.models`` and ``SamplerSettings.model_urls``.

    Raises:
        ConfigError: the run serves no such model.
    """
    if name not in models:
        raise ConfigError(
            f"No auxiliary model is called {name!r}; the run serves: {', '.join(sorted(models)) or 'none'}. "
            "Add it as a table [[engine.engine_models]] with name and model_path."
        )
    return models[name].rstrip("/") + endpoint


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """A flag that sets a field of one of Megatron's configs.

    Arguments:
        home: Megatron's config: ``transformer``, ``optimizer`` or ``ddp``.
        text: the description in help.
        conditions: its needs, conflicts and bounds, which Megatron checks late or not at all.
        type: type of the value.
        field: the field of the config; None if it has the name of the flag.
        value: the value of the field if the flag is a switch and the field is not.
    """

    home: str
    text: str
    conditions: tuple[object, ...] = ()
    type: Any = bool
    field: str | None = None
    value: Any = None


OF_FULL = Needs("recompute_granularity", equals="full")
RATE = tuple(Field(ge=0, allow_inf_nan=False).metadata)
OFFLOADED = (Needs("optimizer_cpu_offload"),)

MEGATRON_FLAGS: Mapping[str, MegatronFlag] = {
    "recompute_granularity": MegatronFlag(
        "transformer",
        "Activations that the backward pass computes again to save memory. full: those of whole layers. selective: "
        "those of recompute_modules. Not given: as much as the run needs to fit, on GPUs whose memory is known.",
        (Needs("recompute_method", when="full"), Needs("recompute_num_layers", when="full")),
        type=Literal["full", "selective"],
    ),
    "recompute_method": MegatronFlag(
        "transformer",
        "Which layers granularity full recomputes. uniform: all, in chunks of recompute_num_layers. block: the first "
        "recompute_num_layers of each pipeline stage.",
        (OF_FULL,),
        type=Literal["uniform", "block"],
    ),
    "recompute_num_layers": MegatronFlag(
        "transformer", "Layers a chunk (uniform), or layers a pipeline stage (block).", (OF_FULL, Ge(1)), type=int
    ),
    # In Megatron's local layers; layernorm needs TransformerEngine, the others a mixture or MLA.
    "recompute_modules": MegatronFlag(
        "transformer",
        "Parts that granularity selective recomputes. Not given: core_attn.",
        (Needs("recompute_granularity", equals="selective", unless={"recompute_activations": True}),),
        type=tuple[Literal["core_attn", "mlp"], ...],
    ),
    "disable_bf16_reduced_precision_matmul": MegatronFlag(
        "transformer", "Sum products of bfloat16 matrices in float32, on GPUs."
    ),
    "decoupled_lr": MegatronFlag(
        "optimizer", "Learning rate of embedding and output weights. Not given: lr.", RATE, float
    ),
    "decoupled_min_lr": MegatronFlag(
        "optimizer", "Final value of decoupled_lr. Not given: min_lr.", (Needs("decoupled_lr"), *RATE), float
    ),
    "optimizer_cpu_offload": MegatronFlag(
        "optimizer",
        "Keep Adam's state in host memory and update it there. No effect on a CPU.",
        (
            Needs(
                "use_precision_aware_optimizer", because="Megatron's hybrid optimizer holds the float32 weights itself"
            ),
            Needs("bf16", because="the hybrid optimizer cannot resume weights that are float32 already"),
        ),
    ),
    "use_precision_aware_optimizer": MegatronFlag(
        "optimizer",
        "Leave the float32 weights to the optimizer, which optimizer_cpu_offload needs. State and gradients stay "
        "float32.",
        (Needs("optimizer_cpu_offload", because="on the GPU only TransformerEngine's Adam has it"),),
    ),
    "optimizer_offload_fraction": MegatronFlag(
        "optimizer",
        "Fraction of the optimizer's state on the host. Not given: 1.",
        (*OFFLOADED, Ge(0), Le(1)),
        float,
    ),
    "overlap_cpu_optimizer_d2h_h2d": MegatronFlag(
        "optimizer", "Copy gradients and weights between GPU and host while other weights are updated.", OFFLOADED
    ),
    "apply_wd_to_qk_layernorm": MegatronFlag("optimizer", "Decay the weights of the norms of queries and keys too."),
    "overlap_grad_reduce": MegatronFlag(
        "ddp", "Reduce the gradients of a step's last micro-batch over ranks during its backward pass."
    ),
    "overlap_param_gather": MegatronFlag(
        "ddp",
        "Gather updated weights during the forward pass of the rollout's next step.",
    ),
    "recompute_activations": MegatronFlag(
        "transformer",
        "Short for recompute_granularity selective.",
        (
            Conflicts(
                "recompute_granularity",
                equals="full",
                when=True,
                because="recompute_activations means recompute_granularity = selective",
            ),
        ),
        field="recompute_granularity",
        value="selective",
    ),
}
"""Flag -> its description, of the flags that a run passes on."""


class MegatronConfig(EngineSection):
    """Megatron's own flags, under Megatron's names."""

    @property
    def transformer(self) -> dict[str, Any]:
        """Fields to set in TransformerConfig."""
        return dict(self._fields("transformer"))

    @property
    def optimizer(self) -> dict[str, Any]:
        """Fields to set in OptimizerConfig."""
        return dict(self._fields("optimizer"))

    @property
    def ddp(self) -> dict[str, Any]:
        """Fields to set in DistributedDataParallelConfig."""
        return dict(self._fields("ddp"))

    def _fields(self, home: str) -> Iterator[tuple[str, Any]]:
        for name, value in self.given:
            flag = MEGATRON_FLAGS[name]
            if flag.home != home:
                continue
            if flag.value is None:
                yield name, list(value) if isinstance(value, tuple) else value
            elif value:
                yield flag.field or name, flag.value


_WRITE_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "model", "tokenizer_path", "revision"), "--hf-checkpoint"),
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "nnodes", "node_rank"), "--rollout-num-gpus-per-engine"),
    "dtype": "--bf16, or dtype in [[engine.engine_models]]",
    "random_seed": "--seed",
    "device": "--device",
    "trust_remote_code": "--trust-remote-code",
    "context_length": "--sglang-context-length, in a file [engine] sglang_context_length",
    "mem_fraction_static": "--sglang-mem-fraction-static, in a file [engine] sglang_mem_fraction_static",
    "enable_memory_saver": "--colocate",
    "config": "--config FILE.toml with a table [sglang]",
    "is_embedding": "is_embedding in [[engine.engine_models]]",
    "disaggregation_mode": "--prefill-num-servers, or worker_type in [[engine.engine_groups]]",
    "enable_return_routed_experts": "--use-rollout-routing-replay",
    "enable_fp32_lm_head": "--fp32-lm-head",
    **dict.fromkeys(("api_key", "admin_api_key"), "the environment variable SLIME_ENGINE_KEY"),
}
"""SGLang's name -> what to write instead."""

_SET_BY_SLIME = {
    *("host", "port", "disaggregation_bootstrap_port", "nccl_port", "dist_init_addr", "nccl_init_addr"),
    *("gated_launch_port", "grpc_port", "smg_http_sidecar_port", "grpc_http_sidecar_port"),
    *("fastapi_root_path", "base_gpu_id", "gpu_id_step", "use_ray", "numa_node", "grpc_mode"),
    *("smg_grpc_mode", "enable_http2", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
    *("ssl_keyfile_password", "enable_ssl_refresh", "weight_version"),
    *("checkpoint_engine_wait_weights_before_ready", "skip_server_warmup", "skip_tokenizer_init"),
    *("pp_size", "pipeline_parallel_size", "encoder_only", "language_only", "help"),
}
"""SGLang's names that a run may not set, because an engine with another value would not work with the run."""

_ALIASES = {
    "attention_context_parallel_size": "attn_cp_size",
    "data_parallel_size": "dp_size",
    "decode_context_parallel_size": "dcp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "moe_data_parallel_size": "moe_dp_size",
}
"""Other spellings of names that the core reads -> SGLang's name."""


def sglang_name(name: str) -> str:
    """Return SGLang's name for one of its spellings.

    Raises:
        ValueError: slime sets this flag; the message names the replacement.
    """
    positive = name.removeprefix("no_")
    if not name.isidentifier():
        raise ValueError("not a name of SGLang")
    if instead := _WRITE_INSTEAD.get(positive):
        raise ValueError(f"not passed on to SGLang; write {instead}")
    if positive in _SET_BY_SLIME:
        raise ValueError("not passed on to SGLang, because slime sets it")
    return _ALIASES.get(name, name)


def server_arguments(flags: Iterable[tuple[str, Value]]) -> tuple[str, ...]:
    """Return arguments of ``sglang.launch_server``, without flags that are False. SGLang's parser checks them.

    Example: ``(("chunked_prefill_size", 512), ("disable_radix_cache", True))`` gives
    ``("--chunked-prefill-size=512", "--disable-radix-cache")``.
    """
    return tuple(word for name, value in flags for word in _words(name, value))


def speculates(flags: Iterable[tuple[str, Value]]) -> bool:
    """Return whether engines with these flags decode speculatively."""
    return dict(flags).get("speculative_algorithm") is not None


class SGLangConfig(EngineSection):
    """SGLang's own flags, under SGLang's names."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of ``sglang.launch_server``, as :func:`server_arguments`."""
        return server_arguments(self.given)


def _words(name: str, value: Value) -> Iterator[str]:
    flag = "--" + name.replace("_", "-")
    match value:
        case bool():
            yield from [flag] if value else []
        case tuple():
            yield flag
            yield from map(str, value)
        case _:
            yield f"{flag}={value}"
