"""Starts what a run needs, hands it to the loop, and takes it down again, in whatever order things fail.

    Ray session, placement
      engines    one actor each; the server it starts is a process of its own
      router     in front of the engines
      sampler    one actor; another for evaluations beside training
      learner    one actor a rank; a critic apart has actors of its own

Engines, learner and sampler start side by side: the slowest of them, not their sum, is what one waits for. Only where
learner and engines share devices does the learner wait until the engines have started and left. A run of one half
alone starts either no learner, or neither engines nor router.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slime_core.checkpoint.folder import Checkpoint, RunState
from slime_core.cluster.actors import Actor, Call, start_actor
from slime_core.cluster.asked import asked_layout, device_of, refuse_on_device
from slime_core.cluster.group import ActorGroup
from slime_core.cluster.inspection import inspect_nodes
from slime_core.cluster.layout import Device
from slime_core.cluster.lending import Lending, Sharing
from slime_core.cluster.placement import Placement, place
from slime_core.cluster.session import Session, head_address
from slime_core.cluster.waiting import wait
from slime_core.config.embedded import ARITHMETIC
from slime_core.config.schema import RunConfig
from slime_core.config.settings import core_values
from slime_core.learner.absent import AbsentLearner, UnpublishedLearner
from slime_core.learner.actor import LearnerActor, LearnerHandle, Saving, manifest_record
from slime_core.learner.critic_actor import CriticActor, CriticGroup
from slime_core.learner.layout import ParallelLayout
from slime_core.learner.settings import LearnerSettings
from slime_core.loop import is_due, train
from slime_core.plugins.component import Kind
from slime_core.plugins.contracts import Place, RunInfo
from slime_core.plugins.lifecycle import Failures, LifecycleHooks, lifetime, unclaimed_states
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.rollout.actor import SamplerActor, SamplerHandle
from slime_core.rollout.beside import BesideSampler, Evaluations, beside_settings
from slime_core.rollout.engines.fleet import Servers, Site
from slime_core.rollout.sampled import SamplerSettings
from slime_core.track.track import Track
from slime_core.weights.publisher import PublisherSettings

__all__ = ["Job", "evaluate", "run"]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run.

    Arguments:
        config: all settings.
        registry, manifest: the activated plugins.
        options: plugin name -> its options object.
        architecture: the start weights' architecture string.
        logs: folder of the engines' and the router's logs.
        samples: folder of readable samples; None: none are written.
    """

    config: RunConfig
    registry: Registry
    manifest: Manifest
    architecture: str
    logs: Path
    samples: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        """Hugging Face folder with the start weights."""
        return self.config.model.hf_checkpoint or ARITHMETIC / "model"

    @property
    def prompts(self) -> Path:
        """The training prompts."""
        return self.config.data.prompt_data or ARITHMETIC / "data" / "train.jsonl"

    @property
    def weights_folder(self) -> Path:
        """Where weights lie that travel as files; gone at the end of the run, however it ends."""
        shared, run = self.config.weights.update_weight_disk_dir, self.logs.parent
        return run / "weights" if shared is None else shared / f"{run.name}-{os.getpid()}"


Warn = Callable[[str], None]
AnySampler = SamplerHandle | BesideSampler


def run(job: Job, *, track: Track, resume: Checkpoint | None = None) -> RunState:
    """Train until the run has had all its rollouts; returns where it then stands.

    Arguments:
        resume: continue from this checkpoint.
    """
    hooks = LifecycleHooks(job.registry, place=Place.DRIVER, options=job.options)
    ranks = job.config.num_started_ranks
    with _cluster(job, learner_ranks=ranks, warn=track.warn, failures=hooks.failures) as fleet:
        with track.timer("start"):
            fleet.start_engines()
            learner, devices = fleet.start_learner(track.record.checkpoints)
            handle = fleet.start_sampler(trains=True)
            fleet.join(learner)
        sampler = fleet.evaluates_beside(handle, learner, track)
        state = RunState(plugins=manifest_record(job.manifest))
        with lifetime(hooks, _info(job, track.record.directory, resume), warn=track.warn):
            if resume is not None:
                assert isinstance(learner, LearnerHandle), "the rules refuse load where no learner is started"
                _restore(resume, learner, sampler, hooks)
                for unclaimed in unclaimed_states(resume.state.plugin_states, job.registry):
                    track.warn(unclaimed)
                state = replace(resume.state, plugins=state.plugins)
            config = _followed(job.config, owes=resume is not None and _owes_evaluation(job.config, track, state.step))
            state = train(learner, sampler, config=config, state=state, track=track, devices=devices, hooks=hooks)
            sampler.close()
            learner.close()
        return state


