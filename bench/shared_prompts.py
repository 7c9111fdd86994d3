"""Compares training with shared tokens packed once per group and once per sample, in alternation in one process.

    python -m bench.shared_prompts [--json FILE] [--repeats N]      about four minutes on an idle core

Random weights, fp32, one thread, the learner's own rows, model, loss and backward pass. A row of the table is a model,
prompts of P tokens, turns of R / 2 to R tokens, groups of G samples. Samples of one turn branch after the prompt, those
of several turns branch as evenly as they can before each turn: 32 samples of 5 turns in two, every time. All turns
train. Seconds are processor time of forward and backward, the median of N repeats that take turns; memory is what the
backward pass keeps, parameters left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.modeling import prepare_megatron
from slime_core.modeling.layout import ParallelLayout, initialize_model_parallel
from slime_core.ops.prefixes import Prefixes
from slime_core.types import StepPlan, TrainBatch
from tests.shared_prompts import build, gradients, train

BOUND = 1e-5
"""Largest relative difference of a gradient (and absolute one of a log-probability) that counts as equal in fp32."""

SHAPES: dict[str, dict[str, Any]] = {
    "embedded": {
        "vocab_size": 16,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "SmolLM2, 2 layers": {
        "vocab_size": 4096,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 2,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}
"""Shapes of Qwen3 models: that of the built-in model, and that of SmolLM2-135M without most layers and words."""


@dataclass(frozen=True)
class Case:
    """``groups`` prompts of ``prompt`` tokens, each with ``size`` samples of ``turns`` turns of at most ``response``
    tokens."""

    shape: str
    prompt: int
    response: int
    size: int
    groups: int
    turns: int = 1


CASES = (
    Case("embedded", 6, 4, 8, 32),
    Case("embedded", 2, 64, 8, 8),
    Case("embedded", 8, 64, 8, 8),
    Case("embedded", 64, 64, 8, 8),
    Case("embedded", 64, 16, 8, 8),
    Case("SmolLM2, 2 layers", 45, 24, 8, 4),
    Case("SmolLM2, 2 layers", 512, 64, 8, 1),
    Case("SmolLM2, 2 layers", 512, 64, 2, 4),
    Case("SmolLM2, 2 layers", 64, 256, 8, 1),
    *(Case("SmolLM2, 2 layers", 256, 128, size, 1) for size in (2, 8, 32)),
    *(Case("SmolLM2, 2 layers", 128, 64, size, 1, turns=5) for size in (2, 8, 32)),
)


@dataclass(frozen=True)
class Row:
    """Results of one case; shared tokens are packed ``once``, or ``repeated`` for each sample.

    Arguments:
        log_probs: largest difference.
        gradient: largest relative L2 norm of the difference of one parameter's gradient.
        mib: what the backward pass keeps.
    """

    case: Case
    tokens_repeated: int
    tokens_once: int
    log_probs: float
    gradient: float
    seconds_repeated: float
    seconds_once: float
    mib_repeated: float
    mib_once: float


def make_shard(case: Case, vocabulary: int) -> TrainBatch:
    """Return one micro-batch of all samples."""
    random = np.random.default_rng(0)
    samples, lengths = [], []
    for _ in range(case.groups):
        prompt = random.integers(0, vocabulary, case.prompt)
        turns: dict[tuple[int, ...], np.ndarray] = {}
        for branches in _branches(case):
            for path in (branches[: turn + 1] for turn in range(case.turns)):
                if path not in turns:
                    length = random.integers(max(case.response // 2, 1), case.response + 1)
                    turns[path] = random.integers(0, vocabulary, length)
            samples.append(np.concatenate([prompt, *(turns[branches[: turn + 1]] for turn in range(case.turns))]))
            lengths.append(len(samples[-1]) - case.prompt)
    count, total = len(samples), sum(lengths)
    shared = Prefixes.of(samples)
    return TrainBatch(
        rollout=0,
        tokens_T=np.concatenate(samples),
        lengths_B=np.array([len(sample) for sample in samples]),
        response_lengths_B=np.array(lengths),
        loss_mask_U=np.ones(total, np.float32),
        loss_weights_B=np.full(count, 1 / total, np.float32),
        rollout_log_probs_U=np.zeros(total, np.float32),
        columns_B={"advantages": random.normal(size=count).astype(np.float32)},
        steps=(StepPlan((tuple(range(count)),)),),
        indices_B=np.arange(count),
        prefix_order_B=shared.samples,
        prefix_lengths_B=shared.common,
    )


def _branches(case: Case) -> list[tuple[int, ...]]:
    """Return the branch of each sample of a group at each turn; at the last turn all differ."""
    counts = [round(case.size ** (turn / case.turns)) for turn in range(1, case.turns + 1)]
    return [tuple(sample * count // case.size for count in counts) for sample in range(case.size)]


def kept_mib(chunk: Any, micro: Any) -> float:
    """Return the MiB of the tensors that the backward pass of ``micro`` keeps."""
    own = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        train(chunk, micro)
    return sum(found.values()) / 2**20


def measure(case: Case, repeats: int) -> Row:
    from slime_core.learner.micro_batches import make_micro_batches

    shape = SHAPES[case.shape]
    chunk, shard = build(shape), make_shard(case, shape["vocab_size"])
    ((repeated,),), ((once,),) = make_micro_batches(shard), make_micro_batches(shard, share=True)
    expected_U, expected = train(chunk, repeated), gradients(chunk)
    found_U, found = train(chunk, once), gradients(chunk)
    seconds: dict[str, list[float]] = {"repeated": [], "once": []}
    for _ in range(repeats):
        for name, micro in (("repeated", repeated), ("once", once)):
            began = time.process_time()
            train(chunk, micro)
            seconds[name].append(time.process_time() - began)
    return Row(
        case,
        repeated.num_tokens,
        once.num_tokens,
        log_probs=float((found_U - expected_U).abs().max()),
        gradient=max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)),
        seconds_repeated=statistics.median(seconds["repeated"]),
        seconds_once=statistics.median(seconds["once"]),
        mib_repeated=kept_mib(chunk, repeated),
        mib_once=kept_mib(chunk, once),
    )


def _turns(case: Case) -> str:
    return str(case.response) if case.turns == 1 else f"{case.turns} x {case.response}"


def print_row(row: Row) -> None:
    case = row.case
    print(
        f"| {case.shape} | {case.groups} x {case.size} | {case.prompt} : {_turns(case)} "
        f"| {row.tokens_repeated} -> {row.tokens_once} ({1 - row.tokens_once / row.tokens_repeated:.0%}) "
        f"| {row.seconds_repeated:.3f} -> {row.seconds_once:.3f} ({row.seconds_repeated / row.seconds_once:.2f}) "
        f"| {row.mib_repeated:.1f} -> {row.mib_once:.1f} ({row.mib_repeated / row.mib_once:.2f}) "
        f"| {row.log_probs:.1e} | {row.gradient:.1e} |",
        flush=True,
    )


def measure_all(cases: Sequence[Case], repeats: int) -> list[Row]:
    columns = ("model", "groups x samples", "P : turns x R", "tokens (saved)", "seconds (times)", "MiB kept (times)")
    print(f"| {' | '.join(columns)} | log-probs | gradients |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for case in cases:
        rows.append(measure(case, repeats))
        print_row(rows[-1])
    return rows


def prepare() -> None:
    """Set up Megatron in this process: one rank, one thread."""
    import torch.distributed as dist

    prepare_megatron()
    warnings.filterwarnings("ignore", module="megatron")
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch re-exports it without saying so
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    initialize_model_parallel(ParallelLayout(), seed=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    prepare()
    rows = measure_all(CASES, options.repeats)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    sys.exit(any(max(row.log_probs, row.gradient) > BOUND for row in rows))


if __name__ == "__main__":
    main()
