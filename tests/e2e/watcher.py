"""A single-file plugin that implements every lifecycle hook and writes down what it saw."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from slime_core import hookimpl

STATE = {"calls": 0}


class Options(BaseModel):
    model_config = ConfigDict(frozen=True)

    folder: str = Field(".", description="Where to write what was seen.")
    breaks: bool = Field(False, description="Raise in the hook before a train step.")


@hookimpl
def slime_register(add):
    add.options(Options)


def note(options, hook, **what):
    STATE["calls"] += 1
    print(f"watcher prints {hook}")
    logging.getLogger("watcher").info("watcher logs %s", hook)
    line = json.dumps({"hook": hook, "pid": os.getpid(), **what})
    with (Path(options.folder) / "seen.jsonl").open("a") as file:
        file.write(line + "\n")


@hookimpl
def slime_run_start(run, options):
    note(options, "run_start", step=run.step, total=run.num_rollout, lr=run.settings["lr"])


@hookimpl
def slime_run_end(error, options):
    note(options, "run_end", error=None if error is None else str(error))


@hookimpl
def slime_before_rollout(rollout, groups, options):
    note(options, "before_rollout", rollout=rollout, samples=[len(group) for group in groups])


@hookimpl
def slime_after_rollout(rollout, samples, options):
    note(options, "after_rollout", rollout=rollout, rewarded=all(sample.reward is not None for sample in samples))


@hookimpl
def slime_learner_start(learner, options):
    note(options, "learner_start", rank=learner.rank, world=learner.world_size, chunks=len(learner.model))


@hookimpl
def slime_before_log_probs(role, learner, options):
    weights = sum(float(parameter.detach().double().sum()) for parameter in learner.model[0].parameters())
    note(options, "before_log_probs", rank=learner.rank, role=role, weights=weights)


@hookimpl
def slime_before_train_step(step, options):
    note(options, "before_train_step", rank=step.learner.rank, rollout=step.rollout, step=step.step)
    if options.breaks and step.learner.rank == 1:
        raise ValueError("rank 1 has had enough")


@hookimpl
def slime_after_train_step(step, options):
    note(options, "after_train_step", rank=step.learner.rank, loss=step.metrics["loss"])
    if step.learner.rank == 0:
        raise RuntimeError("no plot")


@hookimpl
def slime_after_weight_sync(version, options):
    note(options, "after_weight_sync", version=version)


@hookimpl
def slime_checkpoint_state(place, options):
    note(options, "checkpoint_state", place=place)
    return dict(STATE)


@hookimpl
def slime_checkpoint_restore(place, state, options):
    note(options, "checkpoint_restore", place=place, state=dict(state))
