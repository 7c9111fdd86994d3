"""Rules of models and engines: models divide over ranks and devices, those in addition to the actor fit it, groups of
engines add up, and the engines' own flags fit the checkpoint.

The divisibility rules are those of Megatron-core 0.16 (``TransformerConfig.__post_init__``,
``initialize_model_parallel``) and of SGLang 0.5, which report violations only after they have started. Critic,
reference, teacher and routing replay are compared by ``config.json``. ``check`` calls the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime_core.config.engines import EngineGroup, sglang_name
from slime_core.config.model_config import (
    EXPERTS,
    config_folder,
    described,
    differences,
    forward_flops,
    start_weights,
    torch_dist_folder,
    whole_number,
)
from slime_core.config.rules import Rule
from slime_core.config.schema import RunConfig

KEY_VALUE_HEADS = "num_key_value_heads"

MOST_PROCESSES = 65_536
"""Most processes of a run; no cluster has as many."""

SOME_ARE_DENSE = ("mlp_only_layers", "first_k_dense_replace")
"""With these, layers of a mixture have no experts; so they have with a ``decoder_sparse_step`` above 1."""


def _copies_fill_the_ranks(config: RunConfig) -> Iterator[str]:
    sizes, ranks = config.parallel, config.num_learner_ranks
    if ranks % sizes.model_size:
        yield (
            "tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size = "
            f"{sizes.tensor_model_parallel_size} x {sizes.pipeline_model_parallel_size} x "
            f"{sizes.context_parallel_size} = {sizes.model_size} ranks hold one copy of the model, and {ranks} ranks "
            f"are no multiple of that; give {sizes.model_size} ranks or a multiple, or lower a parallel size"
        )


def _every_copy_has_samples(config: RunConfig) -> Iterator[str]:
    copies = config.num_data_ranks
    if config.samples_per_step < copies:
        yield (
            f"an optimizer step has global_batch_size = {config.samples_per_step} sample(s), but {copies} "
            f"data-parallel ranks need at least one each. Raise --global-batch-size to at least {copies}, or use "
            "fewer ranks"
        )


def _heads_and_vocabulary_divide(config: RunConfig) -> Iterator[str]:
    size = config.parallel.tensor_model_parallel_size
    even = ("num_attention_heads", "vocab_size")
    yield from _uneven(start_weights(config), "tensor_model_parallel_size", size, *even)


def _every_chunk_has_a_layer(config: RunConfig) -> Iterator[str]:
    stages, virtual = config.parallel.pipeline_model_parallel_size, config.parallel.num_virtual_stages_per_pipeline_rank
    layers = whole_number(start_weights(config), "num_hidden_layers")
    # The last chunk needs no layer, because it computes the logits.
    if layers is not None and stages * virtual > layers + 1:
        yield (
            f"pipeline_model_parallel_size x num_virtual_stages_per_pipeline_rank = {stages} x {virtual} = "
            f"{stages * virtual} chunks, but the model has num_hidden_layers = {layers}; accepted: at most "
            f"{layers + 1}, so that every chunk but the last has a layer"
        )


def _experts_divide(config: RunConfig) -> Iterator[str]:
    sizes, folder = config.parallel, start_weights(config)
    size, each = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size or sizes.tensor_model_parallel_size
    experts, ranks = whole_number(folder, *EXPERTS), config.num_learner_ranks // sizes.pipeline_model_parallel_size
    if experts is not None and experts % size:
        yield f"expert_model_parallel_size = {size} does not divide the {experts} experts of {folder / 'config.json'}"
    elif config.num_learner_ranks % sizes.model_size == 0 and ranks % (size * each):
        yield (
            f"expert_model_parallel_size x expert_tensor_parallel_size = {size} x {each} = {size * each} does not "
            f"divide the {ranks} ranks of a pipeline stage; change one of the sizes, or give other ranks"
        )


def _experts_are_cut_apart(config: RunConfig) -> Iterator[str]:
    sizes, experts = config.parallel, whole_number(start_weights(config), *EXPERTS)
    each, other = sizes.expert_tensor_parallel_size, sizes.tensor_model_parallel_size
    # slime's scripts also give 1 for models without experts.
    is_moot = each in (None, other) or (each == 1 and experts is None)
    if sizes.expert_model_parallel_size == 1 and not is_moot:
        yield (
            f"expert_tensor_parallel_size = {each} needs expert_model_parallel_size other than 1, because Megatron "
            "cuts experts that all ranks hold as the other matrices. Add --expert-model-parallel-size, or leave "
            "--expert-tensor-parallel-size out"
        )


def _experts_have_whole_sequences(config: RunConfig) -> Iterator[str]:
    sizes, experts = config.parallel, whole_number(start_weights(config), *EXPERTS)
    if experts is not None and sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel:
        yield (
            f"tensor_model_parallel_size = {sizes.tensor_model_parallel_size} with sequence_parallel = false: Megatron "
            f"trains a mixture of {experts} experts over tensor-parallel ranks only if they also share sequences; "
            "give sequence_parallel = true, or tensor_model_parallel_size = 1"
        )


def _separate_critic_fits_its_ranks(config: RunConfig) -> Iterator[str]:
    """Apply the rules of the learner's layout to the critic's."""
    if ranks := config.num_critic_ranks:
        cluster = config.cluster.model_copy(update={"actor_num_nodes": 1, "actor_num_gpus_per_node": ranks})
        alone = config.model_copy(update={"parallel": config.critic_parallel, "cluster": cluster})
        for rule in LEARNER_LAYOUT:
            yield from (f"critic with critic_num_gpus = {ranks}: {message}" for message in rule(alone))


def _processes_can_be_counted(config: RunConfig) -> Iterator[str]:
    """Checked first, because other code makes lists with an entry for each process."""
    groups = (*config.engine_groups, *config.auxiliary_groups)
    total = config.num_started_ranks + config.num_critic_ranks + sum(group.num_gpus for group in groups)
    if total > MOST_PROCESSES:
        yield (
            f"learner, critic and engines have {total:,} processes or devices together; accepted: at most "
            f"{MOST_PROCESSES:,}. Lower actor_num_nodes, or a number of GPUs"
        )


def _colocated_engines_have_devices(config: RunConfig) -> Iterator[str]:
    engines, ranks = config.cluster.rollout_num_gpus, config.num_learner_ranks
    if config.cluster.colocate and engines > ranks:
        yield (
            f"colocate: rollout_num_gpus = {engines} is more than the {ranks} devices of the learner, which engines "
            f"share; give at most {ranks}"
        )


def _uneven(folder: Path, setting: str, size: int, *even: str) -> Iterator[str]:
    """A message if ``size`` tensor-parallel processes cannot share heads, vocabulary or widths of the model evenly."""
    counts = {name: whole_number(folder, name) for name in (*even, KEY_VALUE_HEADS, *_widths(folder))}
    bad = [f"{name} = {count}" for name, count in counts.items() if count is not None and not _fits(size, name, count)]
    if bad:
        yield f"{setting} = {size} does not divide {', '.join(bad)} of {folder / 'config.json'}; give a size that does"


def _widths(folder: Path) -> Iterator[str]:
    """Yield the names of the inner widths of feed-forward layers in ``config.json``."""
    fields = described(folder) or {}
    mixture = whole_number(folder, *EXPERTS) is not None and "moe_intermediate_size" in fields
    if mixture:
        yield "moe_intermediate_size"
    if not mixture or any(fields.get(name) for name in SOME_ARE_DENSE) or fields.get("decoder_sparse_step", 1) != 1:
        yield "intermediate_size"


def _fits(size: int, name: str, count: int) -> bool:
    # Fewer key-value heads than ranks are repeated, as long as every rank gets one.
    return count % size == 0 or (name == KEY_VALUE_HEADS and size % count == 0)


LEARNER_LAYOUT: tuple[Rule, ...] = (
    _copies_fill_the_ranks,
    _every_copy_has_samples,
    _heads_and_vocabulary_divide,
    _every_chunk_has_a_layer,
    _experts_are_cut_apart,
    _experts_divide,
    _experts_have_whole_sequences,
)

RUN_LAYOUT: tuple[Rule, ...] = (*LEARNER_LAYOUT, _separate_critic_fits_its_ranks, _colocated_engines_have_devices)


def _further_models_are_the_same_model(config: RunConfig) -> Iterator[str]:
    """Compare what further models are loaded from with the actor, as far as config.json shows; critic, reference and
    teacher are computed with the layers of the actor."""
    algorithm, folders = config.algorithm, {"critic_load": config.critic.critic_load}
    if algorithm.use_kl_loss or algorithm.kl_coef > 0:
        folders["ref_load"] = config.model.ref_load
    if algorithm.use_opd:
        folders["opd_teacher_load"] = algorithm.opd_teacher_load
    ours = described(start_weights(config))
    for setting, folder in folders.items():
        stored = torch_dist_folder(folder) if folder is not None else None
        source = (config_folder(stored) if stored is not None else None) or folder
        theirs = described(source) if source is not None else None
        fields = differences(theirs, ours) if theirs is not None and ours is not None else []
        if fields:  # another rule reports a folder without config.json
            yield (
                f"{setting} = {folder}: its config.json differs from that of {start_weights(config)}: "
                f"{'; '.join(fields)}; give a model of the same architecture, sizes and vocabulary"
            )


def _a_mixture_is_there(config: RunConfig) -> Iterator[str]:
    folder, learner = start_weights(config), config.learner
    requested = {
        "expert_model_parallel_size": config.parallel.expert_model_parallel_size > 1,
        "use_routing_replay": learner.use_routing_replay,
        "use_rollout_routing_replay": learner.use_rollout_routing_replay,
    }
    if described(folder) is not None and whole_number(folder, *EXPERTS) is None:
        for name in (name for name, is_requested in requested.items() if is_requested):
            yield f"{name}: {folder / 'config.json'} (hf_checkpoint) describes a model without experts; leave it out"


def _work_can_be_counted(config: RunConfig) -> Iterator[str]:
    folder = start_weights(config)
    content = described(folder)
    if not config.learner.balance_by_flops or content is None:
        return
    try:
        forward_flops(content)
    except ValueError as error:
        yield f"balance_by_flops: {folder / 'config.json'} {error}; leave it out, and ranks are balanced by tokens"


def _recomputed_chunks_divide_the_layers(config: RunConfig) -> Iterator[str]:
    """Megatron-core 0.16's loop over chunks of layers steps over the end of a stage
    (transformer/transformer_block.py, ``_checkpointed_forward``)."""
    flags, parallel = config.megatron.transformer, config.parallel
    number, layers = flags.get("recompute_num_layers"), whole_number(start_weights(config), "num_hidden_layers")
    if flags.get("recompute_method") != "uniform" or number is None or layers is None:
        return
    chunks = parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    sizes = sorted({layers // chunks, -(-layers // chunks)})
    if any(size % number for size in sizes):
        yield (
            f"recompute_num_layers = {number} with recompute_method = uniform does not divide the "
            f"{' and '.join(map(str, sizes))} layers that a rank holds of num_hidden_layers = {layers}; choose "
            "a divisor, or recompute_method block"
        )


MODELS: tuple[Rule, ...] = (
    _further_models_are_the_same_model,
    _a_mixture_is_there,
    _work_can_be_counted,
    _recomputed_chunks_divide_the_layers,
)


CUT_OTHERWISE = frozenset({"enable_dp_attention", "dp_size", "attn_cp_size"})
"""SGLang's flags by which attention is not sharded over all processes of an engine."""


