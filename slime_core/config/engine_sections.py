"""Sections [megatron] and [sglang]: the engines' own flags that a run passes on.

Of Megatron's, a run passes on those that are shown to take effect with the layers built here
(``tests/engines/test_megatron_flags.py``); the other fields of its configs are refused. slime-compat accepts what
launch scripts say of the model where it is so, and says what to write in place of other flags.

SGLang's flags become arguments of its servers, except those that the core decides itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from slime_core.config.options import Conflicts, Needs
from slime_core.config.section import EngineSection, Value
from slime_core.config.tables import Row, rows


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """A flag that sets a field of one of Megatron's configs.

    Arguments:
        home: which of Megatron's configs it sets: ``transformer`` or ``optimizer``.
        text: what it does.
        conditions: what it needs and excludes. Megatron fails only when the model is built, or not at all.
        choices: the values that a run may give; None: those of the field.
        field: what it sets; None: the field of its own name.
        value: what a switch sets where the field is no switch.
    """

    home: str
    text: str
    conditions: tuple[Needs | Conflicts, ...] = ()
    choices: tuple[str, ...] | None = None
    field: str | None = None
    value: Any = None


OF_FULL = Needs("recompute_granularity", equals="full")
OFFLOADED = (Needs("optimizer_cpu_offload"),)

MEGATRON_FLAGS: Mapping[str, MegatronFlag] = {
    "recompute_granularity": MegatronFlag(
        "transformer",
        "What the backward pass computes again instead of keeping it. full: whole layers. "
        "selective: recompute_modules. Not given: on GPUs whose memory is known, what has to be for the run to fit it.",
        (Needs("recompute_method", when="full"), Needs("recompute_num_layers", when="full")),
    ),
    "recompute_method": MegatronFlag(
        "transformer",
        "Which layers granularity full recomputes. uniform: all, in chunks of recompute_num_layers. block: the first "
        "recompute_num_layers of each pipeline stage.",
        (OF_FULL,),
    ),
    "recompute_num_layers": MegatronFlag(
        "transformer", "Layers a chunk (uniform), or layers a pipeline stage (block).", (OF_FULL,)
    ),
    # In Megatron's local layers; layernorm needs TransformerEngine, the others a mixture or MLA.
    "recompute_modules": MegatronFlag(
        "transformer",
        "Parts that granularity selective recomputes. Not given: core_attn.",
        (Needs("recompute_granularity", equals="selective", unless={"recompute_activations": True}),),
        choices=("core_attn", "mlp"),
    ),
    "disable_bf16_reduced_precision_matmul": MegatronFlag(
        "transformer", "Sum products of bfloat16 matrices in float32, on GPUs."
    ),
    "decoupled_lr": MegatronFlag("optimizer", "Learning rate of embedding and output weights. Not given: lr."),
    "decoupled_min_lr": MegatronFlag(
        "optimizer", "Where that learning rate ends. Not given: min_lr.", (Needs("decoupled_lr"),)
    ),
    "optimizer_cpu_offload": MegatronFlag(
        "optimizer",
        "Keep Adam's state in host memory and update it there. On a CPU, where it is anyway, nothing changes.",
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
        "optimizer", "Share of the optimizer's state that is on the host, from 0 to 1. Not given: 1.", OFFLOADED
    ),
    "overlap_cpu_optimizer_d2h_h2d": MegatronFlag(
        "optimizer", "Copy gradients and weights between GPU and host while other weights are updated.", OFFLOADED
    ),
    "apply_wd_to_qk_layernorm": MegatronFlag("optimizer", "Decay the weights of the norms of queries and keys too."),
    "recompute_activations": MegatronFlag(
        "transformer",
        "Means recompute_granularity selective.",
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
"""Settings that a run passes on, by the flag's name."""


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

    def _fields(self, home: str) -> Iterator[tuple[str, Any]]:
        for name, value in self.given:
            flag = MEGATRON_FLAGS[name]
            if flag.home != home:
                continue
            if flag.value is None:
                yield name, list(value) if isinstance(value, tuple) else value
            elif value:
                yield flag.field or name, flag.value


