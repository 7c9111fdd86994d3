"""Compares training by slime's learner with a plain loop over padded micro-batches of the same model in transformers.

    python -m bench.padded_loop [ragged] [equal] [group] [--rounds 5]      with `make smollm` before; about ten minutes

Both train SmolLM2-135M in fp32 in this process, in turn, with equally many threads: the same tokens, weights of the
loss, PPO loss with given old log-probabilities, gradient clipping and fused AdamW, one optimizer step per round.

    slime      ``LearnerRank.train``, as a run calls it: packing, Megatron's schedule, metrics with entropies, checks of
               loss, gradients and weights
    padded     right-padded micro-batches in the order of the samples. Causal attention gives real tokens the same
               result without a mask, so none is passed. Logits are computed where a response token is predicted, and
               nowhere else; metrics are none
    sorted     the same, with the samples ordered by their length

A micro-batch has at most 1,024 tokens on each side, padding included. The lengths of ``ragged`` and ``group`` are those
of recorded rollouts (``bench/lengths.json``): one response of every second prompt of ``searchr1``, and three prompts of
``smollm2`` with 8 responses each, which slime computes once for the group. ``equal`` has as many samples and tokens as
``ragged``. Before each job the loop gets the learner's weights, and loss and gradient norm of both are compared. Tokens
are those of prompts and responses, without padding. Ratios above 1 say that slime is faster; CPU seconds are those of
this process, which hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from bench.growth_balance import Groups, rollouts
from slime_core.cli.activation import resolve
from slime_core.components.construction import prepare_options
from slime_core.components.selection import policy_loss
from slime_core.learner import LearnerSettings
from slime_core.learner.rank import LearnerRank
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.runtime.machine import cpu_threads
from slime_core.types import LogProbs, Sample, Status, TokenIds, TrainBatch
from slime_core.weights.engine_control import reserve_port

MODEL = Path("outputs/smollm2/model")
BUDGET = 1024
"""Tokens per micro-batch, as in examples/smollm2."""

FLAGS = (
    *("--plugin", "grpo", "--device", "cpu", "--hf-checkpoint", str(MODEL), "--bf16", "false"),
    *("--max-tokens-per-gpu", str(BUDGET), "--use-rollout-logprobs", "--lr", "1e-6", "--lr-decay-style", "constant"),
    *("--adam-beta2", "0.95", "--weight-decay", "0.1", "--clip-grad", "1.0"),
)
TOLERANCE = 1e-5
JOBS = ("ragged", "equal", "group")
SIDES = ("slime", "padded", "sorted")
HEAD = """
| lengths | samples | tokens | computed: padded, sorted | slime, tokens/s | padded | sorted \
| padded / slime, s (least to most) | CPU s | sorted / slime, s (least to most) | CPU s | difference of loss \
| of gradient norm |
|---|---|---|---|---|---|---|---|---|---|---|---|---|"""

Times = dict[str, list[tuple[float, float]]]
"""Side -> wall and CPU seconds of each step."""


def main() -> None:
    """Compare and time every job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=list(JOBS), help=", ".join(JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=int, default=1, help="train every N-th sample only, to try the script")
    given = parser.parse_args()
    learner, plan = build_learner()
    loop = PaddedLoop()
    print(HEAD, flush=True)
    for name in given.jobs:
        loop.model.load_state_dict(dict(learner.export_weights()), strict=False)
        samples = samples_of(name)[:: given.share]
        loop.fill_log_probs(samples)
        advantages_B = np.random.default_rng(0).normal(size=len(samples)).astype(np.float32)
        (shard,) = make_shards(samples, advantages_B, plan, rollout=0, temperature=1.0)
        print_row(name, shard, *measure(learner, loop, shard, rounds=given.rounds))
    print(f"\n{given.rounds} rounds; load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores at the end")
    learner.close()


# --- Samples ---------------------------------------------------------------------------------------------------------


