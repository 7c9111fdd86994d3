"""Holds every model family in several layouts against Hugging Face transformers, and against real engines.

    python -m campaigns.families [--json FILE]    layouts; exit code 1: a bound broke
    python -m campaigns.families --engines FOLDER    trainer and engine; finished runs are only read

Layouts: tiny random models of every family. The learner trains one step on samples whose ``rollout_log_probs`` are
those of transformers, so its own metrics say how far its log-probabilities are from them; gradients are compared under
their Hugging Face names, the exported weights with the file, bit for bit, and what the optimizer's step adds to them
with Adam's formula for the gradients of transformers. In the cases called ``replay`` every token is given random
experts, in the learner by ``use_rollout_routing_replay`` and in transformers by hand.

Engines: runs of ``slime run`` with random rewards and the parity gate, so that weights move and are published. The
log-probs of the last rollout, from an updated engine, are compared with those of a fresh server of the saved folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from campaigns.families_reference import Expected, advantage, expect
from slime_core.config.learning import LearnerConfig, OptimizerConfig
from slime_core.config.schema import ClusterConfig, RunConfig
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, TrainBatch
from tests.engines.families import FAMILIES, ROLLOUTS, fresh_server_difference, live_run, write
from tests.ranks import distance, free_address, learner_of, prepare, run_ranks

BOUND = 1e-5
"""Largest relative difference in float32 that counts as equal."""

TIMEOUT_S, MAX_TOKENS = 120, 80
OPTIMIZER = OptimizerConfig(lr=100.0, weight_decay=0.0, adam_eps=1e-3)
"""A rate above which the rounding of weights does not show, and an epsilon above the rounding of gradients."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BIAS = "correction_bias"
"""In the names of what routers add to choose experts, which is not trained."""

PARTS = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}


@dataclass(frozen=True)
class Case:
    """A family in a layout; ``replays``: with given routes."""

    family: str
    layout_name: str
    ranks: int = 1
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    replays: bool = False
    overrides: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Family, layout, and what is unusual."""
        return f"{self.family}: {self.layout_name}{', replay' if self.replays else ''}"


TP2, SP2 = ParallelLayout(tensor=2), ParallelLayout(tensor=2, sequence=True)
PP2, EP2, CP2 = ParallelLayout(pipeline=2), ParallelLayout(expert=2), ParallelLayout(context=2)
SP2_EP2 = ParallelLayout(tensor=2, expert=2, sequence=True)
INTERLEAVED = ParallelLayout(pipeline=2, virtual_pipeline=2)
MIXTURE = "qwen3_moe"
DENSE = ("qwen3", "qwen2, tied", "llama", "llama, scaled", "glm4")
MIXTURES = (MIXTURE, "glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2", "moonlight")

CUTS = (("TP2, SP", 2, SP2), ("PP2", 2, PP2), ("EP2", 2, EP2), ("TP2 x EP2, SP", 4, SP2_EP2))
REPLAY: Callable[..., Case] = partial(Case, MIXTURE, replays=True)

CASES = (
    *(Case(family, "one rank") for family in FAMILIES),
    *(Case(family, name, 2, layout) for family in DENSE for name, layout in (("TP2", TP2), ("PP2", PP2))),
    Case("qwen2, untied", "PP2", 2, PP2),
    *(Case(family, name, ranks, layout) for family in MIXTURES for name, ranks, layout in CUTS),
    Case("qwen3_moe, not normed, tied", "PP2", 2, PP2),
    REPLAY("one rank"),
    REPLAY("one rank, recompute", overrides=tuple(RECOMPUTE.items())),
    REPLAY("one rank, recompute moe", overrides=tuple(PARTS.items())),
    REPLAY("TP2, SP", 2, SP2),
    REPLAY("EP2", 2, EP2),
    REPLAY("CP2", 2, CP2),
    REPLAY("PP2, VPP2, recompute", 2, INTERLEAVED, overrides=tuple(RECOMPUTE.items())),
)


@dataclass(frozen=True)
class Difference:
    """How far a case is from transformers.

    Arguments:
        mean, largest: of the absolute differences of log-probabilities, in nats.
        gradient: largest relative L2 norm of the difference of one weight's gradient.
        worst: the weight where that is.
        weights: how many exported weights differ from the file in any bit, missing ones included.
        step: as ``gradient``, of what the optimizer's step adds to a weight.
        seconds: of the whole case, start of the ranks included.
    """

    case: str
    ranks: int
    mean: float
    largest: float
    gradient: float
    worst: str
    weights: int
    step: float
    seconds: float


# --- One rank ---------------------------------------------------------------------------------------------------------


def shards(samples: Sequence[Sample], num_ranks: int, *, replays: bool) -> list[TrainBatch]:
    advantages_B = np.array([advantage(sample) for sample in samples], np.float32)
    plan = BatchPlan(num_ranks=num_ranks, max_tokens=MAX_TOKENS)
    return make_shards(samples, advantages_B, plan, rollout=0, temperature=1.0, with_routes=replays)


def build(case: Case, rank: int, address: str, folder: Path) -> Any:
    architecture = f"{FAMILIES[case.family][0]}ForCausalLM"
    config = RunConfig(
        cluster=ClusterConfig(device="cpu"),
        optimizer=OPTIMIZER,
        learner=LearnerConfig(use_rollout_routing_replay=case.replays),
    )
    with overridden(case.overrides):
        return learner_of(
            config, folder, architecture, rank=rank, ranks=case.ranks, address=address, layout=case.layout
        )


@contextmanager
def overridden(overrides: tuple[tuple[str, Any], ...]) -> Iterator[None]:
    """Inside, models are built with these fields of Megatron's config, which a run gives by flags."""
    from slime_core.modeling.spec import MBridgeSpec

    whole = MBridgeSpec.build

    def build(self: Any, model: Any, **options: Any) -> Any:
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in overrides}
        return whole(self, model, **options | {"overrides": {**options["overrides"], **fields}})

    MBridgeSpec.build = build  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        MBridgeSpec.build = whole  # type: ignore[method-assign]


