"""Private parts of other libraries that the core reads or replaces, and the versions in which it found them.

Another version may name them otherwise, and then fails late and obscurely; so a run looks for the names when it starts
(:func:`missing_internals`), in the source files and without importing anything. Where a part is used, a comment says
why and when it can go.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

__all__ = ["INTERNALS", "READ_FROM", "missing_internals"]

READ_FROM: Mapping[str, str] = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "mbridge": "0.15.1",
    "sglang": "0.5.23",
    "ray": "2.60.0",
}
"""Distribution -> the version whose source was read."""

INTERNALS: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.distributed_c10d": ("_new_process_group_helper", "_world"),  # weights/transports.py
    "torch.nn.attention.varlen": ("varlen_attn",),  # modeling/rows.py
    "torch.nn.functional": ("grouped_mm",),  # modeling/mlp.py
    "torch.utils.weak": ("WeakTensorKeyDictionary",),  # modeling/rows.py
    # slime_cpu/megatron.py, modeling/patches.py
    "megatron.core.jit": ("disable_jit_fuser",),
    "megatron.core.tensor_parallel.random": ("_get_cuda_rng_state", "_set_cuda_rng_state"),
    "megatron.core.tensor_parallel.mappings": ("_gather_along_first_dim", "_reduce_scatter_along_first_dim"),
    "megatron.core.transformer.moe.moe_utils": ("maybe_move_tensor_to_cpu", "te_general_gemm"),
    "megatron.core.transformer.multi_latent_attention": ("MLASelfAttention", "HAVE_TE"),
    "megatron.core.optimizer": ("CPUAdam", "USING_PYTORCH_OPTIMIZER"),
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": (
        "HybridDeviceOptimizer.sub_optimizers",
        "HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo",
    ),
    "megatron.core.optimizer.optimizer_config": ("is_te_min_version",),
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer",
        "HAVE_APEX_OR_TE",
        "DistributedOptimizer._set_main_param_and_optimizer_states",
        "DistributedOptimizer.model_param_group_index_map",
    ),
    # modeling/experts.py
    "megatron.core.transformer.moe.moe_layer": ("MoELayer.token_dispatcher",),
    "megatron.core.transformer.moe.token_dispatcher": (
        "MoEAlltoAllTokenDispatcher.preprocess",
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize",
    ),
    # learner/data_parallel.py
    "megatron.core.distributed.distributed_data_parallel": (
        "DistributedDataParallel._make_backward_post_hook",
        "DistributedDataParallel._make_forward_pre_hook",
    ),
    "megatron.core.distributed.param_and_grad_buffer": (
        "_ParamAndGradBucketGroup.start_grad_sync",
        "_ParamAndGradBucketGroup.finish_param_sync",
        "_ParamAndGradBucketGroup.param_gather_handle",
        "_ParamAndGradBucketGroup.grad_reduce_handle",
    ),
    # checkpoint/sharded.py
    "megatron.core.dist_checkpointing.strategies.torch": (
        "_replace_state_dict_keys_with_sharded_keys",
        "mcore_to_pyt_state_dict",
    ),
    # modeling/layers.py
    "megatron.core.transformer.moe.router": ("TopKRouter.router_replay",),
    "megatron.core.transformer.moe.router_replay": ("RouterReplay.get_replay_topk",),
    # learner/process.py
    "megatron.core.models.common.embeddings.rotary_pos_embedding": ("RotaryEmbedding.forward",),
    "mbridge.core.bridge": (  # modeling/spec.py
        "_MODEL_REGISTRY",
        "Bridge.export_weights",
        "Bridge._get_safetensor_io",
        "Bridge._weight_merge_across_tp",
        "Bridge._weight_name_mapping_mcore_local_to_global",
        "Bridge._weight_name_mapping_mcore_to_hf",
        "Bridge._weight_split_across_tp",
        "Bridge._weight_to_hf_format",
        "Bridge._weight_to_mcore_format",
    ),
    "mbridge.core.llm_bridge": ("LLMBridge._build_base_config", "LLMBridge._get_transformer_layer_spec"),
    # slime_cpu/stand_ins/_slime_server.py
    "sglang.srt.layers.rotary_embedding.factory": ("get_rope_cpu", "get_rope"),
    "sglang.srt.models.deepseek_common.attention_backend_handler": (
        "AttentionBackendRegistry.register",
        "_dispatch_mla_subtype",
    ),
    "sglang.srt.managers.scheduler": (
        "Scheduler._record_scheduler_state_for_paused_engine",
        "Scheduler.maybe_sleep_on_idle",
    ),
    "sglang.srt.managers.scheduler_components.weight_updater": ("SchedulerWeightUpdaterManager._observe_weight_load",),
    "sglang.srt.utils.weight_checker": ("_hash_tensor",),
    "sglang.srt.mem_cache.pool_host.common": ("alloc_with_host_register", "ALLOC_MEMORY_FUNCS"),
    # runtime/session.py, runtime/actors.py
    "ray._private.node": (
        "Node.start_monitor",
        "Node.start_api_server",
        "Node.start_log_monitor",
        "Node.start_raylet",
    ),
    "ray._private.ray_constants": ("ENABLE_RAY_CLUSTER",),
    "ray._private.services": ("ConsolePopen",),
    "ray._private.worker": ("_global_node",),
    "ray._raylet": ("AuthenticationTokenLoader", "DASHBOARD_AGENT_LISTEN_PORT_NAME", "persist_port"),
}
"""Module -> names, of a class with its attribute."""

_DISTRIBUTIONS = {"megatron": "megatron-core"}
"""Package -> its distribution, if that has another name."""


def missing_internals() -> Iterator[str]:
    """Yield ``megatron-core 0.17.0 has no ...`` for each missing part of an installed distribution."""
    for module, names in INTERNALS.items():
        package = module.partition(".")[0]
        distribution = _DISTRIBUTIONS.get(package, package)
        try:
            installed = metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            continue
        if missing := _missing(Path(f"{installed.locate_file('')}"), module, names):
            yield (
                f"{distribution} {installed.version} has no {', '.join(missing)} in {module}, which slime uses; it was "
                f"written for {distribution} {READ_FROM[distribution]}"
            )


def _missing(site: Path, module: str, names: tuple[str, ...]) -> list[str]:
    path = site.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if next(path.parent.glob(f"{path.name}*.so"), None):
        return []  # compiled; its import fails with the missing name
    try:
        words = set(re.findall(r"\w+", file.read_text("utf-8")))
    except OSError:
        return list(names)
    return [name for name in names if not words.issuperset(name.split("."))]