def _followed(config: RunConfig, *, owes: bool = False) -> RunConfig:
    """What the loop follows: where one half runs alone, nothing is published after the start.

    Arguments:
        owes: the weights that the run starts from have to be measured, whatever ``skip_eval_before_train`` says.
    """
    if owes:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"skip_eval_before_train": False})})
    if config.debug.trains and config.debug.generates:
        return config
    return config.model_copy(update={"weights": config.weights.model_copy(update={"update_weights_interval": 0})})


def _owes_evaluation(config: RunConfig, track: Track, step: int) -> bool:
    """Whether the evaluation after ``step`` steps was due, and ended with the run that is resumed in its own folder."""
    record = track.record
    return is_due(config.eval.eval_interval, step) and record.resumed_step == step and not record.pending_evaluation


def _info(job: Job, folder: Path, resume: Checkpoint | None) -> RunInfo:
    step = 0 if resume is None else resume.state.step
    return RunInfo(folder, core_values(job.config), step=step, num_rollout=job.config.rollout.num_rollout)


def _restore(resume: Checkpoint, learner: LearnerHandle, sampler: AnySampler, hooks: LifecycleHooks) -> None:
    """Weights, data and plugins of every process are where ``resume`` left them."""
    states = resume.state.plugin_states
    learner.load(resume)
    sampler.restore(resume.state.cursor, states.get(Place.SAMPLER, {}))
    hooks.restore(states.get(Place.DRIVER, {}))


def evaluate(job: Job, *, warn: Warn, held: Checkpoint | None = None) -> dict[str, float]:
    """The scores of the weights in ``job.model`` on every evaluation set; no learner is started.

    Arguments:
        held: a checkpoint whose weights are measured instead; a learner loads it and publishes them.
    """
    ranks = 0 if held is None else job.config.num_learner_ranks
    with _cluster(job, learner_ranks=ranks, warn=warn, failures=Failures()) as fleet:
        fleet.start_engines()
        learner, devices = fleet.start_learner(job.logs)
        sampler = fleet.start_sampler(trains=False)
        fleet.join(learner)
        if held is not None and isinstance(learner, LearnerHandle):
            with devices.lend("learner"):
                learner.load(held)
                devices.make_room_for_weights()
                learner.publish(held.state.step)
        scores = sampler.evaluate(0)
        sampler.close()
        learner.close()
        return scores


