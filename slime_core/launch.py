"""Starts the processes of a run, runs the loop, and stops them, also after a failure.

    Ray session, placement
      engines    one actor per engine; it starts the server as a separate process
      router     in front of the engines
      sampler    one actor; a second one for concurrent evaluations
      learner    one actor per rank; a separate critic has separate actors

Engines, learner and sampler start at the same time, so the start takes as long as the slowest of them. Only where
learner and engines share devices does the learner wait until the engines have started and released them. A run that
only generates starts no learner; one that only trains starts neither engines nor router.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from slime_core.checkpoint.folder import Checkpoint, Retention, RunState, by_step, is_due, remove_drafts
from slime_core.components.selection import policy_loss
from slime_core.config.layout_rules import rearranges_weights
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.config.secrets import add_key, key_of_run
from slime_core.config.settings import core_values
from slime_core.contracts import Place, RunInfo
from slime_core.errors import DEATHS, SlimeError
from slime_core.learner import LearnerSettings
from slime_core.learner.actor import CriticActor, LearnerActor
from slime_core.learner.background_save import SaveSettings
from slime_core.learner.handle import LearnerHandle, NoLearner
from slime_core.loop import save, train
from slime_core.modeling.layout import ParallelLayout
from slime_core.plugins.lifecycle import RESTORE, Hooks, PlaceStates
from slime_core.plugins.manifest import Manifest
from slime_core.plugins.registry import Registry
from slime_core.rollout.actor import (
    AnySampler,
    ConcurrentEvalSampler,
    SamplerActor,
    SamplerHandle,
    eval_sampler_settings,
)
from slime_core.rollout.components import SamplerSettings
from slime_core.rollout.engines.actors import EngineActor, Restarts
from slime_core.rollout.engines.fleet import EngineFleet, ModelServers, Site, Supervision, masks_up_to
from slime_core.runtime.actors import Actor, ActorGroup, Call, Launch, Watched, start_actor
from slime_core.runtime.device_pool import ColocatedDevices, DevicePool
from slime_core.runtime.layout import device_of, requested_layout, require_device_support
from slime_core.runtime.machine import allocator_environment, cpu_threads, rank_environment
from slime_core.runtime.placement import ActorPlacement, Placement, nearest_ranks, place
from slime_core.runtime.session import Session, cluster_gpus, head_address, inspect_nodes, require_inputs
from slime_core.runtime.waiting import RunWait, Terminated, Termination, stacks_on_request
from slime_core.track.failures import Failures
from slime_core.track.record import KERNELS, RunRecord
from slime_core.track.track import Track
from slime_core.weights import PublisherSettings


@dataclass(frozen=True, slots=True)
class Job:
    """A run to start: its settings, plugins and folders.

    Arguments:
        config: all settings.
        registry, manifest: the activated plugins.
        options: plugin name -> its options object.
        architecture: the start weights' architecture string.
        logs: folder of the engines' and the router's logs.
        samples: folder of readable samples; None: none are written.
        resumed_step: training steps done when this start of the run began.
    """

    config: RunConfig
    registry: Registry
    manifest: Manifest
    architecture: str
    logs: Path
    samples: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    resumed_step: int = 0

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.logs.parent

    @property
    def model(self) -> Path:
        """Hugging Face folder with the start weights."""
        return self.config.model.hf_checkpoint or ARITHMETIC / "model"

    @property
    def inputs(self) -> list[Path]:
        """Folders with weights and tokenizers that processes on any node read."""
        settings, generates = self.config.model, self.config.debug.generates
        learned = [settings.initial_megatron_checkpoint, settings.ref_load, self.config.critic.critic_load]
        inputs = [self.model, *learned, self.config.algorithm.opd_teacher_load]
        if generates:
            inputs += [model.model_path for model in self.config.engine.engine_models]
        return list(dict.fromkeys(path for path in inputs if path is not None))

    @property
    def prompts(self) -> Path:
        """The training prompts."""
        return self.config.data.prompt_data or ARITHMETIC / "data" / "train.jsonl"

    @property
    def weights_folder(self) -> Path:
        """Folder of weights that travel as files; removed at the end of the run, however it ends."""
        shared, run = self.config.weights.update_weight_disk_dir, self.folder
        return run / "weights" if shared is None else shared / f"{run.name}-{os.getpid()}"


def learner_settings(job: Job) -> LearnerSettings:
    """Make the settings of every rank of the learner."""
    return LearnerSettings(
        config=job.config,
        folder=job.model,
        architecture=job.architecture,
        policy_loss=policy_loss(job.config, job.registry),
        options=job.options,
        num_steps=job.config.rollout.num_rollout * job.config.steps_per_rollout,
        layout=ParallelLayout.of(job.config.parallel),
        num_threads=cpu_threads() if job.config.cluster.device == "cpu" else 0,
        run_folder=job.folder,
        resumed_step=job.resumed_step,
    )


def sampler_settings(job: Job, servers: EngineFleet, *, trains: bool) -> SamplerSettings:
    """Make the settings of the sampler; waits for the router and for auxiliary models."""
    return SamplerSettings(
        config=job.config,
        folder=job.model,
        prompt_data=job.prompts,
        router_url=servers.policy.url(),
        num_ranks=job.config.num_data_ranks,
        options=job.options,
        samples_folder=job.samples,
        rewards_log=job.logs / "rewards.log",
        bad_rows=job.logs / "bad-rows.log",
        num_engines=job.config.num_engines,
        trains=trains,
        model_urls=servers.model_urls(),
        engine_urls=servers.direct_urls(),
        first_answer_s=servers.first_answer_s(),
        masks_up_to=masks_up_to(job.config),
        run_folder=job.folder,
        resumed_step=job.resumed_step,
    )


def run(job: Job, *, track: Track, resume: Checkpoint | None = None) -> RunState:
    """Train until the run has had all its rollouts; return its state after them.

    Arguments:
        resume: continue from this checkpoint.
    """
    hooks = Hooks(job.registry, place=Place.DRIVER, options=job.options)
    ranks = job.config.num_started_ranks
    with processes(job, learner_ranks=ranks, warn=track.warn, note=track.note, failures=hooks.failures) as started:
        with track.timer("start"):
            started.servers.start()
            learner, devices = started.start_learner(track.record.checkpoints)
            handle = started.start_sampler(learner, trains=True)
            started.join(learner)
        if isinstance(learner, LearnerHandle):
            _record_kernels(learner.kernels(), track)
        sampler = started.add_concurrent_evaluation(handle, learner, track)
        state = RunState(plugins=json.loads(job.manifest.to_json()))
        step = 0 if resume is None else resume.state.step
        rollouts = job.config.rollout.num_rollout
        info = RunInfo(track.record.directory, core_values(job.config), step=step, num_rollout=rollouts)
        with lifetime(hooks, info, warn=track.warn):
            if resume is not None:
                assert isinstance(learner, LearnerHandle), "the rules refuse load where no learner is started"
                _restore(resume, learner, handle, hooks)
                for unclaimed in unclaimed_states(resume.state.plugin_states, hooks.implementers(RESTORE)):
                    track.warn(unclaimed)
                state = replace(resume.state, plugins=state.plugins)
            track.record.begin()
            config = _loop_config(
                job.config, evaluates_start=resume is not None and _has_lost_evaluation(job.config, track, state.step)
            )
            with Termination() as stop:
                try:
                    state = train(
                        learner,
                        sampler,
                        config=config,
                        state=state,
                        track=track,
                        devices=devices,
                        hooks=hooks,
                        stop=stop,
                    )
                except Terminated:
                    learner.wait_for_save()
                    done = replace(state, step=max(state.step, track.num_steps))
                    if isinstance(learner, LearnerHandle) and not _is_saved(track.record, done.step):
                        track.warn(SAVING.format(step=done.step))
                        save(done, learner, sampler, hooks, devices=devices)
                        learner.wait_for_save(required=True)
                    raise
                except SlimeError:
                    learner.wait_for_save_after_failure()
                    raise
            sampler.close()
            learner.close()
        return state


SAVING = "SIGTERM: the run saves step {step} and ends. A second SIGTERM ends it at once."


def _record_kernels(kernels: Mapping[str, str], track: Track) -> None:
    """Print and record the implementations that the learner uses."""
    track.note(f"learner: {', '.join(f'{part} {used}' for part, used in kernels.items())}")
    text = json.dumps(kernels, indent=1) + "\n"
    track.record.when_begun(partial(track.record.write_text, KERNELS, text))


def _is_saved(record: RunRecord, step: int) -> bool:
    """Return whether a checkpoint already holds the state after ``step`` steps."""
    return step <= max(by_step(record.checkpoints), default=record.resumed_step or 0)


def _loop_config(config: RunConfig, *, evaluates_start: bool = False) -> RunConfig:
    """Return the settings of the loop: a run that only generates or only trains publishes nothing after the start.

    Arguments:
        evaluates_start: evaluate the start weights, whatever ``skip_eval_before_train`` says.
    """
    if evaluates_start:
        config = config.model_copy(update={"eval": config.eval.model_copy(update={"skip_eval_before_train": False})})
    if config.debug.trains and config.debug.generates:
        return config
    return config.model_copy(update={"weights": config.weights.model_copy(update={"update_weights_interval": 0})})


def _has_lost_evaluation(config: RunConfig, track: Track, step: int) -> bool:
    """Return whether an evaluation was due after ``step`` steps whose scores were lost when the resumed run stopped."""
    record = track.record
    return is_due(config.eval.eval_interval, step) and record.resumed_step == step and not record.pending_evaluation


def _restore(resume: Checkpoint, learner: LearnerHandle, sampler: SamplerHandle, hooks: Hooks) -> None:
    """Restore weights, data and plugins of every process from ``resume``."""
    states = resume.state.plugin_states
    learner.load(resume)
    sampler.restore(resume.state.cursor, states.get(Place.SAMPLER, {}))
    hooks.restore(states.get(Place.DRIVER, {}))


@contextmanager
def lifetime(hooks: Hooks, run: RunInfo, *, warn: Callable[[str], None]) -> Iterator[None]:
    """Call the hooks of a run's start and end around the block; an error of the block is never hidden by theirs.

    Arguments:
        hooks: of the driver.
        warn: receives the failures of observers since the last report.
    """
    error: BaseException | None = None
    try:
        hooks.call("slime_run_start", run=run)
        yield
    except BaseException as problem:
        error = problem
        raise
    finally:
        hooks.call("slime_run_end", run=run, error=error)
        hooks.failures.report(warn)


def unclaimed_states(states: Mapping[str, PlaceStates], takers: str) -> Iterator[str]:
    """Yield a text for each state of a checkpoint that no plugin restores.

    Arguments:
        states: place -> plugin -> state.
        takers: the plugins that implement ``slime_checkpoint_restore``.
    """
    for called_on, held in states.items():
        for name in sorted(held.keys() - set(takers.split(", "))):
            yield (
                f"the checkpoint holds state of plugin {name!r} for the {called_on}, and no plugin of that name takes "
                f"part that restores it; it is ignored. Name the plugin with --plugin {name} to restore it."
            )


def evaluate(job: Job, *, warn: Warn, held: Checkpoint | None = None) -> dict[str, float]:
    """Evaluate the weights in ``job.model`` on every evaluation set; without ``held`` no learner is started.

    Arguments:
        held: a checkpoint whose weights are evaluated instead; a learner loads and publishes them.
    """
    ranks = 0 if held is None else job.config.num_learner_ranks
    with processes(job, learner_ranks=ranks, warn=warn, failures=Failures()) as started:
        started.servers.start()
        learner, devices = started.start_learner(job.logs)
        sampler = started.start_sampler(learner, trains=False)
        started.join(learner)
        if held is not None and isinstance(learner, LearnerHandle):
            with devices.held_by("learner"):
                learner.load(held)
                devices.make_room_for_weights()
                learner.publish(held.state.step)
        scores = sampler.evaluate(0)
        sampler.close()
        learner.close()
        return scores


Warn = Callable[[str], None]
W = TypeVar("W", bound=Watched)
AnyLearner = LearnerHandle | NoLearner


STOPPING = (
    b"slime: stopping the processes of the run, which takes some seconds. The next interrupt ends slime at once, "
    b"and may leave processes and files.\n"
)
STDERR = 2
DELAYED_SIGNALS = 1
"""The first signal waits for the end of the clean-up, the second does not."""


@contextmanager
def processes(
    job: Job, *, learner_ranks: int, warn: Warn, failures: Failures, note: Warn | None = None
) -> Iterator[Processes]:
    """Provide a Ray cluster and a placement for the processes of ``job``; end all of them after the block.

    Arguments:
        note: receives lines about slow steps that make progress; None for ``warn``.
    """
    cluster = job.config.cluster
    with DelayedInterrupts() as interrupts, stacks_on_request(), ExitStack() as stack:
        try:
            stack.callback(remove_drafts, job.folder / "checkpoints")  # when no process is left that writes one
            namespace = f"slime-{os.getpid()}-{time.time_ns()}"
            stack.enter_context(key_of_run())
            for dataset in job.config.eval.eval_datasets:
                if dataset.model is not None and dataset.model_key_env is not None:
                    add_key(dataset.model, dataset.model_key_env)
            session = stack.enter_context(Session(cluster.ray_address, namespace=namespace))
            if not session.own:
                inspect_nodes(job.manifest)
            device = device_of(job.config, num_gpus=cluster_gpus())
            layout = requested_layout(job.config, device, learner_ranks=learner_ranks)
            require_device_support(job.config, layout)
            if job.config.transport == "disk":
                stack.callback(shutil.rmtree, job.weights_folder, ignore_errors=True)
            placement = place(layout)
            stack.callback(session.end_in_order, placement.release)
            if not session.own:
                require_inputs(placement.nodes, job.inputs)
            resolved = cluster.model_copy(update={"device": "cuda" if device == "gpu" else "cpu"})
            job = replace(job, config=job.config.model_copy(update={"cluster": resolved}))
            started = Processes(job, placement, warn=warn, note=note, failures=failures, check=session.check_alive)
            stack.callback(session.end_in_order, started.servers.stop)
            yield started
        finally:
            interrupts.delay(interrupted=isinstance(sys.exception(), KeyboardInterrupt))


class Processes:
    """The processes of the run besides the driver (engines, learner, samplers), and the calls that are starting them.

    Arguments:
        job: with the device that the run uses, where the user's setting is ``auto``.

    Attributes:
        servers: every engine, of the policy and of auxiliary models, and the routers.
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        *,
        warn: Warn,
        failures: Failures,
        check: Callable[[], None] | None = None,
        note: Warn | None = None,
    ) -> None:
        self._job = job
        self._placement = placement
        self._on_gpus = job.config.cluster.device == "cuda"
        self._warn = warn
        self._failures = failures
        if self._on_gpus and (changed := allocator_environment(job.config)):
            warn(
                f"{' and '.join(changed)}: processes that share GPUs start with expandable_segments:False, because "
                "engines cannot release such memory and the learner cannot share it with them"
            )
        self._starting: list[Call[object]] = []
        self._monitors: list[Call[object]] = []
        self._restarts = (
            Restarts(job.config.engine.engine_max_restarts, warn=warn) if job.config.restarts_engines else None
        )
        background = (self._monitors, self._starting)
        self._wait = RunWait(job.config.watch, warn, also=background, recovery=self._restarts, check=check, note=note)
        self._eval_sampler: Actor[SamplerActor] | None = None
        self._address = head_address()
        site = Site(
            model=job.model,
            logs=job.logs,
            on_gpus=self._on_gpus,
            placements=placement.engines,
            auxiliary_placements=placement.auxiliary,
        )
        watch = Supervision(self._wait, self._monitors, reachable=self._address is not None, restarts=self._restarts)
        self.servers = EngineFleet(job.config, site, watch)

    def start_learner(self, checkpoints: Path) -> tuple[AnyLearner, DevicePool]:
        """Start every rank of the learner, if there are any; return the learner and the device pool."""
        if not self._placement.learner:
            return NoLearner(), DevicePool()
        ranks = self._start_ranks("learner", LearnerActor, self._placement.learner)
        config = self._job.config
        layout = ParallelLayout.of(config.parallel)
        learner = LearnerHandle(
            ranks,
            wait=self._wait,
            saving=SaveSettings(
                checkpoints,
                self._job.model,
                save_hf=config.checkpoint.save_hf,
                retention=Retention(
                    interval=config.checkpoint.save_interval,
                    total=config.rollout.num_rollout,
                    last=config.checkpoint.save_keep_last,
                    every=config.checkpoint.save_keep_every,
                ),
            ),
            data_ranks=[layout.data_rank(rank, world_size=len(ranks)) for rank in range(len(ranks))],
            checks_equal=config.weights.check_weight_update_equal,
            ahead=config.rollout.async_buffer_size,
            warn=self._warn,
            failures=self._failures,
            critic=self._start_ranks("critic", CriticActor, self._placement.critic),
            has_engines=self.servers.serves_policy,
            restarts=self._restarts,
        )
        is_colocated = config.cluster.colocate and self.servers.serves_policy
        devices = DevicePool(self._colocate(learner) if is_colocated else None)
        settings = learner_settings(self._job)
        self._starting += learner.setup(settings, reachable=self._address is not None)
        return learner, devices

    def _start_ranks(
        self, role: str, cls: Callable[[Manifest], W], placements: Sequence[ActorPlacement]
    ) -> ActorGroup[W]:
        launches = [self._launch(f"{role} rank {rank}", placement) for rank, placement in enumerate(placements)]
        return ActorGroup(tuple(start_actor(launch, cls, self._job.manifest) for launch in launches))

    def _colocate(self, learner: LearnerHandle) -> ColocatedDevices:
        """Wait until the engines have started, and release their devices, so that the learner can start."""
        self.servers.policy.register()
        devices = ColocatedDevices(self.servers.policy, learner)
        devices.vacate()
        return devices

    def start_sampler(self, learner: AnyLearner, *, trains: bool) -> SamplerHandle:
        """Start the sampler, which needs the addresses of the router and of auxiliary models. While the run waits for
        the sampler, ``learner`` publishes to engines that have restarted."""
        settings = sampler_settings(self._job, self.servers, trains=trains)
        actor = start_actor(self._launch("sampler"), SamplerActor, self._job.manifest)
        wait = self._wait
        take_metrics: Callable[[], dict[str, float]] = dict
        if self._restarts is not None:
            wait = replace(wait, check=partial(self._check_and_serve, self._restarts, learner.publish_again))
            take_metrics = self._restarts.take_counts
        sampler = SamplerHandle(actor, wait=wait, warn=self._warn, failures=self._failures, take_metrics=take_metrics)
        self._starting.append(sampler.setup(settings))
        if trains and self._job.config.eval.is_concurrent:
            actor = start_actor(self._launch("eval sampler"), SamplerActor, self._job.manifest)
            evaluating = self.servers.evaluating
            settings = sampler_settings(self._job, self.servers, trains=False)
            settings = eval_sampler_settings(settings, url=evaluating.ready_url(), num_engines=len(evaluating.engines))
            self._starting.append(actor.start(SamplerActor.setup, settings))
            self._eval_sampler = actor
        return sampler

    def _check_and_serve(self, restarts: Restarts, publish: Callable[[], None]) -> None:
        if self._wait.check is not None:
            self._wait.check()
        restarts.serve(publish)

    def add_concurrent_evaluation(self, sampler: SamplerHandle, learner: AnyLearner, track: Track) -> AnySampler:
        """Return ``sampler``, with concurrent evaluations if the run has them; to be called after :meth:`join`."""
        if self._eval_sampler is None:
            return sampler
        publish, evaluating = None, self.servers.evaluating
        if evaluating.engines and isinstance(learner, LearnerHandle):
            publish = learner.publish_for_evaluation
            settings = self._publisher_settings(evaluating)
            # These engines have no request in flight, and "retract" drops the cache of older weights.
            learner.connect(evaluating.urls(), replace(settings, pause_mode="retract"), only_evaluate=True)
        return ConcurrentEvalSampler(
            sampler,
            self._eval_sampler,
            config=self._job.config,
            report=track.evaluation,
            wait=self._wait,
            monitors=self._monitors,
            publish=publish,
        )

    def join(self, learner: AnyLearner) -> None:
        """Wait until everything has started, then connect the learner to the engines."""
        calls = [*self.servers.policy.starts, *self._starting]
        self._wait(calls, what="engines, learner and sampler to start")
        self._starting.clear()
        self.servers.policy.register()
        if isinstance(learner, LearnerHandle) and self.servers.serves_policy:
            learner.connect(self.servers.policy.urls(), self._publisher_settings(self.servers.policy))

    def _launch(self, label: str, placement: ActorPlacement | None = None) -> Launch:
        log = self._job.logs / f"{label.removeprefix('learner ').replace(' ', '-')}.log"
        return Launch(label, placement, rank_environment(self._job.config, on_gpu=self._on_gpus), log)

    def _publisher_settings(self, servers: ModelServers) -> PublisherSettings:
        """Make the settings of the publisher that sends weights to ``servers``; the first rank fills in its address."""
        config, ranks = self._job.config, servers.ranks
        gpus = self._wait(servers.engines.start(EngineActor.gpus), what="the engines' GPUs")
        holders = nearest_ranks(servers.placements, self._placement.learner)
        return PublisherSettings(
            model=self._job.model,
            dtype="bfloat16" if config.model.bf16 else "float32",
            bytes_limit=config.weights.update_weight_buffer_size,
            backend="nccl" if self._on_gpus else "gloo",
            devices_per_engine=ranks,
            transport=config.transport,
            disk_folder=self._job.weights_folder,
            engine_gpus=tuple(gpus) if all(gpus) and len(gpus) == len(ranks) else (),
            holders=holders if len(holders) == len(ranks) else (),
            pause_mode=config.rollout.pause_generation_mode,
            rearranges=self._on_gpus and rearranges_weights(config),
            resumes=not config.cluster.colocate,
        )


