"""One PPO rollout in one layout of the learner, on freshly forked ranks: what ``critic.py`` compares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from campaigns.critic_reference import GAMMA, LAMBD, NUM_STEPS, Outcome, head_weights, shards
from slime_core.config.learning import AlgorithmConfig, CriticConfig, OptimizerConfig
from slime_core.config.schema import ClusterConfig, RunConfig
from slime_core.modeling.layout import ParallelLayout
from slime_core.types import TrainBatch
from tests.checkpoints import write_copies
from tests.ranks import free_address, learner_of, run_ranks

ARCHITECTURE = "Qwen3ForCausalLM"
TIMEOUT_S = 90
VALUE_CLIP = 0.02
SMOOTH: dict[str, Any] = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
"""Adam whose step is about proportional to the gradient, so that the second step starts from nearly equal weights."""


@dataclass(frozen=True)
class Case:
    """One layout on some ranks; ``model`` is ``fresh`` or ``tied``, ``divisor`` one for all responses or None."""

    layout_name: str
    ranks: int
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    model: str = "fresh"
    divisor: float | None = None

    @property
    def name(self) -> str:
        """With what is unusual about it."""
        name = self.layout_name if self.model == "fresh" else f"{self.layout_name}, {self.model}"
        return name if self.divisor is None else f"{name}, constant divisor"


@dataclass(frozen=True)
class Task:
    """What the ranks of a case do.

    Arguments:
        models: folder of :func:`make_models`; they leave there what they have to say.
        before: how often the rollout is trained before it is recorded.
        save: folder for a checkpoint after the rollout; None: none is written.
        load: checkpoint to continue from, after a nap; None: the start weights.
    """

    models: Path
    before: int = 0
    save: Path | None = None
    load: Path | None = None


class RanksDisagree(Exception):
    """Ranks hold different values of the same quantity."""


def build(case: Case, rank: int, address: str, folder: Path) -> Any:
    """A learner with an actor and a critic whose head has weights."""
    config = RunConfig(
        cluster=ClusterConfig(device="cpu"),
        algorithm=AlgorithmConfig(advantage_estimator="ppo", gamma=GAMMA, lambd=LAMBD),
        optimizer=OptimizerConfig(**SMOOTH),
        critic=CriticConfig(value_clip=VALUE_CLIP),
    )
    learner = learner_of(
        config,
        folder / case.model,
        ARCHITECTURE,
        rank=rank,
        ranks=case.ranks,
        address=address,
        layout=case.layout,
        plugins=["ppo"],
    )
    head = getattr(learner.critic.trained.chunks[-1], "output_layer", None)
    if head is not None:
        with torch.no_grad():
            for parameter, weight in zip(head.parameters(), head_weights(head.weight.size(1)), strict=True):
                parameter.copy_(weight)
    return learner


def record(learner: Any, shard: TrainBatch) -> Outcome:
    """Filled as the learner trains ``shard``."""
    found, critic = Outcome(), learner.critic
    whole_step, estimate = critic.step, learner._estimation.estimator.estimate
    finish = critic.trained.optimizer.step

    def estimating(batch: Any, reduce: Any) -> Any:
        result, lengths = estimate(batch, reduce), batch.lengths_B.tolist()
        found.values |= dict(zip(shard.indices_B.tolist(), batch.values_U.split(lengths), strict=True))
        found.returns |= dict(zip(shard.indices_B.tolist(), result.returns_U.split(lengths), strict=True))
        return result

    def optimizer_step() -> Any:
        found.gradients.append(gradients(critic.trained))
        return finish()

    def step(*arguments: Any, **options: Any) -> dict[str, float]:
        found.metrics.append(whole_step(*arguments, **options))
        return found.metrics[-1]

    learner._estimation.estimator.estimate = estimating
    critic.step, critic.trained.optimizer.step = step, optimizer_step
    return found


def gradients(trained: Any) -> dict[str, torch.Tensor]:
    """Of every weight of the critic; those of the head on the last pipeline stage only. Collective."""
    from campaigns.gradients import named_gradients

    last = trained.chunks[-1]
    head = last._modules.pop("output_layer", None)  # it stands for no weight of a Hugging Face model
    found: dict[str, torch.Tensor] = named_gradients(trained._spec.spec, trained.model)
    if head is not None:
        last._modules["output_layer"] = head
        found |= {f"head.{name}": parameter.main_grad.clone() for name, parameter in head.named_parameters()}
    return found


def carry_out(case: Case, rank: int, address: str, task: Task, target: Path, mutate: Callable[[], None]) -> None:
    """Runs in a forked process: trains the shard of ``rank``, and writes what it found to ``target``."""
    mutate()
    learner = build(case, rank, address, task.models)
    if task.load is not None:
        learner.load(task.load)
        learner.offload()
        learner.onload()
    shard = shards(case.layout.data_size(case.ranks), case.divisor)[case.layout.data_rank(rank, world_size=case.ranks)]
    for _ in range(task.before):
        learner.train(shard)
    found = record(learner, shard)
    learner.train(shard)
    if task.save is not None:
        write_copies(learner.copy(task.save))
    torch.save(vars(found), target)
    learner.close()


def replay(case: Case, task: Task, mutate: Callable[[], None] = lambda: None) -> Outcome:
    """The case on freshly forked ranks, put together.

    Raises:
        SystemExit: a rank failed or hung.
        RanksDisagree: two ranks hold different values of the same quantity.
    """
    address = free_address()
    targets = [task.models / f"rank-{rank}.pt" for rank in range(case.ranks)]

    def run(rank: int) -> None:
        carry_out(case, rank, address, task, targets[rank], mutate)

    run_ranks(case.name, case.ranks, run, limit_s=TIMEOUT_S)
    parts = [Outcome(**torch.load(target, weights_only=True)) for target in targets]
    whole = Outcome(metrics=parts[0].metrics, gradients=[{} for _ in range(NUM_STEPS)])
    for part in parts:
        if part.metrics != whole.metrics:
            raise RanksDisagree(f"{case.name}: the ranks report different metrics")
        merge(whole.values, part.values, case)
        merge(whole.returns, part.returns, case)
        for mine, theirs in zip(whole.gradients, part.gradients, strict=True):
            merge(mine, theirs, case)
    return whole


def merge(whole: dict[Any, torch.Tensor], part: dict[Any, torch.Tensor], case: Case) -> None:
    """Add ``part`` to ``whole``; values that both hold must be equal."""
    wrong = [name for name in whole.keys() & part.keys() if not torch.equal(whole[name], part[name])]
    if wrong:
        raise RanksDisagree(f"{case.name}: the ranks disagree about {sorted(wrong)}")
    whole |= part