class _Fleet:
    """Everything that runs in other processes, with the calls that are still starting it."""

    def __init__(self, job: Job, placement: Placement, *, device: Device, warn: Warn, failures: Failures) -> None:
        self._failures = failures
        self._job, self._placement, self._device, self._warn = job, placement, device, warn
        self._watch = job.config.watch
        self._learner_calls: list[Call] = []
        self._sampler_calls: list[Call] = []
        self._eval_sampler: Actor | None = None
        self._monitors: list[Call] = []
        self._address = head_address()
        site = Site(
            model=job.model,
            logs=job.logs,
            on_gpus=device == "gpu",
            reachable=self._address is not None,
            slots=placement.engines,
            beside=placement.beside,
        )
        self._servers = Servers(job.config, site, wait=self._wait, monitors=self._monitors)

    def start_engines(self) -> None:
        """Begin to start every engine, of the policy and of models beside it, and the routers.

        Raises:
            ConfigError: an engine that somebody else started cannot serve this run.
        """
        self._servers.start()

    def start_learner(self, checkpoints: Path) -> tuple[LearnerHandle | AbsentLearner, Lending]:
        """Begin to start every rank of the learner, if there are any; returns it, and who lends the devices to it."""
        if not self._placement.learner:
            return AbsentLearner(), Lending()
        ranks = tuple(
            start_actor(
                LearnerActor, self._job.manifest, label=f"learner rank {rank}", slot=slot, env=self._cpu_environment()
            )
            for rank, slot in enumerate(self._placement.learner)
        )
        config = self._job.config
        layout = ParallelLayout.of(config.parallel)
        learner = (LearnerHandle if self._servers.are_there else UnpublishedLearner)(
            ActorGroup(ranks),
            watch=self._watch,
            saving=Saving(checkpoints, self._job.model, save_hf=config.checkpoint.save_hf),
            data_ranks=[layout.data_rank(rank, world_size=len(ranks)) for rank in range(len(ranks))],
            checks_equal=config.weights.check_weight_update_equal,
            ahead=config.rollout.async_buffer_size,
            also=self._monitors,
            warn=self._warn,
            failures=self._failures,
            critic=self._critic_apart(),
        )
        devices = self._share_devices(learner) if config.cluster.colocate and self._servers.are_there else Lending()
        self._learner_calls = learner.setup(self._learner_settings(), reachable=self._address is not None)
        return learner, devices

    def _critic_apart(self) -> CriticGroup | None:
        """Begin to start every rank of a critic apart; None: it shares the learner's, or there is none."""
        if not self._placement.critic:
            return None
        ranks = tuple(
            start_actor(
                CriticActor, self._job.manifest, label=f"critic rank {rank}", slot=slot, env=self._cpu_environment()
            )
            for rank, slot in enumerate(self._placement.critic)
        )
        layout = ParallelLayout.of(self._job.config.critic_parallel)
        return CriticGroup(ActorGroup(ranks), replace(self._learner_settings(), layout=layout))

    def _share_devices(self, learner: LearnerHandle) -> Sharing:
        self._servers.take_in()
        devices = Sharing(self._servers, learner)
        devices.vacate()
        return devices

    def start_sampler(self, *, trains: bool) -> SamplerHandle:
        """Begin to start the sampler, which needs the router's address, and those of models beside the policy."""
        settings = self._sampler_settings(trains=trains)
        actor = start_actor(SamplerActor, self._job.manifest, label="sampler", env=self._cpu_environment())
        sampler = SamplerHandle(actor, watch=self._watch, also=self._monitors, warn=self._warn, failures=self._failures)
        self._sampler_calls.append(sampler.setup(settings))
        if trains and self._job.config.eval.is_beside_training:
            actor = start_actor(SamplerActor, self._job.manifest, label="eval sampler", env=self._cpu_environment())
            own = self._sampler_settings(trains=False)
            own = beside_settings(own, url=self._servers.eval_url(), num_engines=len(self._servers.eval_actors))
            self._sampler_calls.append(actor.start("setup", own))
            self._eval_sampler = actor
        return sampler

    def evaluates_beside(
        self, sampler: SamplerHandle, learner: LearnerHandle | AbsentLearner, track: Track
    ) -> AnySampler:
        """``sampler``, with evaluations beside training if the run asks for them; everything has started."""
        if self._eval_sampler is None:
            return sampler
        publish = None
        if self._servers.eval_actors and isinstance(learner, LearnerHandle):
            publish = learner.publish_for_evaluation
            settings = self._publisher_settings(self._servers.eval_ranks, self._gpus(self._servers.eval_actors))
            # Nothing is in flight there, and what older weights computed is forgotten.
            learner.connect_evaluation(self._servers.eval_urls(), replace(settings, pause_mode="retract"))
        evaluations = Evaluations(
            self._eval_sampler, report=track.evaluation, wait=self._wait, monitors=self._monitors, publish=publish
        )
        return BesideSampler.of(self._job.config, sampler, evaluations)

    def join(self, learner: LearnerHandle | AbsentLearner | None) -> None:
        """Everything has started, and learner and engines know each other, when this returns."""
        calls = [*self._servers.calls(), *self._sampler_calls, *self._learner_calls]
        self._wait(calls, what="engines, learner and sampler to start")
        self._servers.take_in()
        if isinstance(learner, LearnerHandle) and self._servers.are_there:
            settings = self._publisher_settings(self._servers.ranks, self._gpus(self._servers.actors))
            learner.connect(self._servers.urls(), settings)

    def stop(self) -> None:
        """Stop servers in their own time; whatever does not answer dies with its Ray actor."""
        self._servers.stop()

    def _wait(self, calls: Sequence[Call], *, what: str) -> list[Any]:
        return wait(
            list(calls),
            what=what,
            also=self._monitors,
            warn_after_s=self._watch.wait_warn_s,
            fail_after_s=self._watch.wait_fail_s,
            on_warn=lambda late: self._warn(str(late)),
        )

    def _gpus(self, engines: Sequence[Actor]) -> list[tuple[str, ...]]:
        return self._wait([engine.start("gpus") for engine in engines], what="the engines' GPUs")

    def _publisher_settings(self, ranks: tuple[int, ...], gpus: Sequence[tuple[str, ...]]) -> PublisherSettings:
        """How weights travel to engines of so many processes each."""
        config = self._job.config
        return PublisherSettings(
            model=self._job.model,
            dtype=self._dtype,
            bytes_limit=config.weights.update_weight_buffer_size,
            backend="nccl" if self._device == "gpu" else "gloo",
            devices_per_engine=ranks,
            address=self._address or "127.0.0.1",
            transport=config.transport,
            disk_folder=self._job.weights_folder,
            engine_gpus=tuple(gpus) if all(gpus) and len(gpus) == len(ranks) else (),
            pause_mode=config.rollout.pause_generation_mode,
            resumes=not config.cluster.colocate,
        )

    @property
    def _dtype(self) -> str:
        return "bfloat16" if self._job.config.model.bf16 else "float32"

    def _learner_settings(self) -> LearnerSettings:
        job = self._job
        estimator = job.registry.find(Kind.ADVANTAGE_ESTIMATOR, str(job.config.algorithm.advantage_estimator))
        traits: Any = estimator.traits
        return LearnerSettings(
            config=self._resolved_device(),
            folder=job.model,
            architecture=job.architecture,
            policy_loss=traits.policy_loss,
            options=dict(job.options),
            num_steps=job.config.rollout.num_rollout * job.config.steps_per_rollout,
            layout=ParallelLayout.of(job.config.parallel),
            num_threads=_cores() if self._device == "cpu" else 0,
        )

    def _sampler_settings(self, *, trains: bool) -> SamplerSettings:
        job = self._job
        return SamplerSettings(
            config=job.config,
            folder=job.model,
            prompt_data=job.prompts,
            router_url=self._servers.router_url(),
            num_ranks=self._job.config.num_data_ranks,
            options=dict(job.options),
            samples_folder=job.samples,
            rewards_log=job.logs / "rewards.log",
            num_engines=job.config.num_engines,
            trains=trains,
            model_urls=self._servers.model_urls(),
            engine_urls=self._servers.asked_directly(),
        )

    def _resolved_device(self) -> RunConfig:
        """The settings with the device decided once, by the cluster, for every process."""
        device = "cuda" if self._device == "gpu" else "cpu"
        config = self._job.config
        return config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": device})})

    def _cpu_environment(self) -> dict[str, str]:
        # A CPU run on a machine with GPUs must not see them: torch would choose them.
        return {"OMP_NUM_THREADS": str(_cores()), "CUDA_VISIBLE_DEVICES": ""} if self._device == "cpu" else {}


@contextmanager
def _cluster(job: Job, *, learner_ranks: int, warn: Warn, failures: Failures) -> Iterator[_Fleet]:
    """A fleet on a Ray cluster; nothing of it is left after the block."""
    cluster = job.config.cluster
    with ExitStack() as stack:
        stack.enter_context(Session(cluster.ray_address, namespace=f"slime-{os.getpid()}-{time.time_ns()}"))
        inspect_nodes(job.manifest)
        device = device_of(job.config)
        layout = asked_layout(job.config, device, learner_ranks=learner_ranks)
        refuse_on_device(job.config, layout)
        if job.config.transport == "disk":
            stack.callback(shutil.rmtree, job.weights_folder, ignore_errors=True)
        placement = stack.enter_context(place(layout))
        fleet = _Fleet(job, placement, device=device, warn=warn, failures=failures)
        stack.callback(fleet.stop)
        yield fleet


def _cores() -> int:
    return len(os.sched_getaffinity(0))
