"""Rules of models and engines: models divide over ranks and devices, those in addition to the actor fit it, groups of
engines add up, and the engines' own flags fit the checkpoint.

What divides what is Megatron-core 0.16's (``TransformerConfig.__post_init__``, ``initialize_model_parallel``) and, for
an engine, SGLang 0.5's; both would say so only after they have started. Critic, reference, teacher and routing replay
are compared by ``config.json``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime_core.config.engine_flags import Refusal, find_key
from slime_core.config.engines import EngineGroup, rows_by_name, speculates
from slime_core.config.model_config import (
    EXPERTS,
    config_folder,
    described,
    differences,
    forward_flops,
    routes_shape,
    start_weights,
    torch_dist_folder,
    whole_number,
)
from slime_core.config.rules import Rule
from slime_core.config.schema import RunConfig
from slime_core.errors import nearest

KEY_VALUE_HEADS = "num_key_value_heads"

MOST_PROCESSES = 65_536
"""Most processes of a run; no cluster has as many."""

SOME_ARE_DENSE = ("mlp_only_layers", "first_k_dense_replace")
"""With these, layers of a mixture have no experts; so they have with a ``decoder_sparse_step`` above 1."""


def _copies_fill_the_ranks(config: RunConfig) -> Iterator[str]:
    sizes, ranks = config.parallel, config.num_learner_ranks
    if ranks % sizes.model_size:
        nodes, each = config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node
        yield (
            "tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size = "
            f"{sizes.tensor_model_parallel_size} x {sizes.pipeline_model_parallel_size} x "
            f"{sizes.context_parallel_size} = {sizes.model_size} ranks hold one copy of the model, but "
            f"actor_num_nodes x actor_num_gpus_per_node = {nodes} x {each} = {ranks} is no multiple of "
            f"{sizes.model_size}; give {sizes.model_size} ranks or a multiple, or lower a parallel size"
        )


def _heads_and_vocabulary_divide(config: RunConfig) -> Iterator[str]:
    size = config.parallel.tensor_model_parallel_size
    yield from _uneven(config, "tensor_model_parallel_size", size, "num_attention_heads", "vocab_size")


def _processes_can_be_counted(config: RunConfig) -> Iterator[str]:
    """Checked first, because later rules make lists with an entry for each process."""
    groups = (*config.engine_groups, *config.auxiliary_groups)
    total = config.num_started_ranks + config.num_critic_ranks + sum(group.num_gpus for group in groups)
    if total > MOST_PROCESSES:
        yield (
            f"{total:,} processes or devices, of learner, critic and engines together; accepted: at most "
            f"{MOST_PROCESSES:,}. Lower actor_num_nodes, actor_num_gpus_per_node, critic_num_gpus, rollout_num_gpus, "
            "eval_num_gpus or num_gpus of an engine group or model"
        )


def _engine_heads_divide(config: RunConfig) -> Iterator[str]:
    size_of_engines = config.cluster.rollout_num_gpus_per_engine
    if config.engine.engine_groups:
        size_of_engines = 1  # each group has its own
    yield from _uneven(config, "rollout_num_gpus_per_engine", size_of_engines, "num_attention_heads")
    for size in sorted({group.num_gpus_per_engine or size_of_engines for group in config.engine.engine_groups}):
        yield from _uneven(config, "engine_groups: num_gpus_per_engine", size, "num_attention_heads")
    if (size_of_own := config.eval.eval_num_gpus_per_engine) is not None:
        yield from _uneven(config, "eval_num_gpus_per_engine", size_of_own, "num_attention_heads")


def _every_chunk_has_a_layer(config: RunConfig) -> Iterator[str]:
    stages, chunks = config.parallel.pipeline_model_parallel_size, config.parallel.num_virtual_stages_per_pipeline_rank
    folder = start_weights(config)
    layers = whole_number(folder, "num_hidden_layers")
    # The last chunk needs no layer, because it computes the logits.
    if layers is None or stages * chunks <= layers + 1:
        return
    product = "pipeline_model_parallel_size"
    numbers = f"{stages}"
    if chunks > 1:
        product += " x num_virtual_stages_per_pipeline_rank"
        numbers += f" x {chunks} = {stages * chunks}"
    yield (
        f"{product} = {numbers} divides the num_hidden_layers = {layers} of {folder / 'config.json'} into too many "
        f"chunks; accepted: at most {layers + 1}, so that every chunk but the last has a layer"
    )


def _experts_divide(config: RunConfig) -> Iterator[str]:
    size, folder = config.parallel.expert_model_parallel_size, start_weights(config)
    if size == 1 or described(folder) is None:
        return
    experts = whole_number(folder, *EXPERTS)
    name = f"expert_model_parallel_size = {size}"
    if experts is None:
        yield f"{name}, but {folder / 'config.json'} describes a model without experts; leave it out"
    elif experts % size:
        yield f"{name} does not divide its {experts} experts; accepted: {_listed(_divisors(experts))}"


def _experts_have_whole_sequences(config: RunConfig) -> Iterator[str]:
    sizes, folder = config.parallel, start_weights(config)
    experts = whole_number(folder, *EXPERTS)
    if experts is not None and sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel:
        yield (
            f"tensor_model_parallel_size = {sizes.tensor_model_parallel_size} with sequence_parallel = false: "
            f"{folder / 'config.json'} describes a mixture of {experts} experts, and Megatron trains one over "
            "tensor-parallel ranks only where they share sequences too; give sequence_parallel = true, or "
            "tensor_model_parallel_size = 1"
        )


def _experts_lie_in_a_stage(config: RunConfig) -> Iterator[str]:
    sizes = config.parallel
    size, each = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size or sizes.tensor_model_parallel_size
    whole = config.num_learner_ranks % sizes.model_size == 0
    ranks = config.num_learner_ranks // sizes.pipeline_model_parallel_size
    if not whole or ranks % (size * each) == 0:
        return
    if ranks % each:
        yield (
            f"expert_tensor_parallel_size = {each} does not divide the {ranks} learner ranks of a pipeline stage; "
            f"accepted: {_listed(_divisors(ranks))}"
        )
        return
    shares = f" of {each} that share an expert (expert_tensor_parallel_size)" if each > 1 else ""
    yield (
        f"expert_model_parallel_size = {size} does not divide the {ranks // each} groups{shares} in the {ranks} "
        f"learner ranks of a pipeline stage; accepted: {_listed(_divisors(ranks // each))}, or more learner ranks"
    )


def _every_copy_has_samples(config: RunConfig) -> Iterator[str]:
    copies = config.num_data_ranks
    if config.samples_per_step < copies:
        ranks, size = config.num_learner_ranks, config.parallel.model_size
        yield (
            f"an optimizer step has global_batch_size = {config.samples_per_step} sample(s), but the {ranks} learner "
            f"ranks / {size} per copy of the model = {copies} data-parallel ranks need at least one each. Raise "
            f"--global-batch-size to at least {copies}, or use fewer ranks"
        )


def _colocated_engines_have_devices(config: RunConfig) -> Iterator[str]:
    engines, ranks = config.cluster.rollout_num_gpus, config.num_learner_ranks
    if config.cluster.colocate and engines > ranks:
        nodes, each = config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node
        yield (
            f"colocate: rollout_num_gpus = {engines} is more than the learner's devices, actor_num_nodes x "
            f"actor_num_gpus_per_node = {nodes} x {each} = {ranks}, which engines share; give at most {ranks}"
        )


def _uneven(config: RunConfig, setting: str, size: int, *even: str) -> Iterator[str]:
    """A message if ``size`` tensor-parallel processes cannot share heads, vocabulary or widths of the model evenly."""
    folder = start_weights(config)
    counts = {name: whole_number(folder, name) for name in (*even, KEY_VALUE_HEADS, *_widths(folder))}
    known = {name: count for name, count in counts.items() if count is not None}
    bad = [f"{name} = {count}" for name, count in known.items() if not _fits(size, name, count)]
    if bad:
        largest = min((count for name, count in known.items() if name != KEY_VALUE_HEADS), default=size)
        good = [one for one in range(1, largest + 1) if all(_fits(one, *pair) for pair in known.items())]
        yield (
            f"{setting} = {size} does not divide {', '.join(bad)} of {folder / 'config.json'}; "
            f"accepted: {_listed(good)}"
        )


def _widths(folder: Path) -> Iterator[str]:
    """The inner widths of feed-forward layers in ``config.json``: of experts, and of dense layers."""
    found = described(folder) or {}
    mixture = whole_number(folder, *EXPERTS) is not None and "moe_intermediate_size" in found
    if mixture:
        yield "moe_intermediate_size"
    if not mixture or any(found.get(name) for name in SOME_ARE_DENSE) or found.get("decoder_sparse_step", 1) != 1:
        yield "intermediate_size"


def _fits(size: int, name: str, count: int) -> bool:
    # Fewer key-value heads than ranks are repeated, as long as every rank gets one.
    return count % size == 0 or (name == KEY_VALUE_HEADS and size % count == 0)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


LEARNER_LAYOUT: tuple[Rule, ...] = (
    _copies_fill_the_ranks,
    _every_copy_has_samples,
    _heads_and_vocabulary_divide,
    _every_chunk_has_a_layer,
    _experts_divide,
    _experts_have_whole_sequences,
    _experts_lie_in_a_stage,
)

ENGINE_LAYOUT: tuple[Rule, ...] = (_processes_can_be_counted, _engine_heads_divide)

RUN_LAYOUT: tuple[Rule, ...] = (*LEARNER_LAYOUT, _colocated_engines_have_devices)


def _further_models_are_the_same_model(config: RunConfig) -> Iterator[str]:
    """Compare what further models are loaded from with the actor, as far as config.json shows."""
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
        found = differences(theirs, ours) if theirs is not None and ours is not None else []
        if found:  # another rule reports a folder without config.json
            yield (
                f"{setting} = {folder}: {_SAME_MODEL[setting]}, but its config.json differs from that of "
                f"{start_weights(config)}: {'; '.join(found)}; give a model of the same architecture, sizes and "
                "vocabulary"
            )


_SAME_MODEL = {
    "critic_load": "the critic has the architecture of the actor, except for its head",
    "ref_load": "the reference and the actor are computed with the same model object",
    "opd_teacher_load": "the teacher and the actor are computed with the same model object",
}
"""Setting -> why its model has to be the actor's."""


