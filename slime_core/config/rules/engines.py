"""The rules of engines: groups and models add up, external engines are used as they are, and the engines' own flags
fit the checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from slime_core.config.engine_flags import Refusal, find_key
from slime_core.config.engine_sections import rows_by_name, speculates
from slime_core.config.model_config import described, start_weights, whole_number
from slime_core.config.rules import Rule
from slime_core.config.schema import RunConfig
from slime_core.config.section import Value
from slime_core.config.serving import EngineGroup
from slime_core.errors import nearest

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
    yield from _uneven(groups, each, "engine_groups")
    if sum(group.num_gpus for group in groups) != gpus:
        yield f"engine_groups have {_sum(groups)} GPUs, but rollout_num_gpus = {gpus}; make the two equal"


def _models_fill_their_gpus(config: RunConfig) -> Iterator[str]:
    for model in config.engine.engine_models:
        where, stated = f"engine_models {model.name}", model.engine_groups
        yield from _uneven(model.groups, 1, where)
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
    if prefill is None:
        return
    engines = config.cluster.rollout_num_gpus // config.cluster.rollout_num_gpus_per_engine
    if not config.engine.engine_groups and prefill >= engines:
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
    engine = config.engine
    if engine.sglang_router_ip is None:
        return
    if config.splits_prefill:
        yield (
            "sglang_router_ip with separate prefill and decode engines: a router learns the role of each engine when "
            "it starts, and an external router has started already. Leave --sglang-router-ip out, or "
            "--prefill-num-servers and worker_type"
        )


def _uneven(groups: Sequence[EngineGroup], each: int, where: str) -> Iterator[str]:
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


def _flags_of_engines_take_effect(config: RunConfig) -> Iterator[str]:
    given = dict(config.megatron.given)
    yield from _recomputes_by_layers(given, config)
    yield from _has_no_such_rate(given)
    yield from _copies_need_attention(dict(config.sglang.given))


def _recomputes_by_layers(given: Mapping[str, Value], config: RunConfig) -> Iterator[str]:
    """Megatron-core 0.16's loop over chunks of layers does not end for 0, and steps over the end of a stage
    (transformer/transformer_block.py, ``_checkpointed_forward``)."""
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


def _has_no_such_rate(given: Mapping[str, Value]) -> Iterator[str]:
    for name in ("decoupled_lr", "decoupled_min_lr"):
        rate = given.get(name)
        if isinstance(rate, float) and not 0 <= rate < math.inf:
            yield f"megatron.{name} = {rate}; accepted: a finite number of at least 0"
    share = given.get("optimizer_offload_fraction")
    if isinstance(share, float) and not 0 <= share <= 1:
        yield f"megatron.optimizer_offload_fraction = {share}; accepted: 0 to 1"


def _copies_need_attention(given: Mapping[str, Value]) -> Iterator[str]:
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
    _flags_of_engines_take_effect,
)

SERVING_OF_RUN: tuple[Rule, ...] = (_external_engines_have_flags_of_their_own,)

SERVING_OF_EVAL: tuple[Rule, ...] = (_others_engines_hold_others_weights,)
