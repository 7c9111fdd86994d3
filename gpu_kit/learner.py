"""Part 5: steps of the learner of Qwen3-0.6B's shape with random weights, beside a loop of transformers.

Both train the same tokens, packed into the same rows. The loop is what one would write first: bfloat16 weights, SDPA
over a packed row, logits of the predicting rows, fused AdamW on the bfloat16 weights. The learner also has float32
weights and gradients, entropies, metrics and checks. Log-probabilities and gradient norms of the two must agree.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_kit.report import (
    DEVICE,
    ON_GPU,
    SCRATCH,
    digest,
    free_memory,
    report,
    report_equal,
    report_limit,
    seconds,
    sized,
)
from slime_core.cli.memory import model_size
from slime_core.components.construction import prepare_options
from slime_core.components.functions import with_functions
from slime_core.components.selection import policy_loss
from slime_core.config.load import load, peek
from slime_core.learner import LearnerSettings
from slime_core.modeling.memory import GIB, RECOMPUTE, Cut, Recompute, Training, Usage, usage
from slime_core.plugins.activation import activate_line
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import LogProbs, Sample, Status, TokenIds, TrainBatch
from slime_core.weights.engine_control import reserve_port

Shape = Mapping[str, Any]

QWEN3 = {"max_position_embeddings": 40_960, "rope_theta": 1e6, "head_dim": sized(128, 16)}
LAYERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
DENSE: Shape = {
    **{**QWEN3, "model_type": "qwen3", "vocab_size": sized(151_936, 512), "tie_word_embeddings": True},
    **dict(zip(LAYERS, sized((1024, 3072, 28, 16, 8), (64, 96, 2, 4, 2)), strict=True)),
}
SHORT, LONG, LONGEST = sized((2048, 8192, 32_768), (64, 256, 512))
"""Tokens of a row."""

TOKENS = sized(32_768, 512)
"""Tokens of a step."""

ROUNDS = sized(4, 1)
DTYPE = sized(torch.bfloat16, torch.float32)
NEAR = sized(0.03, 1e-4)
"""Largest relative difference of gradient norms, and mean difference of log-probabilities in nats."""

KINDS: tuple[Recompute, ...] = ("none", "mlp", "full")


def main() -> None:
    """Report the loop, the learner in every setting, and whether it repeats its bits."""
    with attempt("a model of random weights"):
        folder, loop = write_model(DENSE)
        samples = draw(length=SHORT, total=TOKENS)
        loop.fill_log_probs(samples)
        shard, norm, loop_s = shard_of(samples, LONG), 0.0, 0.0
    with attempt("the loop of transformers"):
        norm, loop_s = report_loop(loop, shard)
    del loop
    cases = [(kind, row) for row in (LONG, SHORT) for kind in KINDS]
    for kind, row in cases:
        with attempt(f"recompute {kind}, rows of {row:,}"), built(folder, row, kind) as trained:
            step_s = trained.report_steps(shard_of(samples, row), norm=norm)
            if loop_s and (kind, row) == ("none", LONG):
                ratio = step_s / loop_s
                report(f"{trained.name}: seconds / those of transformers", ratio, expected="at most 1.2 on a GPU")
    with attempt(f"one row of {LONGEST:,}"), built(folder, LONGEST, "full") as trained:
        trained.report_steps(shard_of(draw(length=LONGEST, total=LONGEST), LONGEST))
    with attempt("two runs"):
        digests = []
        for _ in range(2):
            with built(folder, LONG, "none", "--load-debug-rollout-data", "none/{rollout_id}.jsonl") as trained:
                for _ in range(2):
                    trained.learner.train(shard)
                digests.append(digest(weight for _, weight in trained.learner.export_weights()))
        report_equal("two runs that only train, 2 steps: weights", len(set(digests)) == 1)


@contextmanager
def attempt(name: str) -> Iterator[None]:
    """Report an error in the block as a failed check, and go on: a case that needs too much memory hides no other."""
    try:
        yield
    except (RuntimeError, ValueError) as problem:  # torch.OutOfMemoryError and our errors are among them
        first = (str(problem).splitlines() or [""])[0]
        report(name, f"{type(problem).__name__}: {first[:200]}", expected="no error", ok=False)
    gc.collect()
    free_memory()


# --- The model and its samples ----------------------------------------------------------------------------------------


def write_model(shape: Shape) -> tuple[Path, Loop]:
    """Write a checkpoint of random weights; return its folder, and the loop that holds the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in shape.items() if name != "model_type"}
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(shape["model_type"], **fields), dtype=DTYPE, attn_implementation="sdpa"
        )
    folder = SCRATCH / f"model-{shape['model_type']}"
    model.save_pretrained(folder)
    return folder, Loop(model)


