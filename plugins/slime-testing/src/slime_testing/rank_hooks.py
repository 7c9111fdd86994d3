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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core import Place, TrainStep
from slime_core.errors import SlimeError
from slime_core.harness import RESTORE, STATE, ActivePlugin, LifecycleHooks, learner_info
from slime_core.harness.megatron import small_shard
from slime_core.modeling import ParallelLayout
from slime_core.types import JsonValue
from slime_testing.ranks import not_back

__all__ = ["WORLD_SIZE", "main"]

WORLD_SIZE = 2
METRICS = {"loss": 0.25, "grad_norm": 1.5, "lr": 1e-6}
"""Named as the learner names them."""


def main(folder: Path, rank: int) -> None:
    """Call every hook that ``folder/plugin.json`` names the plugin of, as rank ``rank``."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    plugin, options = ActivePlugin.from_json((folder / "plugin.json").read_text(encoding="utf-8"))
    store: Any = vars(dist)["FileStore"](str(folder / "store"), WORLD_SIZE)  # its stub does not export it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    hooks = plugin.hooks(Place.RANK, options, where=f"rank {rank}")
    Rank(hooks, store, rank).live()
    dist.destroy_process_group()


class ExampleSpec:
    """A model spec that builds nothing; hooks may set what an ``MBridgeSpec`` has to be set."""

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
        """No part of a model."""
        return []

    def load_weights(self, chunks: list[torch.nn.Module], folder: Path) -> None:
        """Nothing to fill."""

    def export_weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """No weights."""
        yield from ()


class Rank:
    """Calls the hooks in the order of a run, in step with the other rank."""

    def __init__(self, hooks: LifecycleHooks, store: Any, rank: int) -> None:
        self._hooks = hooks
        self._store = store
        self._rank = rank

    def live(self) -> None:
        """Two rollouts of one optimizer step each, and back to the checkpoint between them."""
        empty = learner_info(self._rank, WORLD_SIZE)
        model = torch.nn.Linear(4, 4)
        learner = replace(empty, model=(model,), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        self._call("slime_learner_start", learner=empty)
        self._ask("slime_model_spec", spec=ExampleSpec())
        self._ask("slime_loss_parts", learner=learner)
        self._train(TrainStep(rollout=0, step=0, learner=learner))
        self._in_step(STATE, self._lay_down_states)
        self._train(TrainStep(rollout=1, step=0, learner=learner))
        self._in_step(RESTORE, self._take_states_back)

    def _train(self, step: TrainStep) -> None:
        for role in ("reference", "actor"):
            self._call("slime_before_log_probs", role=role, learner=step.learner)
        shard, steps = small_shard(step.rollout)
        self._ask("slime_before_training", shard=shard, steps=steps)
        self._call("slime_before_train_step", step=step)
        self._call("slime_after_train_step", step=replace(step, metrics=dict(METRICS)))
        self._call("slime_after_weight_write", folder=Path() if self._rank == 0 else None, engine_urls=[])

    def _call(self, hook: str, **arguments: Any) -> None:
        self._in_step(hook, lambda: self._hooks.call(hook, **arguments))

    def _ask(self, hook: str, **arguments: Any) -> None:
        self._in_step(hook, lambda: self._hooks.answers(hook, **arguments))

    def _lay_down_states(self) -> None:
        if self._rank == 0:
            states = "{}"
            try:
                states = json.dumps(self._hooks.states())
            finally:  # the other rank waits for it
                self._store.set("states", states)

    def _take_states_back(self) -> None:
        states = json.loads(self._store.get("states"))
        self._hooks.restore(states)
        if self._rank == 0 and states:  # as in a run, only the state of rank 0 is saved
            again = self._hooks.states()
            if again != states:
                say(lost=not_back(Place.RANK, states, again))

    def _in_step(self, hook: str, run: Callable[[], object]) -> None:
        say(enter=hook)
        try:
            run()
        except SlimeError as failure:
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
