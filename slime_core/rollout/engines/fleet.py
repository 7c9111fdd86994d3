"""Every inference server of a run: the policy's engines behind a router, and those of the models beside the policy.

    policy      engines of one or several groups, or engines that somebody else started (:mod:`.external`); one router
    a model     one engine, which is asked directly; or several, behind a router of their own
    evaluation  engines that only evaluate the policy, likewise; the policy's router does not know them

All of them are started side by side. A router takes its engines in when they answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from slime_core.cluster.actors import Actor, Call
from slime_core.cluster.placement import Slot
from slime_core.cluster.waiting import wait
from slime_core.config.schema import RunConfig
from slime_core.config.serving import EngineGroup, EngineModel
from slime_core.config.sglang import server_arguments
from slime_core.errors import EngineError, RemoteError, WaitTimeout
from slime_core.rollout.engines.engine import EngineSettings
from slime_core.rollout.engines.engine_actor import start_engine
from slime_core.rollout.engines.external import External, Needs, discover
from slime_core.rollout.engines.external_watch import start_watch
from slime_core.rollout.engines.heads import with_head_bias
from slime_core.rollout.engines.remote_router import RemoteRouter
from slime_core.rollout.engines.router import RouterSettings, Worker
from slime_core.rollout.engines.router_actor import start_router

__all__ = ["Servers", "Site"]

Wait = Callable[..., list[Any]]

EVALUATION = "eval"
"""Marks the servers that only evaluate, where others carry the name of a model."""

STOP_LIMIT_S = 6.0
"""Seconds for servers to stop by themselves; Ctrl-C promises an end within ten."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where servers run and what they serve.

    Arguments:
        model: Hugging Face folder of the policy.
        logs: folder of their logs.
        on_gpus: whether they compute on GPUs.
        reachable: whether other nodes have to reach them.
        slots: of the policy's engines, group after group.
        beside: of the models' engines, model after model, group after group; then of those that only evaluate.
    """

    model: Path
    logs: Path
    on_gpus: bool
    reachable: bool
    slots: Sequence[Slot]
    beside: Sequence[Slot] = ()

    @property
    def threads(self) -> int:
        """CPU threads of one server."""
        return len(os.sched_getaffinity(0))


class Servers:
    """Starts, introduces and stops them.

    Arguments:
        config: the run's settings.
        site: see there.
        wait: waits for calls under the run's watch.
        monitors: receives background calls whose failure ends any wait.
    """

    def __init__(self, config: RunConfig, site: Site, *, wait: Wait, monitors: list[Call]) -> None:
        self._config, self._site, self._wait, self._monitors = config, site, wait, monitors
        self._external: list[External] = []
        self._policy: _Served | None = None
        self._models: dict[str, _Served] = {}
        self._evaluating: _Served | None = None
        self._router_url = ""
        engine = config.engine
        self._remote = RemoteRouter(f"http://{engine.sglang_router_ip}:{engine.sglang_router_port}")
        self._urls: list[str] = []

    def start(self) -> None:
        """Begin to start every engine and router.

        Raises:
            ConfigError: an engine that somebody else started cannot serve this run.
        """
        config, site = self._config, self._site
        addresses = config.engine.rollout_external_engine_addrs if config.debug.generates else ()
        if addresses:
            self._external = discover(addresses, Needs.of(config, site.model))
        if not (config.engine_groups or self._external):
            return
        self._policy = self._serve("", self._policy_settings(), site.slots)
        slots = iter(site.beside)
        for model in config.engine.engine_models:
            settings = list(self._model_settings(model))
            self._models[model.name] = self._serve(model.name, settings, [next(slots) for _ in settings])
        if settings := self._eval_settings():
            self._evaluating = self._serve(EVALUATION, settings, [next(slots) for _ in settings])

    @property
    def are_there(self) -> bool:
        """Whether the policy is served at all."""
        return self._policy is not None

    @property
    def actors(self) -> list[Actor]:
        """Of the policy's engines that the run started."""
        return self._policy.engines if self._policy else []

    def stop(self) -> None:
        """Stop every server that the run started in its own time; those of others go on, and a router of somebody else
        knows the run's engines no more."""
        with suppress(EngineError):
            self._remote.leave()
        with suppress(WaitTimeout, RemoteError):
            wait(self._stopping(), what="the engines to stop", fail_after_s=STOP_LIMIT_S)

    def _stopping(self) -> list[Call]:
        routers = (one.router for one in self._all() if one.router is not None)
        return [actor.start("stop") for actor in chain((e for one in self._all() for e in one.engines), routers)]

    # --- For whoever shares devices with the policy's engines ---------------------------------------------------------

    def pause(self, mode: str) -> None:
        """They generate nothing from here on."""
        self._each("pause", mode, what="the engines to pause")

    def resume(self) -> None:
        """They generate again."""
        self._each("resume", what="the engines to go on")

    def release_memory(self, *tags: str) -> None:
        """They have given the memory of ``tags`` away."""
        self._each("release_memory", *tags, what=f"the engines to give {' and '.join(tags)} away")

    def resume_memory(self, *tags: str) -> None:
        """They have memory for ``tags`` again."""
        self._each("resume_memory", *tags, what=f"the engines to get {' and '.join(tags)} back")

    # --- Addresses ---------------------------------------------------------------------------------------------------

    def router_url(self) -> str:
        """Where requests for the policy go; waits for the router alone, not for the engines. Empty: none is there."""
        if self._policy is None:
            return ""
        if self._config.engine.sglang_router_ip is not None:
            return self._remote.url
        if not self._router_url:
            self._router_url = self._started_router(self._policy)
        return self._router_url

    def model_urls(self) -> dict[str, str]:
        """Name -> URL of every model beside the policy, all of which answer when this returns."""
        return {name: self._model_url(model) for name, model in self._models.items()}

    def eval_url(self) -> str:
        """Where engines that only evaluate answer, all of which do when this returns. Empty: there are none."""
        return "" if self._evaluating is None else self._model_url(self._evaluating)

    def calls(self) -> list[Call]:
        """The starts of the policy's engines, to be waited for together with others; each ends with a URL."""
        return self._policy.calls if self._policy else []

    def urls(self) -> list[str]:
        """Of all engines of the policy, which have started, or been found, when this returns."""
        if not self._urls and self._policy is not None:
            started = self._wait(self._policy.calls, what="the engines to start") if self._policy.calls else []
            self._urls = [*started, *(one.url for one in self._external)]
        return self._urls

    def asked_directly(self) -> tuple[str, ...]:
        """The engines to which requests do not go through the router, because it would lose what is asked of them;
        they have started when this returns. Empty: there are none."""
        return tuple(self.urls()) if self._config.learner.use_rollout_routing_replay else ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Processes of each engine of the policy, in the order of :meth:`urls`."""
        own = (group.size for group in self._config.engine_groups for _ in range(group.num_engines))
        return (*own, *(one.ranks for one in self._external))

    @property
    def eval_actors(self) -> list[Actor]:
        """Of the engines that only evaluate."""
        return self._evaluating.engines if self._evaluating else []

    def eval_urls(self) -> list[str]:
        """Of these engines, each of its own; they have started when this returns."""
        calls = self._evaluating.calls if self._evaluating else []
        return self._wait(calls, what="the engines that only evaluate to start") if calls else []

    @property
    def eval_ranks(self) -> tuple[int, ...]:
        """Processes of each of them, in the order of :meth:`eval_urls`."""
        return tuple(group.size for group in self._config.eval_groups for _ in range(group.num_engines))

    def take_in(self) -> None:
        """Engines that have started are watched, and the router sends them requests. It takes in only those that are
        not paused, so shared devices are left after this. Does it once."""
        if self._policy is None or self._policy.is_in:
            return
        self._introduce(self._policy, self.urls())
        if self._external:
            self._monitors.append(start_watch([one.url for one in self._external]).start("watch"))

    def _each(self, method: str, *arguments: str, what: str) -> None:
        self._wait([actor.start(method, *arguments) for actor in self.actors], what=what)

    # --- Parts -------------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[_Served]:
        yield from [self._policy] if self._policy is not None else []
        yield from self._models.values()
        yield from [self._evaluating] if self._evaluating is not None else []

    def _serve(self, name: str, settings: Sequence[EngineSettings], slots: Sequence[Slot]) -> _Served:
        reachable = self._site.reachable
        engines = [start_engine(one, slot=slot, reachable=reachable) for one, slot in zip(settings, slots, strict=True)]
        router = None
        if self._needs_router(name, len(engines)):
            router = start_router(self._router_settings(name, settings), reachable=reachable)
        served = _Served(engines, [engine.start("start") for engine in engines], router, list(settings))
        if router is not None:
            served.router_call = router.start("start")
        return served

    def _needs_router(self, name: str, engines: int) -> bool:
        return engines > 1 if name else self._config.engine.sglang_router_ip is None

    def _router_settings(self, name: str, settings: Sequence[EngineSettings]) -> RouterSettings:
        external = any(one.worker_type != "regular" for one in self._external) and not name
        return RouterSettings(
            log_file=self._site.logs / (f"router-{name}.log" if name else "router.log"),
            policy=self._config.engine.sglang_router_policy,
            splits_prefill=external or any(one.worker_type != "regular" for one in settings),
        )

    def _started_router(self, served: _Served) -> str:
        if served.router is None or served.router_call is None:
            return ""
        url: str = self._wait([served.router_call], what="the router to start")[0]
        self._monitors.append(served.router.start("watch"))
        return url

    def _model_url(self, model: _Served) -> str:
        urls: list[str] = self._wait(model.calls, what="the engines beside the policy's to start")
        url = self._started_router(model) or urls[0]
        if not model.is_in:
            self._introduce(model, urls)
        return url

    def _introduce(self, served: _Served, urls: Sequence[str]) -> None:
        served.is_in = True
        self._monitors += [engine.start("watch") for engine in served.engines]
        if served.router is None:
            if served is self._policy:
                self._remote.add(urls)
            return
        ports: list[int] = self._wait(
            [engine.start("bootstrap_port") for engine in served.engines], what="the engines' bootstrap ports"
        )
        kinds = [one.worker_type for one in served.settings]
        own = zip(urls, kinds, ports, strict=False)  # engines of others follow
        workers = [Worker(*each) for each in own]
        if served is self._policy:
            workers += [Worker(one.url, one.worker_type, one.bootstrap_port) for one in self._external]
        self._wait([served.router.start("add", workers)], what="the router to see the engines")

    def _policy_settings(self) -> list[EngineSettings]:
        config = self._config
        groups = [group for group in config.engine_groups for _ in range(group.num_engines)]
        routes = ("--enable-return-routed-experts",) if config.learner.use_rollout_routing_replay else ()
        # Paused in place, engines keep what old weights computed; no request may find that of another one.
        apart = ("--disable-radix-cache",) if config.rollout.pause_generation_mode == "in_place" else ()
        return [
            self._settings(
                group,
                name=f"engine {number}",
                seed=config.run.seed + number,
                context_length=config.engine.sglang_context_length,
                gives_memory_away=config.cluster.colocate,
                extra=(*routes, *apart),
            )
            for number, group in enumerate(groups)
        ]

    def _eval_settings(self) -> list[EngineSettings]:
        config = self._config
        groups = [group for group in config.eval_groups for _ in range(group.num_engines)]
        context, seed = config.engine.sglang_context_length, config.run.seed
        return [
            self._settings(group, name=f"eval engine {number}", seed=seed + number, context_length=context, extra=())
            for number, group in enumerate(groups)
        ]

    def _model_settings(self, model: EngineModel) -> Iterator[EngineSettings]:
        groups = (group for group in model.groups for _ in range(group.num_engines))
        served = model.model_path
        if model.is_embedding:
            served = with_head_bias(served, self._site.logs.parent / "served" / model.name)
        for number, group in enumerate(groups):
            extra = ("--is-embedding",) if model.is_embedding else ()
            yield self._settings(group, name=f"{model.name} {number}", seed=number, model=served, extra=extra)

    def _settings(self, group: EngineGroup, *, name: str, extra: tuple[str, ...], **fields: Any) -> EngineSettings:
        config, site = self._config, self._site
        return EngineSettings(
            **{"model": site.model, **fields},
            log_file=site.logs / f"{name.replace(' ', '-')}.log",
            name=name,
            device="cuda" if site.on_gpus else "cpu",
            dtype="bfloat16" if config.model.bf16 else "float32",
            mem_fraction=config.engine.sglang_mem_fraction_static,
            tensor_parallel=group.size,
            trust_remote_code=config.model.trust_remote_code,
            threads=site.threads,
            # The later of two arguments wins in SGLang's parser.
            extra=(*config.sglang.arguments, *server_arguments(group.overrides), *extra),
            start_timeout_s=config.engine.engine_start_timeout_s,
            worker_type=group.worker_type,
        )


@dataclass(slots=True)
class _Served:
    """The servers of one model.

    Arguments:
        engines, calls: the run's own, and their starts.
        router, router_call: None: there is none.
        settings: of each engine.
        is_in: whether they are watched, and the router knows them.
    """

    engines: list[Actor]
    calls: list[Call]
    router: Actor | None
    settings: list[EngineSettings]
    router_call: Call | None = None
    is_in: bool = False
