"""``[sglang]``: SGLang's own flags as a run gave them, and the arguments of a server that they become."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from slime_core.config.section import EngineSection, Value
from slime_core.config.tables import Row, sglang_rows

__all__ = ["SGLangConfig", "owned", "rows_by_name", "server_arguments", "speculates"]

_OWNED: Mapping[str, str] = {
    "write --hf-checkpoint": "model_path model tokenizer_path revision",
    "write --bf16 or leave it out (learner and engines compute in one type); of a model beside the policy, write dtype "
    "in its table [[engine.engine_models]]": "dtype",
    "write --seed": "random_seed",
    "write --device": "device",
    "write --trust-remote-code": "trust_remote_code",
    "write --sglang-context-length, in a file [engine] sglang_context_length": "context_length",
    "write --sglang-mem-fraction-static, in a file [engine] sglang_mem_fraction_static": "mem_fraction_static",
    "write --rollout-num-gpus-per-engine": "tp_size tensor_parallel_size",
    "write --colocate": "enable_memory_saver",
    "write --config FILE.toml, with a table [sglang]": "config",
    "an engine's addresses are chosen where it is started": """
        host port disaggregation_bootstrap_port
        nccl_port dist_init_addr nccl_init_addr gated_launch_port grpc_port smg_http_sidecar_port
        grpc_http_sidecar_port fastapi_root_path
    """,
    "Ray decides where an engine runs, and an engine stays on one node": """
        nnodes node_rank base_gpu_id gpu_id_step use_ray numa_node
    """,
    "the sampler and the router speak plain HTTP on addresses of the run": """
        grpc_mode smg_grpc_mode enable_http2 ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password
        enable_ssl_refresh api_key admin_api_key
    """,
    "the version of the weights is counted by the run": "weight_version",
    "the learner publishes weights when an engine is up": "checkpoint_engine_wait_weights_before_ready",
    "a server is started without its warm-up request": "skip_server_warmup",
    "responses are read as text and as tokens": "skip_tokenizer_init",
    "write is_embedding in [[engine.engine_models]]": "is_embedding",
    "engines that span pipeline stages are not built yet": "pp_size pipeline_parallel_size",
    "write --prefill-num-servers, or worker_type in [[engine.engine_groups]]": "disaggregation_mode",
    "encoders apart from their models are not built yet": "encoder_only language_only",
    "write --use-rollout-routing-replay": "enable_return_routed_experts",
    "a help page": "help",
}


@cache
def owned() -> Mapping[str, str]:
    """What a run may not pass on, because the core decides it: name -> why, or what to write instead."""
    return {name: reason for reason, names in _OWNED.items() for name in names.split()}


@cache
def rows_by_name() -> Mapping[str, Row]:
    """What SGLang's parser accepts, by every spelling, with underscores and without ``sglang_``.

    Raises:
        ConfigError: as ``tables.sglang_rows``.
    """
    return {name: row for row in sglang_rows() for name in (*row.also, row.name)}


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