def _separate_critic_fits_its_devices(config: RunConfig) -> Iterator[str]:
    """Apply the rules of the learner's layout to the critic's, with its names in the messages."""
    ranks = config.num_critic_ranks
    if not ranks:
        return
    alone = config.model_copy(
        update={
            "parallel": config.critic_parallel,
            "cluster": config.cluster.model_copy(update={"actor_num_nodes": 1, "actor_num_gpus_per_node": ranks}),
        }
    )
    for message in (message for rule in LEARNER_LAYOUT for message in rule(alone)):
        yield "critic: " + _in_words_of_the_critic(message, ranks)


def _in_words_of_the_critic(message: str, ranks: int) -> str:
    message = message.replace(
        f"actor_num_nodes x actor_num_gpus_per_node = 1 x {ranks} = {ranks}", f"critic_num_gpus = {ranks}"
    )
    own = "|".join(name.removeprefix("critic_") for name in _OWN_LAYOUT)
    return re.sub(rf"\b({own})\b", r"critic_\1", message).replace("learner ranks", "critic ranks")


_OWN_LAYOUT = (
    "critic_tensor_model_parallel_size",
    "critic_sequence_parallel",
    "critic_pipeline_model_parallel_size",
    "critic_context_parallel_size",
)


def _a_mixture_is_there(config: RunConfig) -> Iterator[str]:
    folder, learner = start_weights(config), config.learner
    requested = {
        "use_routing_replay": learner.use_routing_replay,
        "use_rollout_routing_replay": learner.use_rollout_routing_replay,
    }
    if described(folder) is not None and routes_shape(folder) is None:
        for name in (name for name, is_requested in requested.items() if is_requested):
            yield (
                f"{name} replays the experts that each token takes, but {folder / 'config.json'} (hf_checkpoint) "
                "describes a model without experts; leave it out"
            )