def samples_of(name: str) -> list[Sample]:
    """Return samples with random tokens and without log-probabilities."""
    recorded = rollouts()
    alone: Groups = [group[:2] for group in recorded["searchr1 1"][::2]]
    length = round(sum(map(sum, alone)) / len(alone))
    groups: Groups = {
        "ragged": alone,
        "equal": [(prompt, length - prompt) for prompt, _ in alone],
        "group": recorded["smollm2 0"][:3],
    }[name]
    random = np.random.default_rng(0)
    found: list[Sample] = []
    for number, (prompt, *responses) in enumerate(groups):
        ids = random.integers(3, 49_152, prompt)
        for response in responses:
            tokens = np.concatenate([ids, random.integers(3, 49_152, response)])
            found.append(
                Sample(
                    group_index=number,
                    index=len(found),
                    tokens=TokenIds(tokens.tolist()),
                    response_length=response,
                    reward=0.0,
                    status=Status.COMPLETED,
                )
            )
    return found


# --- slime -----------------------------------------------------------------------------------------------------------


def build_learner() -> tuple[LearnerRank, BatchPlan]:
    """Build a learner of one rank as a run does; return it with the packing of its samples."""
    resolved, active = resolve(FLAGS)
    settings = LearnerSettings(
        resolved.config,
        MODEL.resolve(),
        "LlamaForCausalLM",
        policy_loss(resolved.config, active.registry),
        options=prepare_options(resolved.config, active.registry, resolved.plugin_options, active.functions),
        num_steps=1000,
        address=f"127.0.0.1:{reserve_port('127.0.0.1')}",
        num_threads=cpu_threads(),
    )
    return LearnerRank(settings, active.registry), BatchPlan.of(resolved.config, MODEL)


# --- The padded loop -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A sample as the loop trains it: ``old`` are the old log-probabilities of its response, ``weight`` that of each
    of these tokens in the loss."""

    tokens: torch.Tensor
    old: torch.Tensor
    advantage: float
    weight: float


class PaddedLoop:
    """A model of transformers with its optimizer."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
        )

    def step(self, rows: Sequence[Row]) -> dict[str, float]:
        """Take one optimizer step; return the loss, and the gradient norm before clipping."""
        found = self.gradients(rows)
        self.optimizer.step()
        return found

    def gradients(self, rows: Sequence[Row]) -> dict[str, float]:
        """Compute the clipped gradients in the parameters; return loss and gradient norm."""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in micro_batches(rows):
            loss = self.loss(batch)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return {"loss": total, "grad_norm": norm.item()}

    def loss(self, batch: Sequence[Row]) -> torch.Tensor:
        """Return the clipped loss of PPO, weighted and summed."""
        ratio_U = (self.log_probs(batch) - torch.cat([row.old for row in batch])).exp()
        counts = torch.tensor([len(row.old) for row in batch])
        advantages_U = torch.tensor([row.advantage for row in batch]).repeat_interleave(counts)
        weights_U = torch.tensor([row.weight for row in batch]).repeat_interleave(counts)
        worse_U = torch.max(-advantages_U * ratio_U, -advantages_U * ratio_U.clamp(0.8, 1.2))
        return (worse_U * weights_U).sum()

    def log_probs(self, batch: Sequence[Row]) -> torch.Tensor:
        """Return the log-probabilities of all response tokens, one sample after the other."""
        tokens_BT = torch.nn.utils.rnn.pad_sequence([row.tokens for row in batch], batch_first=True)
        hidden_BTH = self.model.model(tokens_BT, use_cache=False).last_hidden_state
        ends = [len(row.tokens) for row in batch]
        starts = [end - len(row.old) for end, row in zip(ends, batch, strict=True)]
        cut = [hidden_BTH[i, start - 1 : end - 1] for i, (start, end) in enumerate(zip(starts, ends, strict=True))]
        targets_U = torch.cat([row.tokens[start:] for row, start in zip(batch, starts, strict=True)])
        return -functional.cross_entropy(self.model.lm_head(torch.cat(cut)), targets_U, reduction="none")

    def fill_log_probs(self, samples: Sequence[Sample]) -> None:
        """Give samples log-probabilities near those of the model, such that some tokens are clipped."""
        generator = torch.Generator().manual_seed(0)
        for sample in samples:
            row = Row(torch.tensor(list(sample.tokens)), torch.zeros(sample.response_length), 0.0, 0.0)
            with torch.no_grad():
                found = self.log_probs([row])
            noise = 0.1 * torch.randn(len(found), generator=generator)
            sample.rollout_log_probs = LogProbs((found + noise).tolist())


