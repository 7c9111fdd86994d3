"""Trains one step with shared prefixes in several layouts, and compares it with repeated ones on one rank.

    python -m campaigns.shared_layouts [--json FILE]    ten seconds on two idle cores; exit code 1: a bound broke

Random weights in the shape of the embedded model, and a small mixture of experts; several micro-batches of groups with
ragged responses, partly masked, and of conversations that branch; policy loss and entropy bonus. Context-parallel ranks
repeat all tokens by themselves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import slime_core
from slime_core.config.learning import AlgorithmConfig, LearnerConfig, OptimizerConfig
from slime_core.config.schema import ClusterConfig, RunConfig
from slime_core.modeling.layout import ParallelLayout
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample, Status, TrainBatch
from tests.ranks import distance, free_address, learner_of, prepare, relative, run_ranks

EMBEDDED = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"
ARCHITECTURES = {"dense": "Qwen3ForCausalLM", "experts": "Qwen3MoeForCausalLM"}
MAX_TOKENS, BOUND, TIMEOUT_S = 160, 1e-5, 90


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int = 1
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    model: str = "dense"
    share: bool = True


CASES = (
    Case("DP1, repeated", share=False),
    Case("DP1"),
    Case("DP2", 2),
    Case("TP2", 2, ParallelLayout(tensor=2)),
    Case("TP2, SP", 2, ParallelLayout(tensor=2, sequence=True)),
    Case("PP2", 2, ParallelLayout(pipeline=2)),
    Case("CP2", 2, ParallelLayout(context=2)),
    Case("DP1, experts, repeated", model="experts", share=False),
    Case("DP1, experts", model="experts"),
)
"""Each is compared with the one of its model that repeats all tokens."""


@dataclass(frozen=True)
class Difference:
    """Relative differences, and the tokens that ran through the model: as it was, and with repeated ones."""

    layout: str
    loss: float
    grad_norm: float
    metric: float
    gradient: float
    once: int
    repeated: int


def make_samples() -> tuple[list[Sample], np.ndarray]:
    """Eight groups of answers and four of conversations, and an advantage for each sample."""
    random = np.random.default_rng(3)
    samples: list[Sample] = []
    for group in range(12):
        for prompt, response, rollout_id, mask in (answers if group < 8 else conversations)(random):
            sample = Sample(
                group_index=group,
                index=len(samples),
                tokens=prompt + response,
                response_length=len(response),
                loss_mask=mask,
                status=Status.COMPLETED,
                remove_sample=len(samples) == 5,
                rollout_id=rollout_id,
            )
            sample.rollout_log_probs = random.uniform(-3, -2, len(response)).tolist()
            samples.append(sample)
    return samples, random.normal(size=len(samples)).astype(np.float32)


Drawn = tuple[list[int], list[int], int | None, list[int]]
"""Ids of a prompt and a response, the rollout's id, the loss mask."""


def drawn(random: np.random.Generator, least: int, most: int) -> list[int]:
    found: list[int] = random.integers(0, 14, random.integers(least, most + 1)).tolist()
    return found


def answers(random: np.random.Generator) -> Iterator[Drawn]:
    """A prompt of 4 to 24 tokens with 1 to 6 responses of 1 to 20 tokens each."""
    prompt = drawn(random, 4, 24)
    for _ in range(random.integers(1, 7)):
        response = drawn(random, 1, 20)
        yield prompt, response, None, (random.random(len(response)) < 0.8).astype(int).tolist()


def conversations(random: np.random.Generator) -> Iterator[Drawn]:
    """A prompt of 20 tokens and six samples of turns of 16 to 30; each has a turn after some of those of one before it.

    Two thirds train all turns, so that a shared one trains several times. The others train their last turn: some as
    siblings of one rollout, some with an edited history as their prompt.
    """
    prompt, histories = drawn(random, 20, 20), [[drawn(random, 16, 30)]]
    for number in range(6):
        before = histories[random.integers(len(histories))]
        history = before[: random.integers(len(before) + 1)]
        turn = drawn(random, 16, 30)
        histories.append([*history, turn])
        shared = [token for part in history for token in part]
        if number == 2:
            yield prompt, shared + turn, 0, [0] * len(shared) + [1] * len(turn)
        elif number == 5:
            yield prompt + shared[:-3], shared[-3:] + turn, None, [0] * len(shared[-3:]) + [1] * len(turn)
        else:
            yield prompt, shared + turn, 0 if number == 1 else None, [1] * len(shared + turn)


