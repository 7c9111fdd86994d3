"""Every inference server of a run: the engines of each model, and the router in front of them.

    policy       engines of one or several groups, or external ones, always with a router
    models       auxiliary models (reward models, judges), each with separate engines, and a router for several engines
    evaluating   engines that only evaluate the policy, without the policy's router

Engines are started by the run or external (:mod:`.external`); so is a router (:class:`~.engine.RouterClient`). A model
without a router has one engine, which gets the requests. All servers start in parallel; an engine is registered with
its router once it answers.

The settings of a run become the arguments of each engine and router here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from slime_core.config.engines import EngineGroup, EngineModel, server_arguments, speculates
from slime_core.config.model_config import described
from slime_core.config.schema import RunConfig
from slime_core.errors import EngineError, RemoteError, WaitTimeout, WeightSyncError
from slime_core.rollout.engines.actors import (
    EngineActor,
    RestartableServer,
    Restarts,
    RouterActor,
    ServerActor,
    start_engine,
    start_router,
)
from slime_core.rollout.engines.engine import EngineSettings, RouterClient, RouterSettings, Worker, start_limit_s
from slime_core.rollout.engines.external import ExternalWatcher, discover, require_eval_servers_reachable, start_watch
from slime_core.rollout.engines.server import HANG_LIMIT_S, HealthCheck
from slime_core.runtime.actors import ActorGroup, Call
from slime_core.runtime.machine import allocator_environment, cpu_threads, nccl_environment, openmp_environment
from slime_core.runtime.placement import ActorPlacement
from slime_core.runtime.waiting import Wait
from slime_core.runtime.waiting import wait as wait_for
from slime_core.untrusted import read_object
from slime_core.weights.engine_control import PauseMode
from slime_core.weights.hugging_face import INDEX, expected_specs, weight_map


@dataclass(frozen=True, slots=True)
class Site:
    """The node of servers, and the model that they serve.

    Arguments:
        model: Hugging Face folder of the policy.
        logs: folder of their logs.
        on_gpus: whether they compute on GPUs.
        placements: of the policy's engines, group by group.
        auxiliary_placements: of the auxiliary models' engines, model by model, group by group; then of those that only
            evaluate.
    """

    model: Path
    logs: Path
    on_gpus: bool
    placements: Sequence[ActorPlacement]
    auxiliary_placements: Sequence[ActorPlacement] = ()


def policy_engines(config: RunConfig, site: Site) -> list[EngineSettings]:
    """Return the settings of each engine of the policy that the run starts, group by group."""
    routes = ("--enable-return-routed-experts",) if config.learner.use_rollout_routing_replay else ()
    logits = ("--enable-fp32-lm-head",) if config.learner.fp32_lm_head else ()
    # Paused in place, engines keep KV entries of older weights; no other request may reuse them.
    no_prefix_cache = ("--disable-radix-cache",) if config.rollout.pause_generation_mode == "in_place" else ()
    most = masks_up_to(config)
    masks = (f"--sampling-mask-max-tokens={MASK_ROOM * most}",) if most else ()
    return _engines(
        config,
        site,
        config.engine_groups,
        name="engine",
        seed=config.run.seed,
        extra=(*routes, *logits, *no_prefix_cache, *masks),
        context_length=config.engine.sglang_context_length,
        releases_memory=config.cluster.colocate,
    )


def model_engines(config: RunConfig, site: Site, model: EngineModel) -> list[EngineSettings]:
    """Return the settings of each engine of an auxiliary model."""
    served = model.model_path
    if model.is_embedding:
        served = with_head_bias(served, site.logs.parent / "served" / model.name)
    extra = ("--is-embedding",) if model.is_embedding else ()
    dtype = {} if model.dtype is None else {"dtype": model.dtype}
    return _engines(
        config, site, model.groups, name=model.name, seed=0, extra=extra, is_policy=False, model=served, **dtype
    )


def _engines(
    config: RunConfig,
    site: Site,
    groups: Sequence[EngineGroup],
    *,
    name: str,
    seed: int,
    extra: tuple[str, ...] = (),
    is_policy: bool = True,
    **fields: Any,
) -> list[EngineSettings]:
    each = [group for group in groups for _ in range(group.num_engines)]
    start_s = start_limit_s(config.engine.engine_start_timeout_s, fields.get("model", site.model))
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
            threads=cpu_threads(),
            # The later of two arguments wins in SGLang's parser.
            extra=(
                *(_decode_graphs(config, group) if is_policy and site.on_gpus else ()),
                *config.sglang.arguments,
                *server_arguments(group.overrides),
                *extra,
            ),
            variables=(
                nccl_environment(config) | allocator_environment(config) if site.on_gpus else openmp_environment(config)
            ),
            start_timeout_s=start_s,
            health=replace(_health_check(config, group), first_answer_s=start_s if site.on_gpus else 0.0),
            worker_type=group.worker_type,
        )
        for number, group in enumerate(each)
    ]


DEFAULT_GRAPHS, MOST_GRAPHS, GRAPH_GPU_GIB = 256, 512, 60
"""Sequences of the largest decode graph: SGLang's default on GPUs from 60 GiB on, and the largest value of a
run, because SGLang reserves 2 MiB for each (sglang 0.5.23, srt/arg_groups/memory_hook.py:139 and :368)."""

GRAPH_FLAGS = frozenset(
    {"cuda_graph_config", "cuda_graph_max_bs_decode", "cuda_graph_bs_decode", "speculative_algorithm", "dp_size"}
)
"""Flags that set or change the sizes of decode graphs."""


def _decode_graphs(config: RunConfig, group: EngineGroup) -> tuple[str, ...]:
    """Return arguments for decode graphs as large as an engine's batches; without a graph, SGLang launches every kernel
    of a decode step separately."""
    flags = {**dict(config.sglang.given), **dict(group.overrides)}
    is_small = (config.cluster.gpu_memory_gib or GRAPH_GPU_GIB) < GRAPH_GPU_GIB
    if is_small or group.worker_type == "prefill" or GRAPH_FLAGS & flags.keys():
        return ()
    limit = flags.get("max_running_requests")
    sequences = min(config.rollout.sglang_server_concurrency, limit if isinstance(limit, int) else MOST_GRAPHS)
    largest = min(sequences, MOST_GRAPHS)
    return server_arguments((("cuda_graph_max_bs_decode", largest),)) if largest > DEFAULT_GRAPHS else ()


MOST_KEPT, MASK_ROOM = 256, 4
"""Largest top_k for which engines report the tokens that stay, and the factor by which a report may be longer: SGLang
ends a request with more, and tokens that are equally likely at the border all stay."""


def masks_up_to(config: RunConfig) -> int:
    """Return the largest top_k for which the policy's engines report the truncated-sampling mask, or 0 if requests read
    the likeliest tokens instead.

    Such requests bypass the router, which drops the field. So its policy must be the default, and engines must not be
    restarted, because requests could reach an engine without the learner's weights.
    """
    router, groups = config.engine, config.engine_groups
    flags = [{**dict(config.sglang.given), **dict(group.overrides)} for group in groups]
    can_report = bool(flags) and not any(speculates(group.items()) for group in flags)
    can_report &= not any("sampling_mask_max_tokens" in group for group in flags)
    can_report &= all(group.worker_type == "regular" for group in groups) and not config.restarts_engines
    can_report &= router.sglang_router_policy == "cache_aware" and router.sglang_router_ip is None
    return MOST_KEPT if can_report and config.rollout.truncates else 0


PROBES = 3
"""Unanswered probes in a row before an engine is restarted: a busy machine may lose one."""


def _health_check(config: RunConfig, group: EngineGroup) -> HealthCheck:
    """Return the probes of an engine; if its failure ends the run, with the limit of SGLang's watchdog."""
    engine = config.engine
    if not config.restarts_engines:
        limit_s = dict((*config.sglang.given, *group.overrides)).get("watchdog_timeout")
        if isinstance(limit_s, int | float):
            return HealthCheck(timeout_s=limit_s)
        return HealthCheck(timeout_s=HANG_LIMIT_S)
    return HealthCheck(
        interval_s=engine.rollout_health_check_interval,
        timeout_s=engine.rollout_health_check_timeout,
        probes=PROBES,
        first_wait_s=engine.rollout_health_check_first_wait,
    )