_OWNED: Mapping[str, str] = {
    "write --hf-checkpoint": "model_path model tokenizer_path revision",
    "write --bf16 or leave it out (learner and engines compute in one type); for an auxiliary model, write dtype "
    "in its table [[engine.engine_models]]": "dtype",
    "write --seed": "random_seed",
    "write --device": "device",
    "write --trust-remote-code": "trust_remote_code",
    "write --sglang-context-length, in a file [engine] sglang_context_length": "context_length",
    "write --sglang-mem-fraction-static, in a file [engine] sglang_mem_fraction_static": "mem_fraction_static",
    "write --rollout-num-gpus-per-engine": "tp_size tensor_parallel_size",
    "write --rollout-num-gpus-per-engine; an engine that is larger than a node is started over several": """
        nnodes node_rank
    """,
    "write --colocate": "enable_memory_saver",
    "write --config FILE.toml, with a table [sglang]": "config",
    "an engine's addresses are chosen where it is started": """
        host port disaggregation_bootstrap_port
        nccl_port dist_init_addr nccl_init_addr gated_launch_port grpc_port smg_http_sidecar_port
        grpc_http_sidecar_port fastapi_root_path
    """,
    "Ray decides where an engine runs": "base_gpu_id gpu_id_step use_ray numa_node",
    "the sampler and the router speak plain HTTP on addresses of the run": """
        grpc_mode smg_grpc_mode enable_http2 ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
        enable_ssl_refresh
    """,
    "each run makes a key for its engines; set the environment variable SLIME_ENGINE_KEY to choose it": """
        api_key admin_api_key
    """,
    "the version of the weights is counted by the run": "weight_version",
    "the learner publishes weights when an engine is up": "checkpoint_engine_wait_weights_before_ready",
    "a server is started without its warm-up request": "skip_server_warmup",
    "responses are read as text and as tokens": "skip_tokenizer_init",
    "write is_embedding in [[engine.engine_models]]": "is_embedding",
    "engines that span pipeline stages are not built yet": "pp_size pipeline_parallel_size",
    "write --prefill-num-servers, or worker_type in [[engine.engine_groups]]": "disaggregation_mode",
    "separate encoders are not built yet": "encoder_only language_only",
    "write --use-rollout-routing-replay": "enable_return_routed_experts",
    "a help page": "help",
}


@cache
def owned() -> Mapping[str, str]:
    """Settings that a run may not pass on, because the core decides them: name -> reason, or what to write instead."""
    return {name: reason for reason, names in _OWNED.items() for name in names.split()}


@cache
def rows_by_name() -> Mapping[str, Row]:
    """Arguments of SGLang's parser, by every spelling, with underscores and without ``sglang_``.

    Raises:
        ConfigError: as ``tables.rows``.
    """
    return {name: row for row in rows("sglang") for name in (*row.also, row.name)}


def server_arguments(given: Iterable[tuple[str, Value]]) -> tuple[str, ...]:
    """Arguments of ``sglang.launch_server`` for pairs of a name and its value.

    Example: ``(("chunked_prefill_size", 512), ("disable_radix_cache", True))`` gives
    ``("--chunked-prefill-size=512", "--disable-radix-cache")``.
    """
    return tuple(word for name, value in given for word in _words(rows_by_name()[name], value))


def speculates(given: Iterable[tuple[str, Value]]) -> bool:
    """Whether engines with these flags let a draft propose tokens."""
    return dict(given).get("speculative_algorithm") is not None


class SGLangConfig(EngineSection):
    """SGLang's own flags, under SGLang's names."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of ``sglang.launch_server``, as :func:`server_arguments`."""
        return server_arguments(self.given)


def _words(row: Row, value: Value) -> Iterator[str]:
    flag = "--" + row.name.replace("_", "-")
    match value:
        case True:
            yield flag
        case False:
            if row.negatable:
                yield flag.replace("--", "--no-", 1)
        case tuple():
            yield flag
            yield from map(str, value)
        case _:
            yield f"{flag}={value}"