REARRANGING = CUT_OTHERWISE | {
    *("quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile", "enable_lora", "lora_paths"),
    *("ep_size", "moe_dp_size", "moe_dense_tp_size", "dcp_size", "enable_dp_lm_head", "enable_eplb"),
    *("moe_a2a_backend", "moe_runner_backend", "ep_num_redundant_experts", "enforce_shared_experts_fusion"),
    *("enable_attn_tp_input_scattered", "enable_shared_experts_attn_tp", "shared_experts_tp_size"),
    *("enable_dense_mlp_attn_tp", "enable_cp_decode_attn_tp", "cpu_offload_gb", "offload_group_size", "kt_weight_path"),
}
"""SGLang's flags by which an engine quantizes weights, or splits or stores them otherwise than over ``tp_size``."""

PLAIN: tuple[object, ...] = (None, False, 0, 1, "", "none", "auto", "triton", ())
"""Values of these flags that change nothing."""


def rearranges_weights(config: RunConfig) -> bool:
    """Return whether engines may hold weights in another form: by SGLang's flags, or because this run does not start
    them."""
    if config.engine.rollout_external_engine_addrs:
        return True
    groups = (*config.engine_groups, *config.eval_groups)
    flags = (*config.sglang.given, *(flag for group in groups for flag in group.overrides))
    return any(name in REARRANGING and (value is True or value not in PLAIN) for name, value in flags)


