"""Computes padding and imbalance of recorded rollouts over data-parallel ranks, as a run reports them.

``lengths.json`` holds, for every prompt group of a rollout, the tokens of the prompt and of each response:

    demo       the built-in arithmetic demo, first rollout: 32 prompts x 8 samples
    smollm2    the first four rollouts of SmolLM2-135M in ``bench.against_trl``: 8 prompts x 8 samples each
    searchr1   the first and the last of 40 rollouts of preset ``searchr1``, whose responses hold what a search found:
               32 prompts x 8 samples each
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np

from slime_core.config.learning import LearnerConfig
from slime_core.rollout.shards import BatchPlan, batch_metrics, make_shards
from slime_core.types import LogProbs, Sample, Status, TokenIds

LENGTHS = Path(__file__).parent / "lengths.json"
PADDED = (1, 8)
"""Multiples to which rows are padded: none, and 8 ranks that share a row (sequence parallelism)."""

HEAD = """| rollout | samples | tokens | imbalance | padding, rows of a multiple of 8 | micro-batches per rank |
|---|---|---|---|---|---|"""

Groups = Sequence[Sequence[int]]
"""For each group, the tokens of its prompt, then of each response."""


def rollouts() -> dict[str, Groups]:
    """Return the recorded rollouts by name; the four of ``smollm2`` (8 prompts each) also as one rollout of 32."""
    found: dict[str, Groups] = {}
    for name, recorded in json.loads(LENGTHS.read_text()).items():
        found |= {f"{name} {number}": groups for number, groups in enumerate(recorded)}
        if len(recorded) > 1:
            found[f"{name}, {len(recorded)} rollouts as one"] = [group for one in recorded for group in one]
    return found


def balance_table(num_ranks: int) -> None:
    """Print imbalance and padding in percent; every rollout is one step."""
    print(HEAD)
    for name, groups in rollouts().items():
        samples = list(_samples(groups))
        tokens = sum(len(one.tokens) for one in samples)
        imbalance, padding, rows = evenness(groups, num_ranks)
        print(f"| {name} | {len(samples)} | {tokens:,} | {imbalance:.2%} | {padding:.2%} | {rows:.1f} |")


def evenness(groups: Groups, num_ranks: int) -> tuple[float, float, float]:
    """Return figures of one rollout: imbalance (1 - mean / largest tokens of a rank), the share of padding in rows
    that 8 ranks share, and micro-batches per rank."""
    samples = list(_samples(groups))
    alone, padded = (_metrics(samples, num_ranks, multiple) for multiple in PADDED)
    imbalance = 1 - 1 / alone["train/token_imbalance"]
    return imbalance, padded["train/padding_ratio"], alone["train/micro_batches_per_rank"]


def _metrics(samples: Sequence[Sample], num_ranks: int, multiple: int) -> dict[str, float]:
    max_tokens = LearnerConfig().max_tokens_per_gpu
    plan = BatchPlan(num_ranks=num_ranks, max_tokens=max_tokens, row_multiple=multiple, share_prompts=True)
    advantages_B = np.zeros(len(samples), np.float32)
    return batch_metrics(make_shards(samples, advantages_B, plan, rollout=0, temperature=1.0), plan)


def _samples(groups: Groups) -> Iterator[Sample]:
    """Return samples of these lengths; those of a group share only their prompt."""
    distinct = count(len(groups))
    for number, (prompt, *responses) in enumerate(groups):
        for response in responses:
            yield Sample(
                group_index=number,
                index=0,
                tokens=TokenIds([number] * prompt + [next(distinct)] * response),
                response_length=response,
                rollout_log_probs=LogProbs([0.0] * response),
                reward=0.0,
                status=Status.COMPLETED,
            )