def draw(*, length: int, total: int, vocabulary: int = DENSE["vocab_size"]) -> list[Sample]:
    """Return samples of random tokens, of unequal lengths up to ``length`` and ``total`` tokens together."""
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    left = total
    while left > 0:
        size = min(left, length if length == total else int(random.integers(length // 4, length + 1)))
        size = left if left - size < 16 else size
        response = size - size // 8
        samples.append(
            Sample(
                group_index=len(samples),
                index=len(samples),
                tokens=TokenIds(random.integers(3, vocabulary, size).tolist()),
                response_length=response,
                rollout_log_probs=LogProbs([-1.0] * response),
                reward=0.0,
                status=Status.COMPLETED,
            )
        )
        left -= size
    return samples


def shard_of(samples: Sequence[Sample], row: int) -> TrainBatch:
    """Return one optimizer step over all samples, in rows of at most ``row`` tokens."""
    advantages = np.random.default_rng(1).normal(size=len(samples)).astype(np.float32)
    plan = BatchPlan(num_ranks=1, max_tokens=row)
    (shard,) = make_shards(samples, advantages, plan, rollout=0, temperature=1.0)
    return shard


# --- The learner ------------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """A learner of one rank, and the bytes of each part by the memory plan."""

    name: str
    learner: Any
    plan: Usage

    def report_steps(self, shard: TrainBatch, *, norm: float = 0.0) -> float:
        """Report time, MFU and memory of a step, and the difference from the loop; return the seconds.

        Arguments:
            norm: gradient norm of the loop at the same weights; 0: not compared.
        """
        tokens = int(shard.lengths_B.sum())
        metrics = self.learner.train(shard)
        if norm:
            difference = metrics["train/train_rollout_logprob_abs_diff"]
            report_limit(
                f"{self.name}: gradient norm / transformers' - 1", abs(metrics["train/grad_norm"] / norm - 1), NEAR
            )
            report_limit(f"{self.name}: log-probabilities beside transformers'", difference, NEAR, "nats")
        self.learner.speed(shard)
        speeds: list[Mapping[str, float]] = []

        def step() -> None:
            self.learner.train(shard)
            speeds.append(self.learner.speed(shard))

        step_s = seconds(step, rounds=ROUNDS)
        report(f"{self.name}: a step of {tokens:,} tokens", step_s, "s")
        report(f"{self.name}: speed", tokens / step_s, "tokens/s")
        mfu = [speed["perf/actor_train_mfu"] for speed in speeds if "perf/actor_train_mfu" in speed]
        if mfu:
            report(f"{self.name}: MFU", statistics.median(mfu), expected="0.3 or more with rows of 8,192, no recompute")
        if ON_GPU:
            peak = torch.cuda.max_memory_allocated()
            report(f"{self.name}: peak", peak / GIB, "GiB", expected=f"plan: {self.plan.total / GIB:.2f}")
            report_limit(f"{self.name}: peak / plan", peak / self.plan.total, 1.1)
        else:
            report(f"{self.name}: peak", "not measured on a CPU", expected=f"plan: {self.plan.total / GIB:.4f} GiB")
        return step_s


@contextmanager
def built(folder: Path, row: int, kind: Recompute, *flags: str, size: Shape = DENSE) -> Iterator[Trained]:
    """Build a learner as a run does, and close it after the block."""
    from slime_core.modeling import prepare_megatron

    prepare_megatron()  # before LearnerRank's module imports Megatron
    from slime_core.learner.rank import LearnerRank

    words = ["--plugin", "grpo", "--device", DEVICE.type, "--hf-checkpoint", str(folder)]
    words += ["--bf16", "true" if ON_GPU else "false", "--lr", "1e-6", "--lr-decay-style", "constant"]
    words += ["--max-tokens-per-gpu", str(row), *flags]
    for name, value in RECOMPUTE[kind].items():
        words += [f"--{name.replace('_', '-')}", *(value if isinstance(value, tuple) else [str(value)])]
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[size["model_type"]]
    seen = peek(words)
    active = with_functions(activate_line(seen, architecture=architecture))
    resolved = load(words, **active.for_load, check_rules=False)
    settings = LearnerSettings(
        resolved.config,
        folder,
        architecture,
        policy_loss(resolved.config, active.registry),
        options=prepare_options(resolved.config, active.registry, resolved.plugin_options, active.functions),
        num_steps=1000,
        address=f"127.0.0.1:{reserve_port('127.0.0.1')}",
    )
    learner = LearnerRank(settings, active.registry)
    try:
        parameters = {name: weight.numel() for name, weight in learner.export_weights()}
        found = model_size(resolved.config, parameters)
        assert found is not None
        training = Training(tokens=row, item=DTYPE.itemsize, chunk=resolved.config.learner.log_probs_chunk_size)
        plan = usage(found, Cut(recompute=kind), training)
        free_memory()
        yield Trained(f"{kind}, rows of {row:,}", learner, plan)
    finally:
        learner.close()


# --- The loop of transformers -----------------------------------------------------------------------------------------


class Loop:
    """A model of transformers that trains packed rows."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def log_probs(self, tokens: Sequence[torch.Tensor], responses: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of the last tokens of each sequence of a row, one sequence after the other."""
        positions = torch.cat([torch.arange(len(one), device=DEVICE) for one in tokens])
        row = torch.cat(list(tokens))
        # Positions that start again separate sequences (transformers/masking_utils.py, find_packed_sequence_indices).
        hidden = self.model.model(row[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]
        ends = np.cumsum([len(one) for one in tokens]).tolist()
        targets = torch.cat(
            [torch.arange(end - count, end, device=DEVICE) for end, count in zip(ends, responses, strict=True)]
        )
        logits = self.model.lm_head(hidden[targets - 1])
        return -torch.nn.functional.cross_entropy(logits.float(), row[targets], reduction="none")

    def fill_log_probs(self, samples: Sequence[Sample]) -> None:
        """Give the samples the log-probabilities of this model."""
        with torch.no_grad():
            for sample in samples:
                tokens = torch.tensor(list(sample.tokens), device=DEVICE)
                found = self.log_probs([tokens], [sample.response_length])
                sample.rollout_log_probs = LogProbs(found.tolist())

    def step(self, shard: TrainBatch) -> float:
        """Take one optimizer step with the rows of the shard; return the gradient norm before clipping."""
        self.optimizer.zero_grad(set_to_none=True)
        tokens = torch.from_numpy(shard.tokens_T.astype(np.int64)).to(DEVICE).split(shard.lengths_B.tolist())
        weights_B = shard.columns_B["advantages"] * shard.loss_weights_B
        (step,) = shard.steps
        for numbers in step.micro_batches:
            counts = [int(shard.response_lengths_B[number]) for number in numbers]
            found = self.log_probs([tokens[number] for number in numbers], counts)
            weights = torch.tensor(np.repeat(weights_B[list(numbers)], counts), device=DEVICE)
            (-(weights * found).sum()).backward()  # the gradient of PPO's loss at the weights that sampled
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm)


def report_loop(loop: Loop, shard: TrainBatch) -> tuple[float, float]:
    """Report the loop's time and memory; return its gradient norm at the start weights, and the seconds of a step."""
    name, tokens = f"transformers, rows of {LONG:,}", int(shard.lengths_B.sum())
    norm = loop.step(shard)
    free_memory()
    step_s = seconds(lambda: loop.step(shard), rounds=ROUNDS)
    report(f"{name}: a step of {tokens:,} tokens", step_s, "s")
    report(f"{name}: speed", tokens / step_s, "tokens/s")
    if ON_GPU:
        report(f"{name}: peak", torch.cuda.max_memory_allocated() / GIB, "GiB")
    return norm, step_s


if __name__ == "__main__":
    main()
