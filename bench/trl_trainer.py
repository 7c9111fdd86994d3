"""TRL's side of `bench/against_trl.py`, which starts it in an environment with TRL. Imports nothing of slime.

    python bench/trl_trainer.py JOB.json        prints one JSON object as its last line

``GRPOTrainer`` without a reference model, gradient checkpointing or a server: the fastest that its settings offer on a
CPU. A job with ``frozen`` computes advantages, loss and gradient for given samples; any other trains and times steps.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from datasets import Dataset  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Job = dict[str, Any]


def main(job: Job) -> None:
    """Run one job."""
    torch.set_num_threads(job["threads"])
    print(json.dumps(frozen(job) if "frozen" in job else train(job)))


def train(job: Job) -> Job:
    """Train; return wall and CPU seconds of each step, from end to end, and lengths in tokens."""
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    prompts = [{"prompt": as_messages(row["prompt"]), "label": row["label"]} for row in rows]
    clock = Clock()
    trainer = trainer_of(job, Dataset.from_list(prompts), max_steps=job["left_out"] + job["steps"], callbacks=[clock])
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    return {
        "wall": clock.wall[job["left_out"] :],
        "cpu": clock.cpu[job["left_out"] :],
        "response_tokens": lengths[job["left_out"] :],
    }


class Clock(TrainerCallback):
    """Records the end of each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Record the start."""
        self._wall, self._cpu = now()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Record the end of a step."""
        wall, cpu = now()
        self.wall.append(wall - self._wall)
        self.cpu.append(cpu - self._cpu)
        self._wall, self._cpu = wall, cpu


def now() -> tuple[float, float]:
    """Return wall seconds, and CPU seconds of this process and its children."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return time.perf_counter(), sum(one.user + one.system for one in times)


def frozen(job: Job) -> Job:
    """Return TRL's advantages, loss and gradient for given samples with rewards and log-probabilities."""
    samples = job["frozen"]
    rows = [{"prompt": "given", "label": "", "reward": sample["reward"]} for sample in samples]
    trainer = trainer_of(job, Dataset.from_list(rows), max_steps=1)
    prompts = [sample["tokens"][: -len(sample["log_probs"])] for sample in samples]
    answers = [sample["tokens"][-len(sample["log_probs"]) :] for sample in samples]
    # Tokens come from the samples; all that follows generation is TRL's own.
    trainer._tokenize_prompts = lambda given: (prompts, None, {})
    trainer._generate_single_turn = lambda *given, **more: (answers, None)
    inputs = trainer._generate_and_score_completions(rows)
    old = torch.zeros_like(inputs["completion_ids"], dtype=torch.float32)
    for row, sample in zip(old, samples, strict=True):
        row[: len(sample["log_probs"])] = torch.tensor(sample["log_probs"])
    inputs["old_per_token_logps"] = old
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    norms = [parameter.grad.norm() for parameter in trainer.model.parameters() if parameter.grad is not None]
    found = {"loss": loss.item(), "grad_norm": torch.stack(norms).norm().item()}
    return {"advantages": inputs["advantages"].tolist(), **found}


def trainer_of(job: Job, dataset: Dataset, *, max_steps: int, callbacks: Sequence[Any] = ()) -> Any:
    """Build a trainer with the settings of the job; float32 weights, and autocast to bfloat16 if the job has it."""
    num = job["prompts"] * job["samples"]
    settings = GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=job["bf16"],
        per_device_train_batch_size=num,
        num_generations=job["samples"],
        max_completion_length=job["tokens"],
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards=job["scale"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_steps=max_steps,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=REWARDS[job["reward"]],
        args=settings,
        train_dataset=dataset,
        callbacks=list(callbacks),
    )


def exact(completions: list[Any], label: list[str], **_: object) -> list[float]:
    """Reward 1.0 if the response is the label."""
    return [float(text_of(one).strip() == wanted) for one, wanted in zip(completions, label, strict=True)]


def last_number(completions: list[Any], label: list[str], **_: object) -> list[float]:
    """Reward 1.0 if the last number of the response is the label, as in examples/smollm2."""
    numbers = [re.findall(r"\d+", text_of(one).replace(",", "")) for one in completions]
    return [float(bool(found) and found[-1] == wanted) for found, wanted in zip(numbers, label, strict=True)]


def given(completions: list[Any], reward: list[float], **_: object) -> list[float]:
    """Return the rewards that the samples already have."""
    return reward


REWARDS: dict[str, Callable[..., list[float]]] = {"exact": exact, "last_number": last_number, "given": given}


def text_of(completion: Any) -> str:
    """Return the text of a completion: a string, or a list of messages if the prompt is one."""
    return str(completion if isinstance(completion, str) else completion[0]["content"])


def as_messages(prompt: Any) -> Any:
    """Convert the prompt to messages for the chat template."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
