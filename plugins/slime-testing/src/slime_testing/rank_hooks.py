"""A learner rank that only calls a plugin's hooks: the program of two processes that share a gloo group.

It writes a JSON line when it enters and leaves a hook, and dumps its stacks on SIGUSR1. Between two hooks the ranks
wait for each other through a file store, never through a collective: a collective that one rank's hook did not join
would be matched with it.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core import Place, TrainStep
from slime_core.errors import SlimeError
from slime_core.modeling import ParallelLayout
from slime_core.types import JsonValue
from slime_testing.harness import RESTORE, STATE, ActivePlugin, Hooks, learner_info
from slime_testing.harness.megatron import small_shard
from slime_testing.ranks import RUN, state_mismatch

__all__ = ["WORLD_SIZE", "main"]

WORLD_SIZE = 2
METRICS = {"loss": 0.25, "grad_norm": 1.5, "lr": 1e-6}
"""Metrics with the learner's names."""


def main(folder: Path, rank: int) -> None:
    """Call every hook of the plugin in ``folder/plugin.json``, as rank ``rank``."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    plugin, options = ActivePlugin.from_json((folder / "plugin.json").read_text(encoding="utf-8"))
    store: Any = vars(dist)["FileStore"](str(folder / "store"), WORLD_SIZE)  # its stub does not export it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    hooks = plugin.hooks(Place.RANK, options, where=f"rank {rank}")
    Rank(hooks, store, rank, folder=folder / RUN).run_hooks()
    dist.destroy_process_group()


class ExampleSpec:
    """A model spec that builds nothing; hooks may set the attributes of an ``MBridgeSpec``."""

    layers: Any = None
    provider: Any = None

    def build(
        self,
        config: Mapping[str, JsonValue],
        *,
        dtype: torch.dtype,
        parallel: ParallelLayout,
        overrides: Mapping[str, JsonValue] | None = None,
    ) -> list[torch.nn.Module]:
        """Return no model chunks."""
        return []

    def load_weights(self, chunks: list[torch.nn.Module], folder: Path) -> None:
        """Do nothing."""

    def export_weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield no weights."""
        yield from ()


class Rank:
    """Calls the hooks in the order of a run, synchronised with the other rank."""

    def __init__(self, hooks: Hooks, store: Any, rank: int, *, folder: Path) -> None:
        self._hooks = hooks
        self._folder = folder
        self._store = store
        self._rank = rank

    def run_hooks(self) -> None:
        """Run two rollouts of one optimizer step each, then restore the state saved between them."""
        empty = replace(learner_info(self._rank, WORLD_SIZE), folder=self._folder)
        model = torch.nn.Linear(4, 4)
        learner = replace(empty, model=(model,), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        self._call("slime_learner_start", learner=empty)
        self._call("slime_model_spec", spec=ExampleSpec())
        self._call("slime_loss_parts", learner=learner)
        self._train(TrainStep(rollout=0, step=0, learner=learner))
        self._synchronised(STATE, self._save_states)
        self._train(TrainStep(rollout=1, step=0, learner=learner))
        self._synchronised(RESTORE, self._restore_states)

    def _train(self, step: TrainStep) -> None:
        for role in ("reference", "actor"):
            self._call("slime_before_log_probs", role=role, learner=step.learner)
        shard, steps = small_shard(step.rollout)
        self._call("slime_before_training", shard=shard, steps=steps)
        self._call("slime_before_train_step", step=step)
        self._call("slime_after_train_step", step=replace(step, metrics=dict(METRICS)))
        self._call("slime_after_weight_write", folder=self._folder if self._rank == 0 else None, engine_urls=[])

    def _call(self, hook: str, **arguments: Any) -> None:
        self._synchronised(hook, lambda: self._hooks.call(hook, **arguments))

    def _save_states(self) -> None:
        if self._rank == 0:
            states = "{}"
            try:
                states = json.dumps(self._hooks.states())
            finally:  # the other rank waits for this key
                self._store.set("states", states)

    def _restore_states(self) -> None:
        states = json.loads(self._store.get("states"))
        self._hooks.restore(states)
        if self._rank == 0 and states:  # as in a run, only the state of rank 0 is saved
            again = self._hooks.states()
            if again != states:
                report(lost=state_mismatch(Place.RANK, states, again))

    def _synchronised(self, hook: str, run: Callable[[], object]) -> None:
        report(enter=hook)
        try:
            run()
        except SlimeError as failure:
            report(failed=str(failure))
        for warning in self._hooks.failures.take().warnings:
            report(failed=warning)
        report(leave=hook)
        number = self._store.add(f"left {hook}", 1)
        turn = f"all left {hook} {(number + 1) // WORLD_SIZE}"
        if number % WORLD_SIZE == 0:
            self._store.set(turn, "")
        self._store.wait([turn], timedelta(days=1))  # the parent process enforces the time limit


def report(**what: str) -> None:
    """Write one line for the parent process."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
