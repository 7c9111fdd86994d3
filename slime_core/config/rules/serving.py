"""The rules of engines: groups and models add up, prefill meets decode, others' engines are only used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from slime_core.config.described import described, whole_number
from slime_core.config.engine_flags import Refusal, find_key
from slime_core.config.mistakes import nearest
from slime_core.config.rules.layout import Rule
from slime_core.config.schema import RunConfig
from slime_core.config.serving import EngineGroup
from slime_core.config.sglang import rows_by_name, speculates

__all__ = ["SERVING", "SERVING_OF_EVAL", "SERVING_OF_RUN"]

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
TAKEN = frozenset({"engine", "eval", "eval-engine", "router"})
"""What the logs of other servers are called by."""

CUT_OTHERWISE = frozenset({"enable_dp_attention", "dp_size", "attn_cp_size"})
"""SGLang's flags by which attention is not cut over all processes of an engine."""


def _engines_fill_their_gpus(config: RunConfig) -> Iterator[str]:
    gpus, each = config.cluster.rollout_num_gpus, config.cluster.rollout_num_gpus_per_engine
    groups = config.engine.engine_groups
    if not groups:
        if gpus % each and not config.engine.rollout_external_engine_addrs:
            asked = f"rollout_num_gpus = {gpus} is no multiple of rollout_num_gpus_per_engine = {each}"
            yield f"{asked}; give {each} or a multiple"
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
        yield f"engine_models: {counts[name]} models are named {name!r}; functions ask by the name, each needs its own"


def _models_names_name_files(config: RunConfig) -> Iterator[str]:
    for name in (model.name for model in config.engine.engine_models):
        if not FILE_NAME.fullmatch(name) or name in TAKEN:
            yield (
                f"engine_models: name = {name!r}; logs are called by it: accepted are letters, digits, dot, - and _, a "
                f"letter or digit first, and none of {', '.join(sorted(TAKEN))}"
            )


def _models_share_their_heads_evenly(config: RunConfig) -> Iterator[str]:
    """The models beside the policy; where SGLang cuts attention otherwise than over all processes, that is its own to
    say."""
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
            "decode and nothing else, because each does half of a request"
        )


def _prefill_leaves_some_to_decode(config: RunConfig) -> Iterator[str]:
    prefill = config.engine.prefill_num_servers
    if prefill is None:
        return
    engines = config.cluster.rollout_num_gpus // config.cluster.rollout_num_gpus_per_engine
    if not config.engine.engine_groups and prefill >= engines:
        yield (
            f"prefill_num_servers = {prefill} of rollout_num_gpus / rollout_num_gpus_per_engine = {engines} engines "
            "leaves none to decode; give at most all but one"
        )


def _halves_have_gpus(config: RunConfig) -> Iterator[str]:
    split = [where for where, group in _all_groups(config) if group.worker_type != "regular"]
    if config.engine.prefill_num_servers is not None:
        split.insert(0, "prefill_num_servers")
    if split and config.cluster.device == "cpu":
        yield (
            f"{split[0]}: prefill and decode apart hand the cache from GPU to GPU, and device = cpu; leave it out, or "
            "run on GPUs"
        )


def _drafts_have_gpus(config: RunConfig) -> Iterator[str]:
    given = [("sglang", config.sglang.given), *((where, group.overrides) for where, group in _all_groups(config))]
    where = next((where for where, flags in given if speculates(flags)), None)
    if where is not None and config.cluster.device == "cpu":
        yield (
            f"{where}: speculative_algorithm needs compiled kernels that SGLang has for GPUs only (its CPU server ends "
            "in copy_all_layer_kv_cache_cpu), and device = cpu; leave it out, or run on GPUs"
        )


def _addresses_are_addresses(config: RunConfig) -> Iterator[str]:
    found = config.engine.rollout_external_engine_addrs
    for address in found:
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536) or "/" in address:
            yield f"rollout_external_engine_addrs: {address!r} is no host:port; accepted is 10.0.0.7:30000, for one"
    for address in (one for one, count in Counter(found).items() if count > 1):
        yield f"rollout_external_engine_addrs: {address} is named twice; name each engine once"


def _others_engines_hold_others_weights(config: RunConfig) -> Iterator[str]:
    if config.engine.rollout_external_engine_addrs:
        yield (
            "rollout_external_engine_addrs: an evaluation publishes no weights, and what others' engines hold is not "
            "known; leave it out, so that engines are started with the weights in question"
        )


def _external_engines_have_flags_of_their_own(config: RunConfig) -> Iterator[str]:
    if config.engine.rollout_external_engine_addrs:
        for name, _ in config.sglang.given:
            yield (
                f"sglang.{name} has no effect with rollout_external_engine_addrs, because the run does not start those "
                "engines; start them with what you need, and leave it out"
            )


def _others_routers_choose_themselves(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if engine.sglang_router_ip is None:
        return
    if config.splits_prefill:
        yield (
            "sglang_router_ip with prefill and decode apart: which engine does which is said when a router starts; "
            "leave one out"
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


_GPUS = "rollout_num_gpus rollout_num_gpus_per_engine"
_EXTERNAL = "rollout_external_engine_addrs"

SERVING: dict[Rule, str] = {
    _engines_fill_their_gpus: f"{_GPUS} engine_groups {_EXTERNAL}",
    _models_fill_their_gpus: "engine_models",
    _models_are_there: "engine_models",
    _models_have_names_of_their_own: "engine_models",
    _models_names_name_files: "engine_models",
    _models_share_their_heads_evenly: "engine_models",
    _overrides_are_flags: "engine_groups engine_models",
    _prefill_meets_decode: "engine_groups engine_models",
    _prefill_leaves_some_to_decode: f"prefill_num_servers engine_groups {_GPUS}",
    _halves_have_gpus: "prefill_num_servers engine_groups engine_models device",
    _drafts_have_gpus: "engine_groups engine_models device",
    _others_routers_choose_themselves: (
        f"sglang_router_ip prefill_num_servers engine_groups {_GPUS} {_EXTERNAL} "
        "debug_train_only load_debug_rollout_data"
    ),
}

SERVING_OF_RUN: dict[Rule, str] = {
    _addresses_are_addresses: _EXTERNAL,
    _external_engines_have_flags_of_their_own: _EXTERNAL,
}

SERVING_OF_EVAL: dict[Rule, str] = {_others_engines_hold_others_weights: _EXTERNAL}
"""Rule -> the settings it reads."""
