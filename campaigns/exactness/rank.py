"""A learner rank that trains one case after another in one process group."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from campaigns.exactness import cases as given
from campaigns.exactness.cases import Case
from campaigns.exactness.layouts import Layout
from campaigns.exactness.outcome import Outcome
from campaigns.exactness.rollout import Rollout
from tests.ranks import learner_of

__all__ = ["train_all"]

DENSE, MIXTURE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"


def train_all(
    layout: Layout,
    cases: Sequence[Case],
    rollout: Rollout,
    *,
    rank: int,
    address: str,
    models: Path,
    target: Path,
) -> None:
    """Write the outcome of each case, and the seconds it took, into ``target``; ``models`` is their folder."""
    _join_once()
    for case in cases:
        began = time.monotonic()
        learner = _build(layout, case, rank, address, models / case.model)
        found = _record(learner, models / case.model / "second")
        parts = given.shards(case, rollout, layout.parallel.data_size(layout.ranks))
        found.metrics.append(learner.train(parts[layout.parallel.data_rank(rank, world_size=layout.ranks)]))
        found.save(target / f"{case.name}.{rank}.pt")
        (target / f"{case.name}.{rank}.seconds").write_text(str(time.monotonic() - began))
    learner.close()


def _join_once() -> None:
    """The first learner of this process joins the group, the others find it; every one starts from the same seed."""
    module: Any = import_module("slime_core.learner.rank")
    join: Callable[[Any], torch.device] = module.prepare_process

    def prepare(settings: Any) -> torch.device:
        if not dist.is_initialized():
            return join(settings)
        random.seed(settings.config.run.seed)
        np.random.seed(settings.config.run.seed)
        torch.manual_seed(settings.config.run.seed)
        return torch.device("cpu")

    module.prepare_process = prepare


def _architecture(case: Case) -> str:
    """Return the architecture whose model spec builds the case."""
    return MIXTURE if case.model == "experts" else DENSE


def _build(layout: Layout, case: Case, rank: int, address: str, folder: Path) -> Any:
    from slime_core.learner.objective import NamedCorrection

    learner = learner_of(
        given.run_config(case, folder),
        folder / "actor",
        _architecture(case),
        rank=rank,
        ranks=layout.ranks,
        address=address,
        layout=layout.parallel,
        plugins=case.plugins,
        policy_loss=case.policy_loss,
        options=given.plugin_options(case),
    )
    if case.user_loss:
        learner._objective.policy_loss = given.sequence_loss
    if case.estimated:
        corrections = learner._objective.corrections
        corrections._named += (NamedCorrection(given.sequence_correction, "sequence correction"),)
        learner._estimation.estimator = given.Counting(learner._estimation.estimator)
    return learner


def _record(learner: Any, second: Path) -> Outcome:
    """Filled as the learner trains; steps after the first one start from the weights in ``second``."""
    from campaigns.gradients import named_gradients

    found, finish, whole_step = Outcome(), learner.actor.optimizer.step, learner._step

    def weights() -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in learner.export_weights()}

    def optimizer_step() -> Any:
        found.gradients.append(named_gradients(learner.actor._spec.spec, learner.actor.model))
        return finish()

    def step(*arguments: Any, **options: Any) -> dict[str, float]:
        if found.metrics:
            learner.actor._spec.load_weights(learner.actor.chunks, second)
        before = weights()
        metrics: dict[str, float] = whole_step(*arguments, **options)
        found.metrics.append(metrics)
        found.changes.append({name: weight - before[name] for name, weight in weights().items()})
        return metrics

    learner.actor.optimizer.step, learner._step = optimizer_step, step
    return found
