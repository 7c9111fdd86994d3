"""Starts the processes of a run, runs the loop, and stops them, also after a failure.

    Ray session, placement
      engines    one actor each; the server it starts is a process of its own
      router     in front of the engines
      sampler    one actor; another for concurrent evaluations
      learner    one actor a rank; a separate critic has actors of its own

Engines, learner and sampler start at the same time, so the start takes as long as the slowest of them. Only where
learner and engines share devices does the learner wait until the engines have started and released them. A run that
only generates starts no learner; one that only trains starts neither engines nor router.

    job.py         what to run, and the settings of each process
    processes.py   starts the processes, waits for them, stops them; delays Ctrl-C while it stops them
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slime_core.checkpoint.folder import Checkpoint, RunState
from slime_core.config.schema import RunConfig
from slime_core.config.settings import core_values
from slime_core.learner.actor import LearnerHandle, manifest_record
from slime_core.loop import is_due, train
from slime_core.plugins.contracts import Place, RunInfo
from slime_core.plugins.lifecycle import Failures, LifecycleHooks, lifetime, unclaimed_states
from slime_core.runtime.launch.job import Job
from slime_core.runtime.launch.processes import AnySampler, Warn, processes
from slime_core.track.track import Track

__all__ = ["Job", "evaluate", "run"]


def run(job: Job, *, track: Track, resume: Checkpoint | None = None) -> RunState:
    """Train until the run has had all its rollouts; returns where it then stands.

    Arguments:
        resume: continue from this checkpoint.
    """
    hooks = LifecycleHooks(job.registry, place=Place.DRIVER, options=job.options)
    ranks = job.config.num_started_ranks
    with processes(job, learner_ranks=ranks, warn=track.warn, failures=hooks.failures) as started:
        with track.timer("start"):
            started.start_engines()
            learner, devices = started.start_learner(track.record.checkpoints)
            handle = started.start_sampler(trains=True)
            started.join(learner)
        sampler = started.add_concurrent_evaluation(handle, learner, track)
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
    """The settings of the loop: a run that only generates or only trains publishes nothing after the start.

    Arguments:
        owes: evaluate the start weights, whatever ``skip_eval_before_train`` says.
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
    """Restore weights, data and plugins of every process from ``resume``."""
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
    with processes(job, learner_ranks=ranks, warn=warn, failures=Failures()) as started:
        started.start_engines()
        learner, devices = started.start_learner(job.logs)
        sampler = started.start_sampler(trains=False)
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
