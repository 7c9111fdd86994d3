"""Section [engine]: the SGLang servers of the policy and of auxiliary models."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from slime_core.config.options import Conflicts, Needs
from slime_core.config.section import (
    Count,
    CountOrZero,
    Distinct,
    Name,
    Positive,
    PositiveOrZero,
    Section,
    Value,
    rejected,
)
from slime_core.errors import ConfigError

WorkerType = Literal["regular", "prefill", "decode"]
"""The part of a request that an engine computes."""

RouterPolicy = Literal[
    "cache_aware", "consistent_hashing", "manual", "power_of_two", "prefix_hash", "random", "round_robin"
]
"""Policies by which sglang-router 0.3.2 chooses an engine."""


Dtype = Literal["auto", "bfloat16", "float16", "float32"]
"""Dtypes of an engine, by SGLang's names."""


def _pairs(value: Any) -> Any:
    """A table as pairs of a name and a value, which can be hashed."""
    found = value.items() if isinstance(value, Mapping) else value
    return tuple(map(_pairs, found)) if isinstance(found, list | tuple | ItemsView) else found


Overrides = Annotated[tuple[tuple[str, Value], ...], BeforeValidator(_pairs)]
"""SGLang's flags for some engines only, by SGLang's names; in a file a table."""


class EngineGroup(Section):
    """Engines with the same settings.

    Example, two engines of two GPUs each: ``EngineGroup(num_gpus=4, num_gpus_per_engine=2)``.
    """

    num_gpus: Count
    """GPUs of the group; on a CPU, server processes."""
    num_gpus_per_engine: Count | None = None
    """GPUs per engine. None: as its model says, or rollout_num_gpus_per_engine."""
    worker_type: WorkerType = "regular"
    """regular: whole requests. prefill: only prompts. decode: only what follows."""
    overrides: Overrides = ()
    """SGLang's flags for these engines, by SGLang's names; they win over [sglang]."""

    @property
    def size(self) -> int:
        """GPUs of one engine."""
        return self.num_gpus_per_engine or 1

    @property
    def num_engines(self) -> int:
        """Engines of the group."""
        return self.num_gpus // self.size


LOG_NAMES = frozenset({"engine", "eval", "eval-engine", "router"})
"""Log files of the run's other servers."""


def _model_name(name: str) -> str:
    if name in LOG_NAMES or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise PydanticCustomError(
            "log_name",
            "{text}",
            {"text": "log files carry it: letters, digits, . _ - only, and none of " + ", ".join(sorted(LOG_NAMES))},
        )
    return name


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536) or "/" in text:
        raise rejected(f"found {text!r}; accepted: HOST:PORT, as 10.0.0.7:30000")
    return text


Address = Annotated[Name, AfterValidator(_address)]
"""An address as ``host:port``."""


class EngineModel(Section):
    """An auxiliary model: served, never trained.

    Example: ``EngineModel(name="judge", model_path=Path("Qwen3-8B"), num_gpus=2, num_gpus_per_engine=2)``.
    """

    name: Annotated[Name, AfterValidator(_model_name)]
    """Name under which functions and reward models find it."""
    model_path: Path
    """Hugging Face folder with weights and tokenizer."""
    num_gpus: Count | None = None
    """GPUs of all its engines, in addition to the policy's. None: the sum of its groups, or 1."""
    num_gpus_per_engine: Count | None = None
    """GPUs per engine. None: 1."""
    is_embedding: bool = False
    """Serve scores or embeddings instead of text, as a reward model does."""
    dtype: Dtype | None = None
    """Type of weights and computation; auto takes that of the model's folder. None: the policy's (bf16)."""
    overrides: Overrides = ()
    """SGLang's flags for this model's engines; they win over [sglang]."""
    engine_groups: tuple[EngineGroup, ...] = ()
    """Groups of its engines. Empty: one."""

    @property
    def groups(self) -> tuple[EngineGroup, ...]:
        """Every group with the size of its engines and the model's flags resolved."""
        each = self.num_gpus_per_engine or 1
        stated = self.engine_groups or (EngineGroup(num_gpus=self.num_gpus or each),)
        return tuple(_resolved(group, each, self.overrides) for group in stated)