RANDOM_HEADS = frozenset({"Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification"})
"""Architectures whose head has a bias in SGLang and none in transformers."""

WEIGHT, BIAS = "score.weight", "score.bias"
ADDED = "model-score-bias.safetensors"


def with_head_bias(model: Path, folder: Path) -> Path:
    """Return ``model``, or ``folder`` with links to all its files and a bias of zero for the head.

    Arguments:
        model: Hugging Face folder of a reward model.
        folder: created if the head's bias would be random; must be visible on the nodes that serve the model.
    """
    architectures = (described(model) or {}).get("architectures") or []
    try:
        specs = expected_specs(model)
    except WeightSyncError:  # SGLang will report it
        return model
    if not RANDOM_HEADS.intersection(architectures) or WEIGHT not in specs or BIAS in specs:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    save_file({BIAS: np.zeros(specs[WEIGHT].shape[0], np.float32)}, folder / ADDED, metadata={"format": "pt"})
    _add_to_index(folder / INDEX)
    return folder


def _add_to_index(index: Path) -> None:
    """Add the file to the index; without an index, SGLang reads every file."""
    if index.exists():
        content = read_object(index) | {"weight_map": weight_map(index) | {BIAS: ADDED}}
        index.unlink()  # a link to the checkpoint's index
        index.write_text(json.dumps(content, indent=2), encoding="utf-8")