def shards(num_ranks: int, *, share: bool) -> list[TrainBatch]:
    samples, advantages_B = make_samples()
    plan = BatchPlan(num_ranks=num_ranks, max_tokens=MAX_TOKENS, share_prompts=share)
    return make_shards(samples, advantages_B, plan, rollout=0, temperature=1.0)


def train(case: Case, rank: int, address: str, folder: Path, target: Path) -> None:
    """Runs in a forked process; writes metrics, gradients and tokens to ``target``."""
    from campaigns.gradients import named_gradients

    config = RunConfig(
        cluster=ClusterConfig(device="cpu"),
        algorithm=AlgorithmConfig(entropy_coef=0.02),
        learner=LearnerConfig(max_tokens_per_gpu=MAX_TOKENS),
        optimizer=OptimizerConfig(lr=1e-4),
    )
    learner = learner_of(
        config,
        folder / case.model,
        ARCHITECTURES[case.model],
        rank=rank,
        ranks=case.ranks,
        address=address,
        layout=case.layout,
    )
    found: dict[str, Any] = {}
    room: Any = import_module("slime_core.learner.rank")
    finish, cut = learner.actor.optimizer.step, room.micro_batches_of_rank

    def step() -> Any:
        found["gradients"] = named_gradients(learner.actor._spec.spec, learner.actor.model)
        return finish()

    def counted(*arguments: Any, **options: Any) -> Any:
        steps = cut(*arguments, **options)
        found["tokens"] = sum(micro.num_tokens for step in steps for micro in step)
        return steps

    learner.actor.optimizer.step, room.micro_batches_of_rank = step, counted
    data_rank = case.layout.data_rank(rank, world_size=case.ranks)
    shard = shards(case.layout.data_size(case.ranks), share=case.share)[data_rank]
    found["metrics"] = learner.train(shard)
    torch.save(found, target)
    learner.close()


def replay(case: Case, folder: Path) -> dict[str, Any]:
    """What rank 0 found, with the tokens of all data-parallel ranks.

    Raises:
        SystemExit: a rank failed, or did not end in time.
    """
    address = free_address()
    targets = [folder / f"rank-{rank}.pt" for rank in range(case.ranks)]

    def run(rank: int) -> None:
        train(case, rank, address, folder, targets[rank])

    run_ranks(case.name, case.ranks, run, limit_s=TIMEOUT_S)
    found: list[dict[str, Any]] = [torch.load(target, weights_only=True) for target in targets]
    replicas = case.ranks // case.layout.data_size(case.ranks) // case.layout.context
    return found[0] | {"tokens": sum(one["tokens"] for one in found) // replicas}


def compare(case: Case, found: dict[str, Any], expected: dict[str, Any]) -> Difference:
    mine, theirs = found["metrics"], expected["metrics"]
    if mine.keys() != theirs.keys() or found["gradients"].keys() != expected["gradients"].keys():
        sys.exit(f"{case.name}: other metrics or weights")
    pairs = [(gradient, expected["gradients"][name]) for name, gradient in found["gradients"].items()]
    return Difference(
        case.name,
        loss=relative(mine["train/loss"], theirs["train/loss"]),
        grad_norm=relative(mine["train/grad_norm"], theirs["train/grad_norm"]),
        metric=max(abs(mine[name] - theirs[name]) / max(abs(theirs[name]), 1) for name in theirs),
        gradient=max(distance(a, b) for a, b in pairs),
        once=found["tokens"],
        repeated=expected["tokens"],
    )


def make_models(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    dense = AutoConfig.from_pretrained(EMBEDDED, initializer_range=0.1, dtype=torch.float32)
    AutoModelForCausalLM.from_config(dense).save_pretrained(folder / "dense")
    experts = Qwen3MoeConfig(  # type: ignore[call-arg]  # it takes every key
        vocab_size=16,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(experts).save_pretrained(folder / "experts")


def measure() -> list[Difference]:
    expected: dict[str, dict[str, Any]] = {}
    rows = []
    print("| layout | loss | gradient norm | worst metric | worst gradient of a weight | tokens |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name))
        for case in CASES:
            found = replay(case, Path(name))
            if not case.share:
                expected[case.model] = found
                continue
            row = compare(case, found, expected[case.model])
            rows.append(row)
            print(
                f"| {row.layout} | {row.loss:.1e} | {row.grad_norm:.1e} | {row.metric:.1e} | {row.gradient:.1e} "
                f"| {row.repeated} -> {row.once} |",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    prepare()
    rows = measure()
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    sys.exit(any(not max(row.loss, row.grad_norm, row.metric, row.gradient) <= BOUND for row in rows))


if __name__ == "__main__":
    main()
