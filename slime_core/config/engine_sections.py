"""Sections [megatron] and [sglang]: the engines' own flags, and what a run may do with each of them.

For every field of Megatron-core's configs, and for the flags by which its scripts set them, there is a decision:

    sets      reaches the named field of one of Megatron's configs, and takes effect there
    agrees    describes the model, which is the checkpoint's; it must say what config.json says (``model_config``)
    fixed     is always so here; only that value is accepted, so that launch scripts which say it keep working
    refused   is not passed on: it is in no table, and that it takes effect with the layers built here has to be shown
              first (``tests/engines/test_megatron_flags.py``)

slime-compat says what to write in place of further flags of Megatron's scripts (``megatron_flags.txt``).

SGLang's flags become arguments of its servers, except those that the core decides itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from slime_core.config.options import Conflicts, Needs
from slime_core.config.section import EngineSection, Value
from slime_core.config.tables import Row, megatron_rows, sglang_rows


@dataclass(frozen=True, slots=True)
class MegatronFlag:
    """The decision for one name.

    Example: ``--recompute-activations`` is ``MegatronFlag("recompute_activations", "sets", "bool",
    home="transformer", field="recompute_granularity", value="selective", text=...)``.

    Arguments:
        name: of the flag, with underscores.
        type, choices: as in ``tables.Row``.
        home, field: which of Megatron's configs it sets, and what there.
        value: the only one that is accepted where it is fixed; what a switch sets where it is no switch's field.
        text: what it does, why it is fixed, or why it is refused.
        conditions: what it needs and excludes.
    """

    name: str
    verdict: Literal["sets", "agrees", "fixed", "refused"]
    type: str = "str"
    choices: tuple[str, ...] = ()
    home: str = ""
    field: str = ""
    value: Any = None
    text: str = ""
    conditions: tuple[Needs | Conflicts, ...] = ()


OF_FULL = Needs("recompute_granularity", equals="full")
_CONDITIONS: Mapping[str, tuple[Needs | Conflicts, ...]] = {
    "recompute_granularity": (Needs("recompute_method", when="full"), Needs("recompute_num_layers", when="full")),
    "recompute_method": (OF_FULL,),
    "recompute_num_layers": (OF_FULL,),
    "recompute_modules": (Needs("recompute_granularity", equals="selective", unless={"recompute_activations": True}),),
    "recompute_activations": (
        Conflicts(
            "recompute_granularity",
            equals="full",
            when=True,
            because="recompute_activations means recompute_granularity = selective",
        ),
    ),
    "decoupled_min_lr": (Needs("decoupled_lr"),),
}
"""What these flags need and exclude. Megatron fails only when the model is built, or not at all."""

_MODULES = ("core_attn", "mlp")
"""What can be recomputed in Megatron's local layers; layernorm needs TransformerEngine, the others a mixture or MLA."""

_SETS: Sequence[tuple[str, str, str]] = [
    (
        "recompute_granularity",
        "transformer",
        "What the backward pass computes again instead of keeping it. full: whole layers. "
        "selective: recompute_modules.",
    ),
    (
        "recompute_method",
        "transformer",
        "Which layers granularity full recomputes. uniform: all, in chunks of recompute_num_layers. block: the first "
        "recompute_num_layers of each pipeline stage.",
    ),
    ("recompute_num_layers", "transformer", "Layers a chunk (uniform), or layers a pipeline stage (block)."),
    ("recompute_modules", "transformer", "Parts that granularity selective recomputes. Not given: core_attn."),
    (
        "disable_bf16_reduced_precision_matmul",
        "transformer",
        "Sum products of bfloat16 matrices in float32, on GPUs.",
    ),
    ("decoupled_lr", "optimizer", "Learning rate of embedding and output weights. Not given: lr."),
    ("decoupled_min_lr", "optimizer", "Where that learning rate ends. Not given: min_lr."),
    ("apply_wd_to_qk_layernorm", "optimizer", "Decay the weights of the norms of queries and keys too."),
]
"""Field, its config, what it does; the flag has the field's name."""

_AGREES: Mapping[str, str] = {
    "int": """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
        max_position_embeddings make_vocab_size_divisible_by num_experts moe_router_topk moe_ffn_hidden_size
        moe_shared_expert_intermediate_size moe_router_num_groups moe_router_group_topk q_lora_rank kv_lora_rank
        qk_head_dim qk_pos_emb_head_dim v_head_dim
    """,
    "float": "norm_epsilon layernorm_epsilon rotary_base rotary_percent moe_router_topk_scaling_factor",
    "str": "normalization position_embedding_type moe_layer_freq moe_router_score_function",
    "bool": """
        swiglu group_query_attention untie_embeddings_and_output_weights disable_bias_linear add_bias_linear
        add_qkv_bias qk_layernorm use_rotary_position_embeddings no_position_embedding multi_latent_attention
        moe_router_enable_expert_bias moe_router_pre_softmax
    """,
}