def carry_out(case: Case, samples: list[Sample], rank: int, address: str, folder: Path, target: Path) -> None:
    """Runs in a forked process: trains the shard of ``rank``, and writes what it found to ``target``."""
    from campaigns.gradients import named_gradients

    learner = build(case, rank, address, folder)
    gradients: dict[str, torch.Tensor] = {}
    finish = learner.actor.optimizer.step

    def optimizer_step() -> Any:
        gradients.update(named_gradients(learner.actor._spec.spec, learner.actor.model))
        return finish()

    learner.actor.optimizer.step = optimizer_step
    weights = {name: weight.clone() for name, weight in learner.export_weights()}
    parts = shards(samples, case.layout.data_size(case.ranks), replays=case.replays)
    metrics = learner.train(parts[case.layout.data_rank(rank, world_size=case.ranks)])
    step = {name: weight - weights[name] for name, weight in learner.export_weights()}
    torch.save({"metrics": metrics, "gradients": gradients, "weights": weights, "step": step}, target)
    learner.close()


# --- All ranks --------------------------------------------------------------------------------------------------------


def replay(case: Case, samples: list[Sample], folder: Path, target: Path) -> dict[str, Any]:
    """The case on freshly forked ranks; what rank 0 found.

    Raises:
        SystemExit: a rank failed or hung; its traceback is on standard error.
    """
    address = free_address()
    files = [target / f"rank-{rank}.pt" for rank in range(case.ranks)]

    def run(rank: int) -> None:
        carry_out(case, samples, rank, address, folder, files[rank])

    run_ranks(case.name, case.ranks, run, limit_s=TIMEOUT_S)
    found: dict[str, Any] = torch.load(files[0], weights_only=True)
    return found


def compare(case: Case, found: dict[str, Any], expected: Expected, folder: Path, seconds: float) -> Difference:
    from safetensors.torch import load_file

    if any(step.any() for name, step in found["step"].items() if BIAS in name):
        sys.exit(f"{case.name}: the optimizer moves the biases of routers")
    gradients, steps = (without_biases(found[name]) for name in ("gradients", "step"))
    if gradients.keys() != expected.gradients.keys():
        sys.exit(f"{case.name}: gradients of other weights: {gradients.keys() ^ expected.gradients.keys()}")
    distances = [(distance(gradient, expected.gradients[name]), name) for name, gradient in gradients.items()]
    wanted = adam(expected.gradients)
    weights, file = found["weights"], load_file(folder / "model.safetensors")
    different = [name for name in weights.keys() & file.keys() if not torch.equal(weights[name], file[name])]
    metrics = found["metrics"]
    return Difference(
        case=case.name,
        ranks=case.ranks,
        mean=metrics["train/train_rollout_logprob_abs_diff"],
        largest=metrics["train/train_rollout_logprob_max_diff"],
        gradient=max(distances)[0],
        worst=max(distances)[1],
        weights=len(different) + len(weights.keys() ^ file.keys()),
        step=max(distance(step, wanted[name]) for name, step in steps.items()),
        seconds=seconds,
    )