def rows_of(shard: TrainBatch) -> list[Row]:
    """Return the samples of a shard, with the weights of their tokens in slime's loss."""
    tokens = torch.from_numpy(shard.tokens_T.astype(np.int64)).split(shard.lengths_B.tolist())
    old = torch.from_numpy(shard.rollout_log_probs_U).split(shard.response_lengths_B.tolist())
    numbers = zip(shard.columns_B["advantages"].tolist(), shard.loss_weights_B.tolist(), strict=True)
    rows = [Row(*one, *pair) for one, pair in zip(zip(tokens, old, strict=True), numbers, strict=True)]
    return [rows[place] for place in np.argsort(shard.indices_B)]  # the order in which samples came


def micro_batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield consecutive rows, as many as fit the budget after padding."""
    batch: list[Row] = []
    for row in rows:
        if max(len(one.tokens) for one in (*batch, row)) * (len(batch) + 1) > BUDGET:
            yield batch
            batch = []
        batch.append(row)
    yield batch


# --- Measuring -------------------------------------------------------------------------------------------------------


def measure(
    learner: LearnerRank, loop: PaddedLoop, shard: TrainBatch, *, rounds: int
) -> tuple[Times, dict[str, float]]:
    """Return the seconds of every step by side, after a warm-up step; and the relative differences of loss and gradient
    norm at equal weights."""
    rows = rows_of(shard)
    ordered = sorted(rows, key=lambda row: len(row.tokens))
    sides: dict[str, Callable[[], object]] = dict(
        zip(SIDES, (lambda: learner.train(shard), lambda: loop.step(rows), lambda: loop.step(ordered)), strict=True)
    )
    theirs, ours = loop.gradients(rows), learner.train(shard)
    norm = theirs["grad_norm"]
    differences = {
        "loss": abs(ours["train/loss"] - theirs["loss"]),
        "grad_norm": abs(ours["train/grad_norm"] - norm) / norm,
    }
    if differences["loss"] > TOLERANCE:
        raise SystemExit(f"the losses are {ours['train/loss']:.7f} and {theirs['loss']:.7f}")
    loop.optimizer.step()
    times: Times = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, step in sides.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        print({name: tuple(round(one, 2) for one in found[-1]) for name, found in times.items()}, file=sys.stderr)
    return times, differences


def print_row(name: str, shard: TrainBatch, times: Times, differences: dict[str, float]) -> None:
    """Print medians, and the ratios of each round."""
    tokens = int(shard.lengths_B.sum())
    rows = rows_of(shard)
    computed = [padded_tokens(order) for order in (rows, sorted(rows, key=lambda row: len(row.tokens)))]
    cells = [name, f"{len(rows)}", f"{tokens:,}", ", ".join(f"{one:,}" for one in computed)]
    cells += [f"{tokens / statistics.median(wall for wall, _ in found):.1f}" for found in times.values()]
    for other in SIDES[1:]:
        pairs = list(zip(times["slime"], times[other], strict=True))
        wall, cpu = ([theirs[place] / ours[place] for ours, theirs in pairs] for place in (0, 1))
        cells.append(f"{statistics.median(wall):.2f} ({min(wall):.2f} to {max(wall):.2f})")
        cells.append(f"{statistics.median(cpu):.2f}")
    cells += [f"{one:.1e}" for one in differences.values()]
    print(f"| {' | '.join(cells)} |", flush=True)


def padded_tokens(rows: Sequence[Row]) -> int:
    """Return the tokens that the loop computes, including padding."""
    return sum(max(len(row.tokens) for row in batch) * len(batch) for batch in micro_batches(rows))


if __name__ == "__main__":
    main()
