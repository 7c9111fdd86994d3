"""The rules for the engines' own flags: what is fixed here, what the checkpoint says, what needs something else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.config.described import start_weights, whole_number
from slime_core.config.embedded import ARITHMETIC
from slime_core.config.engine_flags import said
from slime_core.config.megatron_flags import MegatronFlag, megatron_flags
from slime_core.config.mistakes import Mistake
from slime_core.config.model_args import expected
from slime_core.config.schema import RunConfig
from slime_core.config.section import Value

__all__ = ["mistakes"]


def mistakes(config: RunConfig, *, broken: frozenset[str] = frozenset()) -> list[Mistake]:
    """Every rule that ``[megatron]`` and ``[sglang]`` break.

    Arguments:
        broken: keys of settings whose value is not what the user meant, such as ``megatron.decoupled_lr``.
    """
    given = dict(config.megatron.given)
    found = [*_other_than_fixed(given), *_sets_twice(given)]
    if "hf_checkpoint" not in broken:
        found += _other_than_the_model(given, config)
    if not any(key.startswith("megatron.") for key in broken):
        found += [*_recomputes_nothing(given), *_recomputes_by_layers(given, config)]
        found += [*_ends_what_begins_not(given), *_has_no_such_rate(given)]
    if not any(key.startswith("sglang.") for key in broken):
        found += _copies_need_attention(dict(config.sglang.given))
    return list(map(Mistake, found))


def _flags(given: Mapping[str, Value], verdict: str) -> Iterator[tuple[MegatronFlag, Value]]:
    for name, value in given.items():
        if megatron_flags()[name].verdict == verdict:
            yield megatron_flags()[name], value


def _other_than_fixed(given: Mapping[str, Value]) -> Iterator[str]:
    for flag, value in _flags(given, "fixed"):
        if value != flag.value:
            always = f"here it is always {said(flag.value)}: {flag.text}"
            yield f"megatron.{flag.name} = {said(value)}, but {always}; leave it out"


def _other_than_the_model(given: Mapping[str, Value], config: RunConfig) -> Iterator[str]:
    file = (config.model.hf_checkpoint or ARITHMETIC / "model") / "config.json"
    described: Any = None
    for flag, value in _flags(given, "agrees"):
        described = _read(file) if described is None else described
        if not described:  # another rule reports a checkpoint without it
            return
        told = expected(flag.name, value, described)
        if told != value:
            says = "tells nothing of it" if told is None else f"says {said(told)}"
            yield f"megatron.{flag.name} = {said(value)}, but {file} {says}; the checkpoint decides, so leave it out"


def _read(file: Any) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _sets_twice(given: Mapping[str, Value]) -> Iterator[str]:
    wanted = given.get("recompute_granularity")
    if given.get("recompute_activations") and wanted not in (None, "selective"):
        yield f"megatron.recompute_activations means selective, but recompute_granularity = {wanted}; leave one out"


def _recomputes_nothing(given: Mapping[str, Value]) -> Iterator[str]:
    """Megatron fails on these only when the model is built, or not at all."""
    granularity = given.get("recompute_granularity") or ("selective" if given.get("recompute_activations") else None)
    of_layers = {"recompute_method", "recompute_num_layers"}
    if granularity == "full" and of_layers - given.keys():
        missing = " and ".join(sorted(of_layers - given.keys()))
        yield f"megatron.recompute_granularity = full also needs {missing}"
    for name in sorted(given.keys() & of_layers if granularity != "full" else ()):
        yield f"megatron.{name} has no effect without recompute_granularity = full"
    if "recompute_modules" in given and granularity != "selective":
        yield "megatron.recompute_modules has no effect without recompute_granularity = selective"


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


def _ends_what_begins_not(given: Mapping[str, Value]) -> Iterator[str]:
    if "decoupled_min_lr" in given and "decoupled_lr" not in given:
        yield "megatron.decoupled_min_lr has no effect without decoupled_lr"


def _copies_need_attention(given: Mapping[str, Value]) -> Iterator[str]:
    if given.get("dp_size", 1) != 1 and not given.get("enable_dp_attention"):
        size = given["dp_size"]
        yield (
            f"sglang.dp_size = {size} copies of an engine would need more devices than rollout_num_gpus_per_engine; "
            "add --sglang-enable-dp-attention, or raise --rollout-num-gpus for more engines"
        )