class EngineConfig(Section):
    """The SGLang servers."""

    sglang_mem_fraction_static: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of an engine's memory for weights and KV cache. None: SGLang decides."""
    sglang_context_length: Count | None = None
    """Maximum tokens of prompt plus response. None: as the model's config.json says."""
    engine_start_timeout_s: Positive = 300.0
    """Seconds until a starting engine must answer."""
    use_fault_tolerance: Annotated[
        bool | None,
        Conflicts(
            "colocate", when=True, because="a starting engine would take memory that the learner holds; it ends the run"
        ),
        Conflicts("rollout_external_engine_addrs", when=True, because="the run does not start those engines"),
        Conflicts(
            "use_rollout_routing_replay",
            when=True,
            because="requests bypass the router there, so a starting engine would get some before its weights",
        ),
    ] = None
    """Start engines and the router again when they die or hang; False: that ends the run. None: with two engines or
    more."""
    engine_max_restarts: CountOrZero = 3
    """Restarts of one engine, or of the router, within an hour, after which its next failure ends the run."""
    rollout_health_check_interval: Positive = 10.0
    """Seconds between two probes of an engine."""
    rollout_health_check_timeout: Positive = 15.0
    """Seconds that an engine's scheduler has to answer one probe; after three failed ones in a row it hangs."""
    rollout_health_check_first_wait: PositiveOrZero = 0.0
    """Seconds from an engine's start to its first probe; raise it where its first requests compile kernels for long."""
    engine_groups: tuple[EngineGroup, ...] = ()
    """Groups of the policy's engines with settings of their own; together they have rollout_num_gpus. Empty: all alike.

    A file has one table [[engine.engine_groups]] a group: num_gpus, num_gpus_per_engine, worker_type, overrides.
    """
    engine_models: tuple[EngineModel, ...] = ()
    """Auxiliary models with their own engines and GPUs: a judge, a reward model. Empty: none.

    A file has one table [[engine.engine_models]] a model: name, model_path, num_gpus, num_gpus_per_engine,
    is_embedding, dtype, overrides, engine_groups.
    """
    prefill_num_servers: Annotated[
        Count | None, Conflicts("engine_groups", because="both set which engines only prefill")
    ] = None
    """Number of engines that only prefill; the others only decode. Needs GPUs. None: all do both."""
    rollout_external_engine_addrs: Annotated[
        tuple[Address, ...],
        Distinct,
        Conflicts(
            "engine_groups",
            "prefill_num_servers",
            "sglang_context_length",
            "sglang_mem_fraction_static",
            "colocate",
            because="the run does not start those engines",
        ),
        Conflicts("debug_rollout_only", because="no learner publishes weights to engines whose weights are unknown"),
    ] = ()
    """External engines that the run neither starts nor stops, as host:port. Empty: the run starts its own."""
    sglang_router_ip: Annotated[Name | None, Needs("sglang_router_port")] = None
    """Host of an external router. None: the run starts its own router."""
    sglang_router_port: Annotated[int | None, Field(ge=1, le=65535), Needs("sglang_router_ip")] = None
    """Port of the external router at sglang_router_ip. None: the run starts its own router."""
    sglang_router_policy: Annotated[
        RouterPolicy, Conflicts("sglang_router_ip", because="an external router has its own policy")
    ] = "cache_aware"
    """How the router chooses an engine; consistent_hashing and manual keep a sample's session_id with one engine."""

    def groups(self, *, num_gpus: int, num_gpus_per_engine: int) -> tuple[EngineGroup, ...]:
        """Groups of the policy's engines, the size of each resolved, prefill before decode.

        Arguments:
            num_gpus: of all of them together, where no group says its own.
            num_gpus_per_engine: of an engine whose group does not say.
        """
        stated = self.engine_groups or self._unstated(num_gpus, num_gpus_per_engine)
        return tuple(_resolved(group, num_gpus_per_engine, ()) for group in stated)

    def _unstated(self, num_gpus: int, each: int) -> tuple[EngineGroup, ...]:
        if self.prefill_num_servers is None:
            return (EngineGroup(num_gpus=num_gpus),)
        prefill = self.prefill_num_servers * each
        # A rule refuses what leaves nothing for decoding; it still has to be representable.
        decode = max(each, num_gpus - prefill)
        return EngineGroup(num_gpus=prefill, worker_type="prefill"), EngineGroup(num_gpus=decode, worker_type="decode")


def _resolved(group: EngineGroup, each: int, overrides: tuple[tuple[str, Value], ...]) -> EngineGroup:
    merged = tuple(sorted({**dict(overrides), **dict(group.overrides)}.items()))
    return group.model_copy(
        update={"num_gpus_per_engine": group.num_gpus_per_engine or each, "overrides": merged},
    )


def model_url(models: Mapping[str, str], name: str, endpoint: str = "") -> str:
    """The address of model ``name``, followed by ``endpoint``.

    Example: ``model_url({"judge": "http://127.0.0.1:4000"}, "judge", "/generate")`` is
    ``"http://127.0.0.1:4000/generate"``.

    Arguments:
        models: name -> URL, as ``GenerateContext.models`` and ``SamplerSettings.model_urls`` hold it.

    Raises:
        ConfigError: the run serves no such model.
    """
    if name not in models:
        raise ConfigError(
            f"No auxiliary model is called {name!r}; the run serves: {', '.join(sorted(models)) or 'none'}. "
            "Add it as a table [[engine.engine_models]] with name and model_path."
        )
    return models[name].rstrip("/") + endpoint
