"""Recreates the built-in checkpoint: the supervised warm-up, with slime's own learner in one process.

    python -m examples.arithmetic.warm_up OUTPUT_FOLDER

``recipe`` describes what it teaches, and why. Takes about four minutes on two cores; writes a Hugging Face folder and
prints the greedy accuracy on the held-out problems, by carries.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from examples.arithmetic.recipe import WarmUp, model_files, warm_up_batches
from examples.arithmetic.task import tokenizer_files
from examples.tiny_model import write_files
from slime_core.config.learning import OptimizerConfig
from slime_core.config.schema import ARITHMETIC, RunConfig
from slime_core.learner import LearnerSettings
from slime_core.learner.rank import LearnerRank
from slime_core.plugins.activation import activate
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import LogProbs, Sample, Status, TokenIds, TrainBatch

ARCHITECTURE = "Qwen3ForCausalLM"


def main(output: Path) -> None:
    """Warm up a new model and write it to ``output``."""
    numbers, begun_s = WarmUp(), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        start = Path(name)
        write_random_model(start, seed=numbers.seed)
        learner = make_learner(start, numbers)
        encoder = PromptEncoder(start, apply_chat_template=True)
        for step, batch in enumerate(warm_up_batches(numbers)):
            metrics = learner.train(shard(encoder, batch, step=step))
            if step % 100 == 0 or step == numbers.steps - 1:
                print(f"step {step}: loss {metrics['train/loss']:.4f}, {time.monotonic() - begun_s:.0f} s", flush=True)
        write_trained_model(learner, start, output)
    report(output)


def write_random_model(folder: Path, *, seed: int) -> None:
    """Write a Hugging Face folder with a new model and the task's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_files(folder, files={**model_files(), **tokenizer_files()})
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    write_files(folder, files=model_files())  # save_pretrained has rewritten config.json in another format


def make_learner(folder: Path, numbers: WarmUp) -> LearnerRank:
    """Create a learner of one process with the supervised policy loss."""
    optimizer = OptimizerConfig(
        lr=numbers.lr,
        lr_warmup_iters=numbers.lr_warmup_steps,
        lr_decay_style="cosine",
        lr_decay_iters=numbers.steps,
        weight_decay=numbers.weight_decay,
        adam_beta1=numbers.adam_beta1,
        adam_beta2=numbers.adam_beta2,
        clip_grad=0.0,
    )
    active = activate([], architecture=ARCHITECTURE)
    settings = LearnerSettings(
        RunConfig(optimizer=optimizer),
        folder=folder,
        architecture=ARCHITECTURE,
        policy_loss="sft",
        options={},
        num_steps=numbers.steps,
        num_threads=2,
    )
    return LearnerRank(settings, active.registry)


def shard(encoder: PromptEncoder, batch: Sequence[tuple[str, str]], *, step: int) -> TrainBatch:
    """Convert a batch of (prompt, target) to a shard whose loss is the mean over all target tokens."""
    samples = [sample(encoder, prompt, target, index=index) for index, (prompt, target) in enumerate(batch)]
    return make_shards(
        samples,
        np.zeros(len(samples), np.float32),
        BatchPlan(num_ranks=1, max_tokens=8192, per_token=True),
        rollout=step,
        temperature=1.0,
    )[0]


def sample(encoder: PromptEncoder, prompt: str, target: str, *, index: int) -> Sample:
    """Return a sample whose response is the target and the end-of-sequence token."""
    response = [*encoder.tokenizer(target)["input_ids"], encoder.end_of_sequence]
    return Sample(
        group_index=index,
        index=index,
        prompt=prompt,
        tokens=TokenIds([*encoder.encode(prompt), *response]),
        response=target,
        response_length=len(response),
        status=Status.COMPLETED,
        rollout_log_probs=LogProbs([0.0] * len(response)),
    )


def write_trained_model(learner: LearnerRank, start: Path, output: Path) -> None:
    """Write the learner's weights with the small files of ``start``."""
    from slime_core.weights.hugging_face import write

    write(output, learner.export_weights(), template=start)


def report(folder: Path) -> None:
    """Print greedy accuracy on the held-out problems, computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    encoder = PromptEncoder(folder, apply_chat_template=True)
    hits: dict[int, list[bool]] = {}
    for line in (ARITHMETIC / "data" / "held_out.jsonl").read_text().splitlines():
        row = json.loads(line)
        ids = torch.tensor([encoder.encode(row["prompt"])])
        with torch.no_grad():
            answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        text = encoder.decode(answer[0, ids.size(1) :].tolist())
        hits.setdefault(row["metadata"]["carries"], []).append(text == row["label"])
    found = [hit for values in hits.values() for hit in values]
    print(f"held out: {sum(found)}/{len(found)} = {sum(found) / len(found):.3f}")
    for carries, values in sorted(hits.items()):
        print(f"  {carries} carries: {sum(values)}/{len(values)} = {sum(values) / len(values):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
