"""Replays one PPO rollout in several layouts of the learner and prints how far its critic is from one rank.

    python -m campaigns.critic [--no-mutants] [--json FILE]    half a minute; exit code 1: a bound broke

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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from campaigns.critic_ranks import Case, RanksDisagree, Task, replay
from campaigns.critic_reference import Outcome, in_plain_torch, make_models
from slime_core.modeling.layout import ParallelLayout
from tests.ranks import distance, prepare, relative

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
    critic: Any = import_module("slime_core.learner.critic")
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
    critic: Any = import_module("slime_core.learner.critic")

    class Unmarked(critic.ValueHead):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for parameter in self.parameters():
                parameter.sequence_parallel = False

    critic.ValueHead = Unmarked


MUTANTS: dict[str, tuple[Callable[[], None], Case]] = {
    "shifted": (shifted, CASES[0]),
    "doubled": (doubled, CASES[3]),
    "unmarked": (unmarked, CASES[3]),
}
"""Name -> what breaks the critic, and the case that has to notice; that of one rank is compared with plain torch."""


def broken(name: str, task: Task, alone: Outcome, plain: Outcome) -> Difference:
    """The differences of the mutant; infinite where its ranks disagree."""
    mutate, case = MUTANTS[name]
    try:
        found = replay(case, task, mutate)
    except RanksDisagree as error:
        return Difference(f"mutant {name}", math.inf, math.inf, math.inf, math.inf, str(error))
    return compare(f"mutant {name}", found, plain if case.ranks == 1 else alone)


# --- The table --------------------------------------------------------------------------------------------------------


def measure(folder: Path, mutants: Sequence[str]) -> list[Difference]:
    """One rank against plain torch, every case against one rank, a resumed one, a constant divisor, and mutants."""
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
        *(broken(name, task, alone, plain) for name in mutants),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--no-mutants", action="store_true", help="leave out the critics that are broken on purpose")
    options = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), () if options.no_mutants else tuple(MUTANTS))
    print("| layout | values | returns | worst metric | worst gradient of a weight |\n|---|---|---|---|---|")
    for row in rows:
        numbers = " | ".join(f"{number:.1e}" for number in (row.values, row.returns, row.metric, row.gradient))
        print(f"| {row.layout} | {numbers} ({row.worst}) |")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    sys.exit(any((row.largest <= BOUND) == row.layout.startswith("mutant") for row in rows))


if __name__ == "__main__":
    main()