LAUNCH_S = 60.0
"""Seconds for the actor of a server to start."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """Waits for the servers of a run and detects their death.

    Arguments:
        wait: waits for calls, under the run's limits.
        monitors: background calls whose failure ends any wait; each started server adds a call.
        reachable: whether other nodes must reach the servers.
        restarts: replaces servers that fail. None: a failure ends the run.
    """

    wait: Wait
    monitors: list[Call[object]]
    reachable: bool = False
    restarts: Restarts | None = None


class ModelServers:
    """Starts the servers of one model, and returns their addresses.

    Arguments:
        name: for messages about waiting: ``"the engines"``.
        settings: one for each engine to start. Without any, and without ``others``, the model is not served.
        placements: one for each of these engines.
        watch: waits for them.
        router: settings of a router to start, or the URL of an external one. None: requests go to the engine directly.
        others: external engines.
        is_trained: the engines get the learner's weights.

    Attributes:
        placements: of the engines that were started here.
        ranks: number of processes of each engine, in the order of :meth:`urls`.
    """

    def __init__(
        self,
        name: str,
        settings: Sequence[EngineSettings],
        placements: Sequence[ActorPlacement],
        watch: Supervision,
        *,
        router: RouterSettings | str | None = None,
        others: Sequence[Worker] = (),
        is_trained: bool = False,
    ) -> None:
        self._name = name
        self._watch = watch
        self.placements = placements
        self._settings = settings
        self._others = others
        self.ranks = (*(engine.tensor_parallel for engine in settings), *(worker.ranks for worker in others))
        self._engines = [
            RestartableServer(
                engine.name,
                launch=partial(start_engine, engine, placement=placement, reachable=watch.reachable),
                leave=partial(self._remove, number),
                join=partial(self._add_engine, number),
                needs_weights=is_trained,
            )
            for number, (engine, placement) in enumerate(zip(settings, placements, strict=True))
        ]
        self._router = self._make_router(router) if isinstance(router, RouterSettings) else None
        self._client = RouterClient(router) if isinstance(router, str) else None
        # A server that dies while the run waits for something else ends that wait.
        watch.monitors.extend(server.start() for server in self._started)
        self._registered: dict[str, Worker] = {}
        self._is_registered = False

    def _make_router(self, settings: RouterSettings) -> RestartableServer[RouterActor]:
        return RestartableServer(
            settings.log_file.stem,
            launch=partial(start_router, settings, reachable=self._watch.reachable),
            leave=lambda: None,
            join=lambda: self._add(self._registered.values()),
        )

    @property
    def _started(self) -> list[RestartableServer[Any]]:
        return [*self._engines, *([self._router] if self._router else [])]

    @property
    def engines(self) -> ActorGroup[EngineActor]:
        """Actors of the started engines."""
        return ActorGroup(tuple(server.actor for server in self._engines))

    @property
    def starts(self) -> list[Call[str]]:
        """The pending calls that start these engines."""
        return [server.starting for server in self._engines if server.starting is not None]

    # --- Addresses ---------------------------------------------------------------------------------------------------

    def urls(self) -> list[str]:
        """Return the URL of each engine; waits until they have started."""
        self._wait_started(self._engines, what=self._name)
        return [*(server.url for server in self._engines), *(worker.url for worker in self._others)]

    def url(self) -> str:
        """Return the URL of the router or of the only engine, empty if the model is not served; waits for its start."""
        if self._client is None and self._router is not None:
            self._wait_started([self._router], what="the router")
            self._client = RouterClient(self._router.url)
            self._watch_servers([self._router])
        return "".join(self.urls()[:1]) if self._client is None else self._client.url

    def _wait_started(self, servers: Sequence[RestartableServer[Any]], *, what: str) -> None:
        starts = [server.starting for server in servers if server.starting is not None and not server.url]
        if starts:
            # The limits of servers grow with their weights.
            limits_s = (settings.start_timeout_s or 0.0 for settings in self._settings)
            at_least_s = max(limits_s, default=0.0) + LAUNCH_S
            urls = self._watch.wait(starts, what=f"{what} to start", at_least_s=at_least_s)
            for server, url in zip(servers, urls, strict=True):
                server.url = url

    def ready_url(self) -> str:
        """Return the URL for requests; waits until the engines answer."""
        self.register()
        return self.url()

    def register(self) -> None:
        """Watch the engines that have started, and register them with the router; later calls do nothing.

        The router accepts only engines that are not paused, so colocated engines register before they pause.
        """
        if self._is_registered:
            return
        self._is_registered = True
        self.url()
        self.urls()
        self._watch_servers(self._engines)
        if self._others:
            self._watch.monitors.append(
                start_watch([worker.url for worker in self._others]).start(ExternalWatcher.watch)
            )
        if self._client is not None:
            self._add([*map(self._worker, range(len(self._engines))), *self._others])
            self._client.wait_registered(self._registered)

    def _watch_servers(self, servers: Sequence[RestartableServer[Any]]) -> None:
        for server in servers:
            if server.starting is not None:
                self._watch.monitors.remove(server.starting)
            if self._watch.restarts is None:
                self._watch.monitors.append(server.watch())
            else:
                self._watch.restarts.watch(server)

    # --- Restarts ----------------------------------------------------------------------------------------------------

    def _worker(self, number: int) -> Worker:
        """Return engine ``number`` for the router; a prefill engine sends its cache from another port after each
        start."""
        (port,) = wait_for([self._engines[number].actor.start(EngineActor.bootstrap_port)], what="a bootstrap port")
        return Worker(self._engines[number].url, self._settings[number].worker_type, port)

    def _add_engine(self, number: int) -> None:
        self._add([self._worker(number)])

    def _add(self, workers: Collection[Worker]) -> None:
        self._registered |= {worker.url: worker for worker in workers}
        if self._client is not None:
            with self._tolerating_restart():
                self._client.add(workers)

    def _remove(self, number: int) -> None:
        url = self._engines[number].url
        self._registered.pop(url, None)
        if self._client is not None:
            with self._tolerating_restart():
                self._client.remove(url)

    def _tolerating_restart(self) -> AbstractContextManager[None]:
        """Suppress errors of a router that the run started: after a restart it gets all registered engines again."""
        return nullcontext() if self._router is None else suppress(EngineError)

    # --- Control -----------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Stop generating."""
        self._watch.wait(self.engines.start(EngineActor.pause, mode), what="the engines to pause")

    def resume(self) -> None:
        """Generate again."""
        self._watch.wait(self.engines.start(EngineActor.resume), what="the engines to resume")

    def release_memory(self, *tags: str) -> None:
        """Free the device memory of ``tags``: ``weights``, ``kv_cache``."""
        calls = self.engines.start(EngineActor.release_memory, *tags)
        self._watch.wait(calls, what=f"the engines to free {' and '.join(tags)}")

    def resume_memory(self, *tags: str) -> None:
        """Allocate the memory of ``tags`` again."""
        calls = self.engines.start(EngineActor.resume_memory, *tags)
        self._watch.wait(calls, what=f"the engines to allocate {' and '.join(tags)}")

    def deregister(self) -> None:
        """Remove the run's engines from an external router.

        Raises:
            EngineError: the router does not answer, or refused.
        """
        if self._client is not None and self._router is None:
            self._client.deregister()

    def begin_stop(self) -> list[Call[None]]:
        """Stop every server that the run started, without waiting; external ones keep running."""
        return [server.actor.start(ServerActor.stop) for server in self._started]