class DelayedInterrupts:
    """Delays Ctrl-C and SIGTERM while a run stops, because they ask for the stop that they would interrupt.

    ``with DelayedInterrupts() as interrupts:`` lets signals through until :meth:`delay` is called in the block. From
    then on to the end of the block:

    - The first signal prints a message. After the block it becomes a ``KeyboardInterrupt``, unless the block raised an
      error after which a run does not restart: that error is raised.
    - The second signal raises ``KeyboardInterrupt`` at once. If an interrupt began the clean-up, Ctrl-C counts as the
      second one; SIGTERM does not, because `timeout` and systemd send it twice, to the process and to its group.
    - A signal that was ignored before, such as Ctrl-C in the background of a shell, stays ignored.
    - In a thread other than the main one, where Python handles no signals, nothing is delayed.
    """

    def __init__(self) -> None:
        self._handlers: dict[signal.Signals, Any] = {}
        self._num_signals = 0
        self._is_interrupted = False

    def __enter__(self) -> Self:
        return self

    def delay(self, *, interrupted: bool = False) -> None:
        """Delay signals from here on.

        Arguments:
            interrupted: an interrupt is why the run stops.
        """
        self._is_interrupted = interrupted
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._on_signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._num_signals and (kind is None or isinstance(error, DEATHS)):
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        is_second = self._is_interrupted and number == signal.SIGINT
        if is_second or self._num_signals > DELAYED_SIGNALS:
            raise KeyboardInterrupt
        os.write(STDERR, STOPPING)  # the signal may have interrupted a print()
