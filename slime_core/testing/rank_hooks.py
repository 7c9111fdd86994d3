"""A learner rank that does nothing but call a plugin's hooks: the program of one of two processes that share gloo.

It writes what it enters and leaves, one JSON object a line, and dumps its stacks on SIGUSR1. Between two hooks the
ranks wait for each other through a file, never through a collective: one that a hook did not join would find its match
there.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core.config.schema import RunConfig
from slime_core.config.settings import core_values
from slime_core.errors import PluginError
from slime_core.plugins.contracts import LearnerInfo, Place, TrainStep
from slime_core.plugins.hooks import RESTORE, STATE
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.plugins.manifest import Manifest, attach

__all__ = ["WORLD_SIZE", "main"]

WORLD_SIZE = 2
METRICS = {"train/loss": 0.25, "train/grad_norm": 1.5}


def main(folder: Path, rank: int) -> None:
    """Call every hook that ``folder/plugin.json`` names the plugin of, as rank ``rank``."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    given = json.loads((folder / "plugin.json").read_text(encoding="utf-8"))
    registry = attach(Manifest.from_json(given["manifest"]))
    options_class = registry.options.get(given["plugin"])
    options = options_class.model_validate_json(given["options"]) if options_class and given["options"] else None
    store: Any = vars(dist)["FileStore"](str(folder / "store"), WORLD_SIZE)  # its stub does not export it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    hooks = LifecycleHooks(registry, place=Place.RANK, options={given["plugin"]: options}, where=f"rank {rank}")
    Rank(hooks, store, rank).live()
    dist.destroy_process_group()


class Rank:
    """Calls the hooks in the order of a run, in step with the other rank."""

    def __init__(self, hooks: LifecycleHooks, store: Any, rank: int) -> None:
        self._hooks, self._store, self._rank = hooks, store, rank

    def live(self) -> None:
        """One optimizer step, from the start of the process groups to a resumed checkpoint."""
        empty = LearnerInfo(self._rank, WORLD_SIZE, core_values(RunConfig()))
        model = torch.nn.Linear(4, 4)
        learner = replace(empty, model=(model,), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        step = TrainStep(rollout=0, step=0, learner=learner)
        call = self._hooks.call
        self._in_step("slime_learner_start", lambda: call("slime_learner_start", learner=empty))
        before = "slime_before_log_probs"
        self._in_step(before, lambda: call(before, role="actor", learner=learner))
        self._in_step(before, lambda: call(before, role="reference", learner=learner))
        self._in_step("slime_before_train_step", lambda: call("slime_before_train_step", step=step))
        done = replace(step, metrics=METRICS)
        self._in_step("slime_after_train_step", lambda: call("slime_after_train_step", step=done))
        self._in_step(STATE, self._lay_down_states)
        self._in_step(RESTORE, lambda: self._hooks.restore(json.loads(self._store.get("states"))))

    def _lay_down_states(self) -> None:
        if self._rank == 0:
            self._store.set("states", json.dumps(self._hooks.states()))

    def _in_step(self, hook: str, run: Callable[[], None]) -> None:
        say(enter=hook)
        try:
            run()
        except PluginError as failure:
            say(failed=str(failure))
        for warning in self._hooks.failures.take().warnings:
            say(failed=warning)
        say(leave=hook)
        number = self._store.add(f"left {hook}", 1)
        turn = f"all left {hook} {(number + 1) // WORLD_SIZE}"
        if number % WORLD_SIZE == 0:
            self._store.set(turn, "")
        self._store.wait([turn], timedelta(days=1))  # the parent ends what takes too long


def say(**what: str) -> None:
    """One line for the parent."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
