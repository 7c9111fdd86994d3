"""Replays one PPO rollout in several layouts of the learner and prints how far its critic is from one rank.

    python bench/critic.py [--json FILE]        half a minute on two idle cores; exit code 1 if a bound is broken

Two optimizer steps over ragged, partly masked samples, one of them removed; the second step clips values. Compared with
one rank: the values and the returns of every token, every metric of the critic, and the gradient of each of its weights
(relative L2 norm of the difference), head included. One rank in turn is compared with the backbone of Hugging Face
transformers, a linear head, a loop for the advantages and torch.autograd. Last, the critic is broken in a few ways:
each has to be noticed.

This process imports the engines once; the ranks are forked from it, fresh ones for every layout.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_core.config.schema import AlgorithmConfig, ClusterConfig, CriticConfig, OptimizerConfig, RunConfig
from slime_core.learner.layout import ParallelLayout
from slime_core.types import TrainBatch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.critic_by_hand import GAMMA, LAMBD, NUM_STEPS, Outcome, head_weights, in_plain_torch, make_models, shards
from bench.ranks import distance, free_address, learner_of, prepare, relative, run_ranks

ARCHITECTURE = "Qwen3ForCausalLM"
TIMEOUT_S = 90


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


CASES = (
    Case("DP1", 1),
    Case("DP2", 2),
    Case("TP2", 2, ParallelLayout(tensor=2)),
    Case("TP2, SP", 2, ParallelLayout(tensor=2, sequence=True)),
    Case("PP2", 2, ParallelLayout(pipeline=2)),
    Case("PP2, VPP2", 2, ParallelLayout(pipeline=2, virtual_pipeline=2)),
    Case("CP2", 2, ParallelLayout(context=2)),
    Case("PP2", 2, ParallelLayout(pipeline=2), model="tied"),
)
"""The first is what the others are compared with; tied embeddings have the same weights, but for the output layer."""

DIVIDED = Case("CP2", 2, ParallelLayout(context=2), divisor=7.0)
"""Compared with plain torch; responses have up to some thirty trained tokens."""

VALUE_CLIP = 0.02
SMOOTH = {"lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
"""Adam whose step is about proportional to the gradient, so that the second step starts from nearly equal weights."""
BOUND = 1e-5


@dataclass(frozen=True)
class Difference:
    """How far a case is from its single rank; relative numbers, metrics absolute where they are below 1."""

    layout: str
    values: float
    returns: float
    metric: float
    gradient: float
    worst: str

    @property
    def largest(self) -> float:
        """Of all the numbers."""
        return max(self.values, self.returns, self.metric, self.gradient)


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


class Apart(Exception):
    """Ranks disagree about what they both know."""


# --- One rank ---------------------------------------------------------------------------------------------------------


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
    whole_step, estimate = critic.step, learner._estimation._estimator.estimate
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

    learner._estimation._estimator.estimate = estimating
    critic.step, critic.trained.optimizer.step = step, optimizer_step
    return found


def gradients(trained: Any) -> dict[str, torch.Tensor]:
    """Of every weight of the critic; those of the head on the last pipeline stage only. Collective."""
    from slime_core.learner.gradients import named_gradients

    last = trained.chunks[-1]
    head = last._modules.pop("output_layer", None)  # it stands for no weight of a Hugging Face model
    found: dict[str, torch.Tensor] = named_gradients(trained._spec, trained.model)
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
        learner.sleep()
        learner.wake()
    shard = shards(case.layout.data_size(case.ranks), case.divisor)[case.layout.data_rank(rank, world_size=case.ranks)]
    for _ in range(task.before):
        learner.train(shard)
    found = record(learner, shard)
    learner.train(shard)
    if task.save is not None:
        (task.save / "torch_dist").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        learner.save(task.save)
    torch.save(vars(found), target)
    learner.close()


def replay(case: Case, task: Task, mutate: Callable[[], None] = lambda: None) -> Outcome:
    """The case on freshly forked ranks, put together.

    Raises:
        SystemExit: a rank failed or hung.
        Apart: ranks disagree.
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
            raise Apart(f"{case.name}: the ranks report different metrics")
        merge(whole.values, part.values, case)
        merge(whole.returns, part.returns, case)
        for mine, theirs in zip(whole.gradients, part.gradients, strict=True):
            merge(mine, theirs, case)
    return whole


