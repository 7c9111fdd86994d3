"""Every inference server of a run.

    policy       engines of one or several groups, or those of somebody else, always behind a router
    models       beside the policy, each with engines of its own; several engines of one have a router
    evaluating   engines that only evaluate the policy, likewise; the policy's router does not know them

All of them are started side by side.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from slime_core.config.schema import RunConfig
from slime_core.errors import EngineError, RemoteError, WaitTimeout
from slime_core.rollout.engines.asked import Site, evaluating_engines, model_engines, policy_engines, router_settings
from slime_core.rollout.engines.engine import EngineSettings
from slime_core.rollout.engines.external import External, Needs, discover, refuse_silent
from slime_core.rollout.engines.remote_router import RemoteRouter
from slime_core.rollout.engines.router import RouterSettings
from slime_core.rollout.engines.served import Served, Watch
from slime_core.runtime.actors import Call
from slime_core.runtime.placement import Slot
from slime_core.runtime.waiting import Wait
from slime_core.runtime.waiting import wait as wait_for

__all__ = ["Servers", "Site"]

STOP_LIMIT_S = 6.0
"""Seconds for servers to stop by themselves; Ctrl-C promises an end within ten."""


class Servers:
    """Starts and stops them.

    Arguments:
        config: the run's settings.
        site: see there.
        wait: waits for calls under the run's limits.
        monitors: receives background calls whose failure ends any wait.

    Attributes:
        policy, models, evaluating: see the module; what is not served has no engines.
    """

    def __init__(self, config: RunConfig, site: Site, *, wait: Wait, monitors: list[Call[object]]) -> None:
        self._config, self._site = config, site
        self._watch = Watch(wait, monitors, reachable=site.reachable)
        self.policy = Served("the engines", [], [], self._watch)
        self.evaluating = Served("the engines that only evaluate", [], [], self._watch)
        self.models: dict[str, Served] = {}

    def start(self) -> None:
        """Begin to start every engine and router.

        Raises:
            ConfigError: an engine that somebody else started cannot serve this run, or nobody is where an evaluation
                set is to be answered.
        """
        config, site = self._config, self._site
        sets = config.eval.eval_datasets
        refuse_silent({one.name: one.model for one in sets if one.model is not None and "/" in one.model})
        others = self._discovered()
        if not (config.engine_groups or others):
            return
        self.policy = self._policy(policy_engines(config, site), others)
        slots = iter(site.beside)
        for model in config.engine.engine_models:
            settings = model_engines(config, site, model)
            self.models[model.name] = self._beside(f"the engines of {model.name}", model.name, settings, slots)
        self.evaluating = self._beside(
            "the engines that only evaluate", "eval", evaluating_engines(config, site), slots
        )

    def stop(self) -> None:
        """Stop every server that the run started in its own time; those of others go on, and a router of somebody else
        knows the run's engines no more."""
        with suppress(EngineError):
            self.policy.leave()
        calls = [call for one in (self.policy, *self.models.values(), self.evaluating) for call in one.stopping()]
        deadline_s = time.monotonic() + STOP_LIMIT_S
        for call in calls:  # one by one: the actor of one may be dead, and the others still have files to remove
            with suppress(WaitTimeout, RemoteError):
                wait_for([call], what="the engines to stop", fail_after_s=max(0.0, deadline_s - time.monotonic()))

    @property
    def are_there(self) -> bool:
        """Whether the policy is served at all."""
        return bool(self.policy.ranks)

    def model_urls(self) -> dict[str, str]:
        """Name -> URL of every model beside the policy, all of which answer when this returns."""
        return {name: model.answering_url() for name, model in self.models.items()}

    def asked_directly(self) -> tuple[str, ...]:
        """The policy's engines to which requests do not go through the router, because it would lose what is asked of
        them; they have started when this returns. Empty: there are none."""
        return tuple(self.policy.urls()) if self._config.learner.use_rollout_routing_replay else ()

    def _discovered(self) -> list[External]:
        addresses = self._config.engine.rollout_external_engine_addrs if self._config.debug.generates else ()
        return discover(addresses, Needs.of(self._config, self._site.model)) if addresses else []

    def _policy(self, settings: Sequence[EngineSettings], others: Sequence[External]) -> Served:
        engine = self._config.engine
        router: RouterSettings | RemoteRouter = self._router("router", (*settings, *others))
        if engine.sglang_router_ip is not None:
            router = RemoteRouter(f"http://{engine.sglang_router_ip}:{engine.sglang_router_port}")
        return Served("the engines", settings, self._site.slots, self._watch, router=router, others=others)

    def _beside(self, what: str, name: str, settings: Sequence[EngineSettings], slots: Iterator[Slot]) -> Served:
        router = self._router(f"router-{name}", settings) if len(settings) > 1 else None
        return Served(what, settings, list(islice(slots, len(settings))), self._watch, router=router)

    def _router(self, log: str, engines: Sequence[EngineSettings | External]) -> RouterSettings:
        splits = any(one.worker_type != "regular" for one in engines)
        return router_settings(self._config, self._site, log, splits_prefill=splits)
