"""Every inference server of a run.

    policy       engines of one or several groups, or external ones, always behind a router
    models       auxiliary models (reward models, judges), each with its own engines, and a router where it has several
    evaluating   engines that only evaluate the policy; the policy's router does not know them

All of them start in parallel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice

from slime_core.config.schema import RunConfig
from slime_core.errors import EngineError, RemoteError, WaitTimeout
from slime_core.rollout.engines.engine import EngineSettings
from slime_core.rollout.engines.engine_config import (
    Site,
    evaluating_engines,
    model_engines,
    policy_engines,
    router_settings,
)
from slime_core.rollout.engines.external import External, Needs, discover, require_reachable
from slime_core.rollout.engines.model_servers import ModelServers, Supervision
from slime_core.rollout.engines.router import RemoteRouter, RouterSettings
from slime_core.runtime.actors import Call
from slime_core.runtime.placement import Slot
from slime_core.runtime.waiting import Wait
from slime_core.runtime.waiting import wait as wait_for

__all__ = ["EngineFleet", "Site"]

STOP_LIMIT_S = 6.0
"""Seconds for servers to stop by themselves; Ctrl-C promises an end within ten."""


class EngineFleet:
    """Starts and stops all servers of a run.

    Arguments:
        config: the run's settings.
        site: where they run.
        wait: waits for calls under the run's limits.
        monitors: receives background calls whose failure ends any wait.

    Attributes:
        policy, models, evaluating: see the module; a model that is not served has no engines.
    """

    def __init__(self, config: RunConfig, site: Site, *, wait: Wait, monitors: list[Call[object]]) -> None:
        self._config = config
        self._site = site
        self._watch = Supervision(wait, monitors, reachable=site.reachable)
        self.policy = ModelServers("the engines", [], [], self._watch)
        self.evaluating = ModelServers("the engines that only evaluate", [], [], self._watch)
        self.models: dict[str, ModelServers] = {}

    def start(self) -> None:
        """Begin to start every engine and router.

        Raises:
            ConfigError: an external engine cannot serve this run, or no server listens at an address that an
                evaluation set names.
        """
        config, site = self._config, self._site
        sets = config.eval.eval_datasets
        require_reachable({one.name: one.model for one in sets if one.model is not None and "/" in one.model})
        others = self._discovered()
        if not (config.engine_groups or others):
            return
        self.policy = self._policy(policy_engines(config, site), others)
        slots = iter(site.auxiliary_slots)
        for model in config.engine.engine_models:
            settings = model_engines(config, site, model)
            self.models[model.name] = self._auxiliary(f"the engines of {model.name}", model.name, settings, slots)
        self.evaluating = self._auxiliary(
            "the engines that only evaluate", "eval", evaluating_engines(config, site), slots
        )

    def stop(self) -> None:
        """Stop every server that the run started. External ones keep running; an external router forgets the
        engines."""
        with suppress(EngineError):
            self.policy.deregister()
        calls = [call for one in (self.policy, *self.models.values(), self.evaluating) for call in one.begin_stop()]
        deadline_s = time.monotonic() + STOP_LIMIT_S
        for call in calls:  # one by one: one actor may be dead, and the others still have files to remove
            with suppress(WaitTimeout, RemoteError):
                wait_for([call], what="the engines to stop", fail_after_s=max(0.0, deadline_s - time.monotonic()))

    @property
    def serves_policy(self) -> bool:
        """Whether the policy has engines."""
        return bool(self.policy.ranks)

    def model_urls(self) -> dict[str, str]:
        """Name -> URL of every auxiliary model; waits until all answer."""
        return {name: model.ready_url() for name, model in self.models.items()}

    def direct_urls(self) -> tuple[str, ...]:
        """The policy's engines where requests must bypass the router, because it would drop ``return_routed_experts``;
        waits until they have started. Empty: requests go through the router."""
        return tuple(self.policy.urls()) if self._config.learner.use_rollout_routing_replay else ()

    def _discovered(self) -> list[External]:
        addresses = self._config.engine.rollout_external_engine_addrs if self._config.debug.generates else ()
        return discover(addresses, Needs.of(self._config, self._site.model)) if addresses else []

    def _policy(self, settings: Sequence[EngineSettings], others: Sequence[External]) -> ModelServers:
        engine = self._config.engine
        router: RouterSettings | RemoteRouter = self._router("router", (*settings, *others))
        if engine.sglang_router_ip is not None:
            router = RemoteRouter(f"http://{engine.sglang_router_ip}:{engine.sglang_router_port}")
        return ModelServers("the engines", settings, self._site.slots, self._watch, router=router, others=others)

    def _auxiliary(
        self, what: str, name: str, settings: Sequence[EngineSettings], slots: Iterator[Slot]
    ) -> ModelServers:
        router = self._router(f"router-{name}", settings) if len(settings) > 1 else None
        return ModelServers(what, settings, list(islice(slots, len(settings))), self._watch, router=router)

    def _router(self, log: str, engines: Sequence[EngineSettings | External]) -> RouterSettings:
        splits = any(one.worker_type != "regular" for one in engines)
        return router_settings(self._config, self._site, log, splits_prefill=splits)
