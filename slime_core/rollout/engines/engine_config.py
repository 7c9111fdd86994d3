"""Turns the settings of a run into the arguments of each engine and each router.

:func:`with_head_bias` works around a random bias in the head of some reward models. SGLang 0.5.23 builds these heads
with ``nn.Linear`` and its default bias (srt/models/qwen3_classification.py:136, qwen2_classification.py:46), which no
checkpoint has and ``load_weights`` never fills. So a server adds a random number to every score, another one at each
start, and two engines of one reward model disagree about the samples of one group. The engines therefore load a copy of
the checkpoint in which that bias is zero. Remove this when SGLang builds these heads without a bias.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slime_core.config.engine_sections import server_arguments
from slime_core.config.model_config import described
from slime_core.config.schema import RunConfig
from slime_core.config.serving import EngineGroup, EngineModel
from slime_core.rollout.engines.engine import EngineSettings
from slime_core.rollout.engines.router import RouterSettings
from slime_core.runtime.machine import cpu_threads
from slime_core.runtime.placement import Slot
from slime_core.untrusted import read_object
from slime_core.weights.specs import weight_map

__all__ = ["Site", "evaluating_engines", "model_engines", "policy_engines", "router_settings", "with_head_bias"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where servers run and what they serve.

    Arguments:
        model: Hugging Face folder of the policy.
        logs: folder of their logs.
        on_gpus: whether they compute on GPUs.
        reachable: whether other nodes have to reach them.
        slots: of the policy's engines, group by group.
        auxiliary_slots: of the auxiliary models' engines, model by model, group by group; then of those that only
            evaluate.
    """

    model: Path
    logs: Path
    on_gpus: bool
    reachable: bool
    slots: Sequence[Slot]
    auxiliary_slots: Sequence[Slot] = ()

    @property
    def threads(self) -> int:
        """CPU threads of one server."""
        return cpu_threads()


def policy_engines(config: RunConfig, site: Site) -> list[EngineSettings]:
    """Settings of each engine of the policy that the run starts, group by group."""
    routes = ("--enable-return-routed-experts",) if config.learner.use_rollout_routing_replay else ()
    # Paused in place, engines keep KV entries of older weights; no other request may reuse them.
    no_prefix_cache = ("--disable-radix-cache",) if config.rollout.pause_generation_mode == "in_place" else ()
    return _engines(
        config,
        site,
        config.engine_groups,
        name="engine",
        seed=config.run.seed,
        extra=(*routes, *no_prefix_cache),
        context_length=config.engine.sglang_context_length,
        gives_memory_away=config.cluster.colocate,
    )


def evaluating_engines(config: RunConfig, site: Site) -> list[EngineSettings]:
    """Settings of each engine that only evaluates the policy."""
    context_length = config.engine.sglang_context_length
    return _engines(
        config, site, config.eval_groups, name="eval engine", seed=config.run.seed, context_length=context_length
    )


def model_engines(config: RunConfig, site: Site, model: EngineModel) -> list[EngineSettings]:
    """Settings of each engine of an auxiliary model."""
    served = model.model_path
    if model.is_embedding:
        served = with_head_bias(served, site.logs.parent / "served" / model.name)
    extra = ("--is-embedding",) if model.is_embedding else ()
    own = {"model": served} if model.dtype is None else {"model": served, "dtype": model.dtype}
    return _engines(config, site, model.groups, name=model.name, seed=0, extra=extra, **own)


def router_settings(config: RunConfig, site: Site, log: str, *, splits_prefill: bool) -> RouterSettings:
    """Settings of a router whose log file is ``log``.log."""
    return RouterSettings(
        log_file=site.logs / f"{log}.log",
        policy=config.engine.sglang_router_policy,
        splits_prefill=splits_prefill,
    )


def _engines(
    config: RunConfig,
    site: Site,
    groups: Sequence[EngineGroup],
    *,
    name: str,
    seed: int,
    extra: tuple[str, ...] = (),
    **fields: Any,
) -> list[EngineSettings]:
    each = [group for group in groups for _ in range(group.num_engines)]
    return [
        EngineSettings(
            **{"model": site.model, "dtype": "bfloat16" if config.model.bf16 else "float32", **fields},
            log_file=site.logs / f"{name.replace(' ', '-')}-{number}.log",
            name=f"{name} {number}",
            seed=seed + number,
            device="cuda" if site.on_gpus else "cpu",
            mem_fraction=config.engine.sglang_mem_fraction_static,
            tensor_parallel=group.size,
            trust_remote_code=config.model.trust_remote_code,
            threads=site.threads,
            # The later of two arguments wins in SGLang's parser.
            extra=(*config.sglang.arguments, *server_arguments(group.overrides), *extra),
            start_timeout_s=config.engine.engine_start_timeout_s,
            worker_type=group.worker_type,
        )
        for number, group in enumerate(each)
    ]


RANDOM_HEADS = frozenset({"Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification"})
"""Architectures whose head has a bias in SGLang and none in transformers."""

WEIGHT, BIAS = "score.weight", "score.bias"
ADDED = "model-score-bias.safetensors"
INDEX = "model.safetensors.index.json"


def with_head_bias(model: Path, folder: Path) -> Path:
    """``model`` itself, or ``folder``, which then holds links to all its files, and a head's bias of zero.

    Arguments:
        model: Hugging Face folder of a reward model.
        folder: made where the head would be random; the nodes that serve the model must see it.
    """
    architectures = (described(model) or {}).get("architectures") or []
    files = _files_of(model)
    if not RANDOM_HEADS.intersection(architectures) or WEIGHT not in files or BIAS in files:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    save_file({BIAS: np.zeros(_num_labels(files[WEIGHT]), np.float32)}, folder / ADDED, metadata={"format": "pt"})
    _add_to_index(folder / INDEX)
    return folder


def _files_of(model: Path) -> dict[str, Path]:
    """Name of a weight -> its file; empty: there are none, or they cannot be read, which SGLang will report."""
    found: dict[str, Path] = {}
    for file in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as content:
                found |= dict.fromkeys(content.keys(), file)
        except (OSError, SafetensorError):
            return {}
    return found


def _num_labels(file: Path) -> int:
    with safe_open(file, framework="numpy") as content:
        rows, _ = content.get_slice(WEIGHT).get_shape()
    return int(rows)


def _add_to_index(index: Path) -> None:
    """Name the added file in the index; without an index, SGLang reads every file."""
    if index.exists():
        content = read_object(index) | {"weight_map": weight_map(index) | {BIAS: ADDED}}
        index.unlink()  # a link to the checkpoint's own
        index.write_text(json.dumps(content, indent=2), encoding="utf-8")