def without_biases(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that are trained."""
    return {name: weight for name, weight in weights.items() if BIAS not in name}


def adam(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What Adam's first step adds to each weight, after the gradients were clipped to their global norm."""
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    share = min(1.0, OPTIMIZER.clip_grad / (float(norm) + 1e-6))
    clipped = {name: share * gradient for name, gradient in gradients.items()}
    return {name: -OPTIMIZER.lr * one / (one.abs() + OPTIMIZER.adam_eps) for name, one in clipped.items()}


def measure(cases: Sequence[Case], root: Path) -> Iterator[Difference]:
    """Every case against transformers."""
    known: dict[tuple[str, bool], Expected] = {}
    for case in cases:
        folder = root / case.family
        if not folder.exists():
            write(case.family, folder)
        key = (case.family, case.replays)
        if key not in known:
            known[key] = expect(folder, replays=case.replays)
        began = time.monotonic()
        found = replay(case, known[key].samples, folder, root)
        yield compare(case, found, known[key], folder, time.monotonic() - began)


# --- Engines ----------------------------------------------------------------------------------------------------------

LIVE = {
    "Qwen3": "qwen3",
    "Qwen2.5": "qwen2, tied",
    "Llama": "llama",
    "Qwen3-MoE": MIXTURE,
    "Qwen3-MoE, replay": MIXTURE,
    "Llama 3.1": "llama, scaled",
    "GLM-4": "glm4",
    "GLM-4.5": "glm4_moe",
    "GLM-4.7-Flash": "glm4_moe_lite",
    "DeepSeek V3": "deepseek_v3",
    "Moonlight": "moonlight",
}
"""Without Kimi K2: its config and tokenizer are code that a checkpoint brings; its layers are DeepSeek V3's."""
ONE_RANK = "one rank"
LEARNERS = {
    ONE_RANK: (),
    "TP2": ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"),
}
IN_LAYOUTS = ("Qwen3", "Qwen2.5", "Llama", "Qwen3-MoE", "Qwen3-MoE, replay")
"""The others are compared in layouts without an engine, above."""


def live(folder: Path, only: Sequence[str]) -> bool:
    """Print the table of trainer and engine; whether all means, and the last column, are below 1e-4."""
    print("| model | parameters | learner | mean before an update | largest | mean after | largest | fresh server |")
    print("|---|---|---|---|---|---|---|---|")
    every = [(name, learner) for name in LIVE for learner in LEARNERS if learner == ONE_RANK or name in IN_LAYOUTS]
    rows = [(name, learner) for name, learner in every if not only or f"{name}: {learner}" in only]
    return max(one for name, learner in rows for one in live_row(name, learner, folder)) < 1e-4


def live_row(name: str, learner: str, folder: Path) -> tuple[float, float, float]:
    """One run; its mean difference before and after the weights moved, and the largest from a fresh server."""
    model, family = folder / "models" / LIVE[name], LIVE[name]
    if not model.exists():
        write(family, model)
    run = folder / f"{name}-{learner}".replace(", ", "-").replace(" ", "-").lower()
    flags = LEARNERS[learner]
    if family == MIXTURE and flags:
        flags = (*flags, "--sequence-parallel")
    if "replay" in name:
        flags = (*flags, "--use-routing-replay", "--num-steps-per-rollout", "2")
    first, *later = live_run(model, run, *flags)
    found = [max(row[f"parity/{what}"] for row in rows) for rows in ([first], later) for what in ("mean", "max")]
    saved = run / "checkpoints" / f"step-{ROLLOUTS - 1:06d}" / "hf"
    found.append(fresh_server_difference(run, ROLLOUTS - 1, saved, run / "fresh.log"))
    numbers = " | ".join(f"{value:.1e}" for value in found)
    print(f"| {name} | {size(model):,} | {learner} | {numbers} |", flush=True)
    return found[0], found[2], found[4]


def size(model: Path) -> int:
    """Parameters in the file."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return sum(int(np.prod(shape)) for shape in shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="of the rows of a table, such as 'llama: TP2' or 'Llama: TP2'")
    parser.add_argument("--engines", type=Path)
    options = parser.parse_args()
    if options.engines:
        sys.exit(not live(options.engines, options.only))
    prepare()
    found = []
    print("| family and layout | ranks | log-prob difference, mean | largest | gradient | step | weights that differ |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root:
        for row in measure([case for case in CASES if not options.only or case.name in options.only], Path(root)):
            found.append(row)
            numbers = f"{row.mean:.1e} | {row.largest:.1e} | {row.gradient:.1e} | {row.step:.1e} | {row.weights}"
            print(f"| {row.case} | {row.ranks} | {numbers} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found]))
    sys.exit(any(not max(row.mean, row.gradient, row.step) <= BOUND or row.weights for row in found))


if __name__ == "__main__":
    main()