def _routes_come_from_whole_engines(config: RunConfig) -> Iterator[str]:
    if config.learner.use_rollout_routing_replay and config.splits_prefill:
        yield (
            "use_rollout_routing_replay sends requests to engines directly, because sglang-router does not pass on "
            "return_routed_experts, but separate prefill and decode engines answer through the router only; leave "
            "one of the two out"
        )


def recomputes(config: RunConfig) -> bool:
    """Whether the backward pass runs parts of the forward pass again, routers perhaps among them."""
    return bool(config.megatron.transformer.get("recompute_granularity"))


def _work_can_be_counted(config: RunConfig) -> Iterator[str]:
    folder = start_weights(config)
    content = described(folder)
    if not config.learner.balance_by_flops or content is None:
        return
    try:
        forward_flops(content)
    except ValueError as error:
        yield f"balance_by_flops: {folder / 'config.json'} {error}; leave it out, and ranks are balanced by tokens"


MODELS: tuple[Rule, ...] = (
    _further_models_are_the_same_model,
    _separate_critic_fits_its_devices,
    _a_mixture_is_there,
    _routes_come_from_whole_engines,
    _work_can_be_counted,
)


CUT_OTHERWISE = frozenset({"enable_dp_attention", "dp_size", "attn_cp_size"})
"""SGLang's flags by which attention is not cut over all processes of an engine."""