def _started_groups(config: RunConfig) -> Iterator[tuple[str, Path, EngineGroup]]:
    """Yield the place of each group of engines for messages, the folder of its model, and the group with its sizes."""
    policy, is_stated = start_weights(config), bool(config.engine.engine_groups)
    for number, group in enumerate(config.engine_groups):
        yield f"engine_groups: group {number}" if is_stated else "rollout_num_gpus", policy, group
    yield from (("eval_num_gpus", policy, group) for group in config.eval_groups)
    for model in config.engine.engine_models:
        yield from ((f"engine_models {model.name}", model.model_path, group) for group in model.groups)


def _engines_fill_their_gpus(config: RunConfig) -> Iterator[str]:
    for where, _, group in _started_groups(config):
        if group.num_gpus % group.size:
            yield (
                f"{where}: {group.num_gpus} GPUs are no multiple of the {group.size} of one engine "
                "(num_gpus_per_engine); change one"
            )


def _groups_add_up(config: RunConfig) -> Iterator[str]:
    fleets = [("rollout_num_gpus", config.cluster.rollout_num_gpus, config.engine.engine_groups)]
    for model in config.engine.engine_models:
        of_groups = sum(group.num_gpus for group in model.engine_groups)
        fleets.append((f"engine_models {model.name}: num_gpus", model.num_gpus or of_groups, model.engine_groups))
    for where, gpus, groups in fleets:
        total = sum(group.num_gpus for group in groups)
        if groups and gpus != total:
            yield f"{where} = {gpus}, but the engine_groups have {total} GPUs; make the two equal"