_LOCAL = "the layers are Megatron's local ones, without fused kernels"
_ROUTER = "a router is trained by the policy's loss alone"
_OVERLAP = "gradients are reduced after the last micro-batch; overlapping that is not built yet"

_FIXED: Mapping[tuple[str, object], str] = {
    ("it would make two passes over the same tokens differ", 0.0): "hidden_dropout attention_dropout",
    (_LOCAL, False): """
        masked_softmax_fusion bias_activation_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion
        apply_rope_fusion rope_fusion gradient_accumulation_fusion persist_layer_norm moe_grouped_gemm
        moe_permute_fusion moe_shared_expert_overlap cross_entropy_loss_fusion
    """,
    (_LOCAL, "local"): "transformer_impl",
    ("attention is torch's scaled_dot_product_attention, which chooses its kernel itself", "auto"): "attention_backend",
    ("softmax and reductions are computed in float32", True): """
        attention_softmax_in_fp32 grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32
    """,
    ("softmax and reductions are computed in float32", False): "grad_reduce_in_bf16",
    ("the optimizer's state is always spread over the data-parallel ranks", True): "use_distributed_optimizer",
    ("the optimizer is Adam with decoupled weight decay", "adam"): "optimizer",
    ("the optimizer is Adam with decoupled weight decay", True): "decoupled_weight_decay",
    ("gradients are summed, because the divisors are in the loss", False): """
        average_in_collective ddp_average_in_collective
    """,
    (_OVERLAP, False): "overlap_grad_reduce overlap_param_gather",
    ("a run always stops at a loss or a gradient that is not finite", True): "check_for_nan_in_loss_and_grad",
    ("models are Megatron-core's", True): "use_mcore_models",
    ("checkpoints are distributed ones", "torch_dist"): "ckpt_format dist_ckpt_format",
    ("checkpoints are distributed ones", True): "use_dist_ckpt",
    ("the tokenizer is the checkpoint's", "HuggingFaceTokenizer"): "tokenizer_type",
    ("only a plain RMSNorm is built", False): "layernorm_zero_centered_gamma apply_layernorm_1p",
    ("float16 is not built; --bf16 computes in bfloat16", False): "fp16",
    ("experts exchange tokens all to all", "alltoall"): "moe_token_dispatcher_type",
    ("scores of a router are computed in float32", "fp32"): "moe_router_dtype",
    ("no token is dropped", "probs"): "moe_token_drop_policy",
    (_ROUTER, "none"): "moe_router_load_balancing_type",
    (_ROUTER, 0.0): "moe_aux_loss_coeff moe_router_bias_update_rate",
}

_UNTRIED = "no test has shown yet that it takes effect with the layers and the loop that are built here"


@cache
def megatron_flags() -> Mapping[str, MegatronFlag]:
    """The decision for each name, by name.

    Raises:
        ConfigError: as ``tables.megatron_rows``.
    """
    fields = {row.name: row for row in megatron_rows()}
    decided = {flag.name: flag for flag in [*_fixed(fields), *_agreeing(), *_setting(fields)]}
    found = {name: MegatronFlag(name, "refused", text=_UNTRIED) for name in fields}
    return {name: flag for name, flag in found.items() if name.removeprefix("no_") not in decided} | decided


def _fixed(fields: Mapping[str, Row]) -> Iterator[MegatronFlag]:
    for (text, value), names in _FIXED.items():
        for name in names.split():
            kind = type(value).__name__
            choices = fields[name].choices if name in fields else ()
            yield MegatronFlag(name, "fixed", kind, choices=choices, value=value, text=text)


def _agreeing() -> Iterator[MegatronFlag]:
    text = "Describes the model: must say what config.json of the checkpoint says."
    for kind, names in _AGREES.items():
        yield from (MegatronFlag(name, "agrees", kind, text=text) for name in names.split())


def _setting(fields: Mapping[str, Row]) -> Iterator[MegatronFlag]:
    for name, home, text in _SETS:
        row = fields[name]
        choices = _MODULES if name == "recompute_modules" else row.choices
        conditions = _CONDITIONS.get(name, ())
        yield MegatronFlag(name, "sets", row.type, choices, home, field=name, text=text, conditions=conditions)
    text = "The same as recompute_granularity selective."
    field, home = "recompute_granularity", "transformer"
    yield MegatronFlag(
        "recompute_activations",
        "sets",
        "bool",
        home=home,
        field=field,
        value="selective",
        text=text,
        conditions=_CONDITIONS["recompute_activations"],
    )


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
            flag = megatron_flags()[name]
            if flag.home != home:
                continue
            if flag.value is None:
                yield flag.field, list(value) if isinstance(value, tuple) else value
            elif value:
                yield flag.field, flag.value


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