def _engines_fill_their_gpus(config: RunConfig) -> Iterator[str]:
    gpus, each = config.cluster.rollout_num_gpus, config.cluster.rollout_num_gpus_per_engine
    groups = config.engine.engine_groups
    if not groups:
        if gpus % each and not config.engine.rollout_external_engine_addrs:
            problem = f"rollout_num_gpus = {gpus} is no multiple of rollout_num_gpus_per_engine = {each}"
            yield f"{problem}; give {each} or a multiple"
        return
    yield from _uneven_groups(groups, each, "engine_groups")
    if sum(group.num_gpus for group in groups) != gpus:
        yield f"engine_groups have {_sum(groups)} GPUs, but rollout_num_gpus = {gpus}; make the two equal"


def _models_fill_their_gpus(config: RunConfig) -> Iterator[str]:
    for model in config.engine.engine_models:
        where, stated = f"engine_models {model.name}", model.engine_groups
        yield from _uneven_groups(model.groups, 1, where)
        if stated and model.num_gpus not in (None, sum(group.num_gpus for group in stated)):
            yield f"{where}: its engine_groups have {_sum(stated)} GPUs, but num_gpus = {model.num_gpus}; leave one out"


def _models_are_there(config: RunConfig) -> Iterator[str]:
    for model in config.engine.engine_models:
        if described(model.model_path) is None:
            yield (
                f"engine_models {model.name}: {model.model_path} holds no config.json; accepted: a Hugging Face folder "
                "on this machine (download a hub model first)"
            )


def _models_have_names_of_their_own(config: RunConfig) -> Iterator[str]:
    counts = Counter(model.name for model in config.engine.engine_models)
    for name in (name for name, count in counts.items() if count > 1):
        yield (
            f"engine_models: {counts[name]} models are named {name!r}; requests name the model, so each needs its "
            "own name"
        )


def _models_share_their_heads_evenly(config: RunConfig) -> Iterator[str]:
    """Auxiliary models only; SGLang itself checks engines that divide attention in another way."""
    for model in config.engine.engine_models:
        heads = whole_number(model.model_path, "num_attention_heads") or 0
        for size in sorted({one.size for one in model.groups if not _cuts_otherwise(config, one)}):
            if heads % size:
                yield (
                    f"engine_models {model.name}: engines of {size} GPUs cannot share the {heads} attention heads of "
                    f"{model.model_path} evenly; accepted is a number of GPUs that divides them"
                )