def merge(whole: dict[Any, torch.Tensor], part: dict[Any, torch.Tensor], case: Case) -> None:
    """``whole`` also holds ``part``; what both hold is equal: ranks never drift apart."""
    wrong = [name for name in whole.keys() & part.keys() if not torch.equal(whole[name], part[name])]
    if wrong:
        raise Apart(f"{case.name}: the ranks disagree about {sorted(wrong)}")
    whole |= part


# --- The comparison ---------------------------------------------------------------------------------------------------


def compare(name: str, found: Outcome, expected: Outcome) -> Difference:
    """Over as many steps and metrics as ``expected`` has."""
    pairs = list(zip(found.metrics, expected.metrics, strict=False))
    per_weight = [
        (distance(mine[weight], theirs[weight]), f"{step}: {weight}")
        for step, (mine, theirs) in enumerate(zip(found.gradients, expected.gradients, strict=False))
        for weight in theirs
    ]
    metrics = [
        relative(mine[metric], theirs[metric]) if abs(theirs[metric]) > 1 else abs(mine[metric] - theirs[metric])
        for mine, theirs in pairs
        for metric in theirs
    ]
    return Difference(
        name,
        distance(joined(found.values), joined(expected.values)),
        distance(joined(found.returns), joined(expected.returns)),
        max(metrics),
        *max(per_weight),
    )


def joined(columns: dict[int, torch.Tensor]) -> torch.Tensor:
    return torch.cat([columns[index] for index in sorted(columns)])


# --- Mutants ----------------------------------------------------------------------------------------------------------


def shifted() -> None:
    """Each token gets the value of the position where it stands, not of the one before it."""
    from slime_core.learner.critic import critic

    right = critic._response_values
    critic._response_values = lambda micro, output: right(micro, output.roll(-1, dims=1))


def doubled() -> None:
    """Every tensor-parallel rank hands its gradient of all values back, and they are added up."""
    from megatron.core import tensor_parallel

    right = tensor_parallel.gather_from_sequence_parallel_region
    tensor_parallel.gather_from_sequence_parallel_region = lambda values, **_: right(
        values, tensor_parallel_output_grad=True
    )


def unmarked() -> None:
    """The gradients of a head whose tokens are shared are not added up."""
    from slime_core.learner.critic import value_head

    class Unmarked(value_head.ValueHead):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for parameter in self.parameters():
                parameter.sequence_parallel = False

    value_head.ValueHead = Unmarked


MUTANTS: dict[str, tuple[Callable[[], None], Case]] = {
    "shifted": (shifted, CASES[0]),
    "doubled": (doubled, CASES[3]),
    "unmarked": (unmarked, CASES[3]),
}
"""Name -> what breaks the critic, and the case that has to notice; that of one rank is compared with plain torch."""


def broken(name: str, task: Task, alone: Outcome, plain: Outcome) -> Difference:
    """How far the mutant is off; infinitely far where its ranks drift apart."""
    mutate, case = MUTANTS[name]
    try:
        found = replay(case, task, mutate)
    except Apart as apart:
        return Difference(f"mutant {name}", math.inf, math.inf, math.inf, math.inf, str(apart))
    return compare(f"mutant {name}", found, plain if case.ranks == 1 else alone)


# --- The table --------------------------------------------------------------------------------------------------------


def measure(folder: Path) -> list[Difference]:
    """One rank against plain torch, every case against one rank, a resumed one, a constant divisor, and the mutants."""
    make_models(folder)
    task, saved = Task(folder), folder / "saved"
    alone, plain = replay(CASES[0], replace(task, save=saved)), in_plain_torch(folder)
    resumed = [replay(case, replace(task, load=saved)) for case in (CASES[0], CASES[3])]
    return [
        compare("Hugging Face", alone, plain),
        *(compare(case.name, replay(case, task), alone) for case in CASES[1:]),
        compare("resumed, TP2, SP", resumed[1], resumed[0]),
        compare("resumed, DP1", resumed[0], replay(CASES[0], replace(task, before=1))),
        compare(DIVIDED.name, replay(DIVIDED, task), in_plain_torch(folder, DIVIDED.divisor)),
        *(broken(name, task, alone, plain) for name in MUTANTS),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name))
    print("| layout | values | returns | worst metric | worst gradient of a weight |\n|---|---|---|---|---|")
    for row in rows:
        numbers = " | ".join(f"{number:.1e}" for number in (row.values, row.returns, row.metric, row.gradient))
        print(f"| {row.layout} | {numbers} ({row.worst}) |")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    sys.exit(any((row.largest <= BOUND) == row.layout.startswith("mutant") for row in rows))


if __name__ == "__main__":
    main()