def _engines_share_models_evenly(config: RunConfig) -> Iterator[str]:
    """SGLang itself checks engines that divide attention in another way."""
    for where, folder, group in _started_groups(config):
        names = {name for name, _ in (*config.sglang.given, *group.overrides)}
        if not names & CUT_OTHERWISE:
            yield from _uneven(folder, f"{where}: num_gpus_per_engine", group.size, "num_attention_heads")


def _overrides_may_be_set(config: RunConfig) -> Iterator[str]:
    for where, _, group in _started_groups(config):
        for name, _ in group.overrides:
            try:
                sglang_name(name)
            except ValueError as error:
                yield f"{where}: overrides {name}: {error}"


def _prefill_and_decode_come_in_pairs(config: RunConfig) -> Iterator[str]:
    """Prefill engines compute the prompt of a request and decode engines its response, so a run needs both."""
    fleets = {f"engine_models {model.name}": model.groups for model in config.engine.engine_models}
    for where, groups in {"engine_groups": config.engine_groups, **fleets}.items():
        kinds = {group.worker_type for group in groups}
        if kinds not in (set(), {"regular"}, {"prefill", "decode"}):
            yield (
                f"{where}: worker_type is {' and '.join(sorted(kinds))}; accepted: regular throughout, or both prefill "
                "and decode and nothing else"
            )


def _prefill_leaves_some_to_decode(config: RunConfig) -> Iterator[str]:
    prefill = config.engine.prefill_num_servers
    engines = config.cluster.rollout_num_gpus // config.cluster.rollout_num_gpus_per_engine
    if prefill is not None and prefill >= engines:
        yield (
            f"prefill_num_servers = {prefill} of rollout_num_gpus / rollout_num_gpus_per_engine = {engines} engines "
            f"leaves none to decode; give at most {engines - 1}"
        )


def _prefill_and_decode_are_connected(config: RunConfig) -> Iterator[str]:
    """Separate prefill and decode engines pass requests through a router of the run, and the KV cache between GPUs."""
    if not any(group.worker_type != "regular" for _, _, group in _started_groups(config)):
        return
    starts_late = config.splits_prefill and config.engine.sglang_router_ip is not None
    bypasses = config.splits_prefill and config.learner.use_rollout_routing_replay
    for name, is_given, reason in (
        ("device = cpu", config.cluster.device == "cpu", "the KV cache goes from GPU to GPU"),
        ("sglang_router_ip", starts_late, "a router learns the role of each engine only when it starts"),
        ("use_rollout_routing_replay", bypasses, "its requests bypass the router, through which alone they answer"),
    ):
        if is_given:
            yield (
                "separate prefill and decode engines (prefill_num_servers, worker_type) cannot be combined with "
                f"{name}, because {reason}. Leave one of the two out"
            )


def _copies_need_attention(config: RunConfig) -> Iterator[str]:
    flags = dict(config.sglang.given)
    if flags.get("dp_size", 1) != 1 and not flags.get("enable_dp_attention"):
        yield (
            f"sglang.dp_size = {flags['dp_size']} copies of an engine would need more devices than "
            "rollout_num_gpus_per_engine; add --sglang-enable-dp-attention, or raise --rollout-num-gpus for more "
            "engines"
        )


SERVING: tuple[Rule, ...] = (
    _processes_can_be_counted,
    _engines_fill_their_gpus,
    _groups_add_up,
    _engines_share_models_evenly,
    _overrides_may_be_set,
    _prefill_and_decode_come_in_pairs,
    _prefill_leaves_some_to_decode,
    _prefill_and_decode_are_connected,
    _copies_need_attention,
)