def _cuts_otherwise(config: RunConfig, group: EngineGroup) -> bool:
    return any(name in CUT_OTHERWISE for name, _ in (*config.sglang.given, *group.overrides))


def _overrides_are_flags(config: RunConfig) -> Iterator[str]:
    for where, group in _all_groups(config):
        for name, value in group.overrides:
            found = find_key("sglang", name)
            if found is None:
                yield f"{where}: overrides {name}: SGLang has no such flag{nearest(name, rows_by_name())}"
            elif isinstance(found, Refusal):
                yield f"{where}: overrides {found.message}"
            else:
                try:
                    found.read_python(value)
                except ValueError as error:
                    yield f"{where}: overrides {name}: {error}"


def _prefill_meets_decode(config: RunConfig) -> Iterator[str]:
    yield from _halves(config.engine.engine_groups, "engine_groups")
    for model in config.engine.engine_models:
        yield from _halves(model.engine_groups, f"engine_models {model.name}")


def _halves(groups: Sequence[EngineGroup], where: str) -> Iterator[str]:
    kinds = {group.worker_type for group in groups}
    if kinds and kinds != {"regular"} and kinds != {"prefill", "decode"}:
        yield (
            f"{where}: worker_type is {' and '.join(sorted(kinds))}; accepted: regular throughout, or both prefill and "
            "decode and nothing else, because each computes half of a request"
        )


def _prefill_leaves_some_to_decode(config: RunConfig) -> Iterator[str]:
    prefill = config.engine.prefill_num_servers
    engines = config.cluster.rollout_num_gpus // config.cluster.rollout_num_gpus_per_engine
    if prefill is not None and not config.engine.engine_groups and prefill >= engines:
        yield (
            f"prefill_num_servers = {prefill} of rollout_num_gpus / rollout_num_gpus_per_engine = {engines} engines "
            f"leaves none to decode; give at most {engines - 1}"
        )


def _halves_have_gpus(config: RunConfig) -> Iterator[str]:
    split = [where for where, group in _all_groups(config) if group.worker_type != "regular"]
    if config.engine.prefill_num_servers is not None:
        split.insert(0, "prefill_num_servers")
    if split and config.cluster.device == "cpu":
        yield (
            f"{split[0]}: separate prefill and decode engines send the KV cache from GPU to GPU, but device = cpu; "
            "leave it out, or run on GPUs"
        )


def _drafts_have_gpus(config: RunConfig) -> Iterator[str]:
    given = [("sglang", config.sglang.given), *((where, group.overrides) for where, group in _all_groups(config))]
    where = next((where for where, flags in given if speculates(flags)), None)
    if where is not None and config.cluster.device == "cpu":
        yield (
            f"{where}: speculative_algorithm needs compiled kernels that SGLang has for GPUs only (its CPU server "
            "fails in copy_all_layer_kv_cache_cpu), but device = cpu; leave it out, or run on GPUs"
        )


def _others_engines_hold_others_weights(config: RunConfig) -> Iterator[str]:
    if config.engine.rollout_external_engine_addrs:
        yield (
            "rollout_external_engine_addrs: an evaluation publishes no weights, and the weights of external engines "
            "are unknown; leave it out, so that the evaluation starts engines with its weights"
        )


def _external_engines_have_flags_of_their_own(config: RunConfig) -> Iterator[str]:
    if config.engine.rollout_external_engine_addrs:
        for name, _ in config.sglang.given:
            yield (
                f"sglang.{name} has no effect with rollout_external_engine_addrs, because the run does not start those "
                "engines; start the engines with this flag, and leave it out here"
            )


def _others_routers_choose_themselves(config: RunConfig) -> Iterator[str]:
    if config.engine.sglang_router_ip is not None and config.splits_prefill:
        yield (
            "sglang_router_ip with separate prefill and decode engines: a router learns the role of each engine when "
            "it starts, and an external router has started already. Leave --sglang-router-ip out, or "
            "--prefill-num-servers and worker_type"
        )


