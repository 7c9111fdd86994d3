"""The processes of a run: engines and routers, the sampler, and the ranks of learner and critic."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from slime_core.learner.absent import AbsentLearner, UnpublishedLearner
from slime_core.learner.actor import LearnerActor, LearnerHandle, Saving
from slime_core.learner.critic.actor import CriticActor, CriticGroup
from slime_core.modeling.layout import ParallelLayout
from slime_core.plugins.lifecycle import Failures
from slime_core.rollout.actor import SamplerActor, SamplerHandle
from slime_core.rollout.concurrent_evaluation import ConcurrentEvalSampler, ConcurrentEvaluations, eval_sampler_settings
from slime_core.rollout.engines.actors import EngineActor
from slime_core.rollout.engines.fleet import EngineFleet, Site
from slime_core.rollout.engines.model_servers import ModelServers
from slime_core.runtime.actors import Actor, Call, Launch, start_actor
from slime_core.runtime.asked import asked_layout, device_of, refuse_on_device
from slime_core.runtime.group import ActorGroup
from slime_core.runtime.inspection import inspect_nodes
from slime_core.runtime.launch.interrupts import Interrupts
from slime_core.runtime.launch.job import Job, cpu_environment, learner_settings, publisher_settings, sampler_settings
from slime_core.runtime.layout import Device
from slime_core.runtime.lending import Lending, Sharing
from slime_core.runtime.placement import Placement, Slot, place
from slime_core.runtime.session import Session, head_address
from slime_core.runtime.waiting import RunWait
from slime_core.track.track import Track
from slime_core.weights.publisher import PublisherSettings

__all__ = ["AnyLearner", "AnySampler", "Processes", "Warn", "processes"]

Warn = Callable[[str], None]
AnySampler = SamplerHandle | ConcurrentEvalSampler
AnyLearner = LearnerHandle | AbsentLearner


@contextmanager
def processes(job: Job, *, learner_ranks: int, warn: Warn, failures: Failures) -> Iterator[Processes]:
    """A Ray cluster with room for the processes of ``job``; nothing of them is left after the block."""
    cluster = job.config.cluster
    with Interrupts() as interrupts, ExitStack() as stack:
        try:
            namespace = f"slime-{os.getpid()}-{time.time_ns()}"
            session = stack.enter_context(Session(cluster.ray_address, namespace=namespace))
            if not session.own:
                inspect_nodes(job.manifest)
            device = device_of(job.config)
            layout = asked_layout(job.config, device, learner_ranks=learner_ranks)
            refuse_on_device(job.config, layout)
            if job.config.transport == "disk":
                stack.callback(shutil.rmtree, job.weights_folder, ignore_errors=True)
            placement = stack.enter_context(place(layout))
            started = Processes(job, placement, device=device, warn=warn, failures=failures)
            stack.callback(started.stop)
            yield started
        finally:
            interrupts.hold()


class Processes:
    """Everything that runs in other processes, with the calls that are still starting it."""

    def __init__(self, job: Job, placement: Placement, *, device: Device, warn: Warn, failures: Failures) -> None:
        self._failures = failures
        self._job, self._placement, self._device, self._warn = job, placement, device, warn
        self._starting: list[Call[object]] = []
        self._monitors: list[Call[object]] = []
        self._wait = RunWait(job.config.watch, warn, also=(self._monitors, self._starting))
        self._eval_sampler: Actor[SamplerActor] | None = None
        self._address = head_address()
        site = Site(
            model=job.model,
            logs=job.logs,
            on_gpus=device == "gpu",
            reachable=self._address is not None,
            slots=placement.engines,
            auxiliary_slots=placement.beside,
        )
        self._servers = EngineFleet(job.config, site, wait=self._wait, monitors=self._monitors)

    def start_engines(self) -> None:
        """Begin to start every engine, of the policy and of models beside it, and the routers.

        Raises:
            ConfigError: an engine that somebody else started cannot serve this run.
        """
        self._servers.start()

    def start_learner(self, checkpoints: Path) -> tuple[AnyLearner, Lending]:
        """Begin to start every rank of the learner, if there are any; returns it, and who lends the devices to it."""
        if not self._placement.learner:
            return AbsentLearner(), Lending()
        ranks = tuple(
            start_actor(self._launch(f"learner rank {rank}", slot), LearnerActor, self._job.manifest)
            for rank, slot in enumerate(self._placement.learner)
        )
        config = self._job.config
        layout = ParallelLayout.of(config.parallel)
        learner = (LearnerHandle if self._servers.serves_policy else UnpublishedLearner)(
            ActorGroup(ranks),
            wait=self._wait,
            saving=Saving(checkpoints, self._job.model, save_hf=config.checkpoint.save_hf),
            data_ranks=[layout.data_rank(rank, world_size=len(ranks)) for rank in range(len(ranks))],
            checks_equal=config.weights.check_weight_update_equal,
            ahead=config.rollout.async_buffer_size,
            warn=self._warn,
            failures=self._failures,
            critic=self._critic_apart(),
        )
        devices = self._share_devices(learner) if config.cluster.colocate and self._servers.serves_policy else Lending()
        settings = learner_settings(self._job, self._device)
        self._starting += learner.setup(settings, reachable=self._address is not None)
        return learner, devices

    def _critic_apart(self) -> CriticGroup | None:
        """Begin to start every rank of a critic apart; None: it shares the learner's, or there is none."""
        if not self._placement.critic:
            return None
        ranks = tuple(
            start_actor(self._launch(f"critic rank {rank}", slot), CriticActor, self._job.manifest)
            for rank, slot in enumerate(self._placement.critic)
        )
        layout = ParallelLayout.of(self._job.config.critic_parallel)
        return CriticGroup(ActorGroup(ranks), replace(learner_settings(self._job, self._device), layout=layout))

    def _share_devices(self, learner: LearnerHandle) -> Sharing:
        self._servers.policy.register()
        devices = Sharing(self._servers.policy, learner)
        devices.vacate()
        return devices

    def start_sampler(self, *, trains: bool) -> SamplerHandle:
        """Begin to start the sampler, which needs the router's address, and those of models beside the policy."""
        settings = sampler_settings(self._job, self._servers, self._device, trains=trains)
        actor = start_actor(self._launch("sampler"), SamplerActor, self._job.manifest)
        sampler = SamplerHandle(actor, wait=self._wait, warn=self._warn, failures=self._failures)
        self._starting.append(sampler.setup(settings))
        if trains and self._job.config.eval.is_beside_training:
            actor = start_actor(self._launch("eval sampler"), SamplerActor, self._job.manifest)
            evaluating = self._servers.evaluating
            own = sampler_settings(self._job, self._servers, self._device, trains=False)
            own = eval_sampler_settings(own, url=evaluating.ready_url(), num_engines=len(evaluating.engines))
            self._starting.append(actor.start(SamplerActor.setup, own))
            self._eval_sampler = actor
        return sampler

    def evaluates_beside(self, sampler: SamplerHandle, learner: AnyLearner, track: Track) -> AnySampler:
        """``sampler``, with evaluations beside training if the run asks for them; everything has started."""
        if self._eval_sampler is None:
            return sampler
        publish, evaluating = None, self._servers.evaluating
        if evaluating.engines and isinstance(learner, LearnerHandle):
            publish = learner.publish_for_evaluation
            settings = self._publishes_to(evaluating)
            # Nothing is in flight there, and what older weights computed is forgotten.
            learner.connect_evaluation(evaluating.urls(), replace(settings, pause_mode="retract"))
        evaluations = ConcurrentEvaluations(
            self._eval_sampler, report=track.evaluation, wait=self._wait, monitors=self._monitors, publish=publish
        )
        return ConcurrentEvalSampler.of(self._job.config, sampler, evaluations)

    def join(self, learner: AnyLearner) -> None:
        """Everything has started, and learner and engines know each other, when this returns."""
        calls = [*self._servers.policy.starts, *self._starting]
        self._wait(calls, what="engines, learner and sampler to start")
        self._starting.clear()
        self._servers.policy.register()
        if isinstance(learner, LearnerHandle) and self._servers.serves_policy:
            learner.connect(self._servers.policy.urls(), self._publishes_to(self._servers.policy))

    def stop(self) -> None:
        """Stop servers in their own time; whatever does not answer dies with its Ray actor."""
        self._servers.stop()

    def _launch(self, label: str, slot: Slot | None = None) -> Launch:
        return Launch(label, slot, cpu_environment(self._device))

    def _publishes_to(self, served: ModelServers) -> PublisherSettings:
        gpus = self._wait(served.engines.start(EngineActor.gpus), what="the engines' GPUs")
        return publisher_settings(self._job, served.ranks, gpus, device=self._device, address=self._address)