STOP_LIMIT_S = 6.0
"""Seconds for servers to stop by themselves; Ctrl-C promises an end within ten."""


class EngineFleet:
    """Starts and stops all servers of a run.

    Arguments:
        config: the run's settings.
        site: their node.
        watch: waits for them.

    Attributes:
        policy, models, evaluating: see the module; a model that is not served has no engines.
    """

    def __init__(self, config: RunConfig, site: Site, watch: Supervision) -> None:
        self._config = config
        self._site = site
        self._watch = watch
        self.policy = ModelServers("the engines", [], [], self._watch)
        self.evaluating = ModelServers("the engines that only evaluate", [], [], self._watch)
        self.models: dict[str, ModelServers] = {}

    def start(self) -> None:
        """Start every engine and router.

        Raises:
            ConfigError: an external engine cannot serve this run, or no server listens at an address that an
                evaluation set names.
        """
        config, site = self._config, self._site
        sets = config.eval.eval_datasets
        require_eval_servers_reachable(
            {one.name: one.model for one in sets if one.model is not None and "/" in one.model}
        )
        addresses = config.engine.rollout_external_engine_addrs if config.debug.generates else ()
        others = discover(addresses, config, site.model) if addresses else []
        if not (config.engine_groups or others):
            return
        settings, engine = policy_engines(config, site), config.engine
        router: RouterSettings | str = self._router("router", (*settings, *others))
        if engine.sglang_router_ip is not None:
            router = f"http://{engine.sglang_router_ip}:{engine.sglang_router_port}"
        self.policy = ModelServers(
            "the engines", settings, site.placements, self._watch, router=router, others=others, is_trained=True
        )
        placements = iter(site.auxiliary_placements)
        for model in engine.engine_models:
            settings = model_engines(config, site, model)
            what = f"the engines of {model.name}"
            self.models[model.name] = self._auxiliary(what, model.name, settings, placements, self._watch)
        what = "the engines that only evaluate"
        settings = _engines(
            config,
            site,
            config.eval_groups,
            name="eval engine",
            seed=config.run.seed,
            context_length=config.engine.sglang_context_length,
        )
        # They hold the weights of one evaluation, which nobody publishes to them again while it lasts.
        self.evaluating = self._auxiliary(what, "eval", settings, placements, replace(self._watch, restarts=None))

    def stop(self) -> None:
        """Stop every server that the run started. External servers keep running; engines are removed from an external
        router."""
        with suppress(EngineError):
            self.policy.deregister()
        groups = (self.policy, *self.models.values(), self.evaluating)
        calls = [call for servers in groups for call in servers.begin_stop()]
        deadline_s = time.monotonic() + STOP_LIMIT_S
        for call in calls:  # one by one: one actor may be dead, and the others still have files to remove
            with suppress(WaitTimeout, RemoteError):
                wait_for([call], what="the engines to stop", fail_after_s=max(0.0, deadline_s - time.monotonic()))

    @property
    def serves_policy(self) -> bool:
        """True if the policy has engines."""
        return bool(self.policy.ranks)

    def model_urls(self) -> dict[str, str]:
        """Return name -> URL of every auxiliary model; waits until all answer."""
        return {name: model.ready_url() for name, model in self.models.items()}

    def direct_urls(self) -> tuple[str, ...]:
        """Return the URLs of the policy's engines if requests must bypass the router, which would drop
        ``return_routed_experts`` or ``return_sampling_mask``; waits until they have started. Empty otherwise."""
        is_direct = self._config.learner.use_rollout_routing_replay or masks_up_to(self._config)
        return tuple(self.policy.urls()) if is_direct else ()

    def first_answer_s(self) -> float:
        """Seconds for the first response of an engine on GPUs, which compiles kernels; 0: the engines are on CPUs."""
        if not self._site.on_gpus:
            return 0.0
        return start_limit_s(self._config.engine.engine_start_timeout_s, self._site.model)

    def _auxiliary(
        self,
        what: str,
        name: str,
        settings: Sequence[EngineSettings],
        placements: Iterator[ActorPlacement],
        watch: Supervision,
    ) -> ModelServers:
        router = self._router(f"router-{name}", settings) if len(settings) > 1 else None
        return ModelServers(what, settings, list(islice(placements, len(settings))), watch, router=router)

    def _router(self, log: str, engines: Sequence[EngineSettings | Worker]) -> RouterSettings:
        """Return the settings of a router with the log file ``log``.log."""
        return RouterSettings(
            log_file=self._site.logs / f"{log}.log",
            policy=self._config.engine.sglang_router_policy,
            splits_prefill=any(engine.worker_type != "regular" for engine in engines),
        )