def _uneven_groups(groups: Sequence[EngineGroup], each: int, where: str) -> Iterator[str]:
    for number, group in enumerate(groups):
        size = group.num_gpus_per_engine or each
        if group.num_gpus % size:
            yield (
                f"{where}: group {number} has num_gpus = {group.num_gpus}, no multiple of num_gpus_per_engine = {size};"
                " change one"
            )


def _sum(groups: Sequence[EngineGroup]) -> str:
    sizes = [group.num_gpus for group in groups]
    return f"{' + '.join(map(str, sizes))} = {sum(sizes)}" if len(sizes) > 1 else str(sizes[0])


def _all_groups(config: RunConfig) -> Iterator[tuple[str, EngineGroup]]:
    yield from ((f"engine_groups: group {number}", group) for number, group in enumerate(config.engine.engine_groups))
    for model in config.engine.engine_models:
        yield from ((f"engine_models {model.name}", group) for group in model.groups)


def _recomputes_by_layers(config: RunConfig) -> Iterator[str]:
    """Megatron-core 0.16's loop over chunks of layers does not end for 0, and steps over the end of a stage
    (transformer/transformer_block.py, ``_checkpointed_forward``)."""
    given = dict(config.megatron.given)
    number = given.get("recompute_num_layers")
    if not isinstance(number, int) or given.get("recompute_granularity") != "full":
        return
    if number < 1:
        yield f"megatron.recompute_num_layers = {number}; accepted: at least 1"
        return
    layers = whole_number(start_weights(config), "num_hidden_layers")
    if given.get("recompute_method") != "uniform" or layers is None:
        return
    parallel = config.parallel
    chunks = parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    sizes = {layers // chunks + (place < layers % chunks) for place in range(chunks)}
    if any(size % number for size in sizes):
        held = " and ".join(map(str, sorted(sizes)))
        yield (
            f"megatron.recompute_num_layers = {number} with recompute_method = uniform does not divide the {held} "
            f"layers that a rank holds of num_hidden_layers = {layers}; choose a divisor, or recompute_method block"
        )


def _has_no_such_rate(config: RunConfig) -> Iterator[str]:
    given = dict(config.megatron.given)
    for name in ("decoupled_lr", "decoupled_min_lr"):
        rate = given.get(name)
        if isinstance(rate, float) and not 0 <= rate < math.inf:
            yield f"megatron.{name} = {rate}; accepted: a finite number of at least 0"
    share = given.get("optimizer_offload_fraction")
    if isinstance(share, float) and not 0 <= share <= 1:
        yield f"megatron.optimizer_offload_fraction = {share}; accepted: 0 to 1"


def _copies_need_attention(config: RunConfig) -> Iterator[str]:
    given = dict(config.sglang.given)
    if given.get("dp_size", 1) != 1 and not given.get("enable_dp_attention"):
        size = given["dp_size"]
        yield (
            f"sglang.dp_size = {size} copies of an engine would need more devices than rollout_num_gpus_per_engine; "
            "add --sglang-enable-dp-attention, or raise --rollout-num-gpus for more engines"
        )


SERVING: tuple[Rule, ...] = (
    _engines_fill_their_gpus,
    _models_fill_their_gpus,
    _models_are_there,
    _models_have_names_of_their_own,
    _models_share_their_heads_evenly,
    _overrides_are_flags,
    _prefill_meets_decode,
    _prefill_leaves_some_to_decode,
    _halves_have_gpus,
    _drafts_have_gpus,
    _others_routers_choose_themselves,
    _recomputes_by_layers,
    _has_no_such_rate,
    _copies_need_attention,
)

SERVING_OF_RUN: tuple[Rule, ...] = (_external_engines_have_flags_of_their_own,)

SERVING_OF_EVAL: tuple[Rule, ...] = (_others_engines_hold_others_weights,)
