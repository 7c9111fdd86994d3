"""Measures how far learner and engines differ by model, dtype and temperature: the table of ``docs/metrics.md``.

    python -m campaigns.parity FOLDER [NAME=MODEL ...]    five minutes on two cores; finished runs are only read

Each case is a run of a few rollouts with random rewards, so that weights move and are published, with bounds too wide
to end it. ``NAME=MODEL`` measures a further Hugging Face folder. The model called ``random`` is a Qwen3 of 12 million
parameters whose logits have the spread of a trained model's: near-uniform ones would hide what rounding does.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from slime_core.config.schema import ARITHMETIC

ROLLOUTS = 4
DTYPES = {"float32": (), "bfloat16": ("--bf16",)}
TEMPERATURES = ("1.0", "0.7")
LAST = f"step-{ROLLOUTS:06d}"
"""The checkpoint that a finished run has."""

COMMON = (
    *("--plugin", "grpo", "--rm-type", "random", "--progress", "none", "--skip-eval-before-train"),
    *("--num-rollout", str(ROLLOUTS), "--parity-mean-tolerance", "1000", "--parity-max-tolerance", "1000"),
    *("--rollout-request-timeout-s", "1800"),
)
LONG = (
    *("--apply-chat-template", "--lr", "1e-5", "--rollout-batch-size", "4", "--n-samples-per-prompt", "8"),
    *("--rollout-max-response-len", "64", "--save-hf", "false"),
)
"""Flags of models other than the embedded one, which brings its own."""

LOGIT_SPREAD = 3.0
"""Standard deviation of the random model's logits: about what small language models have."""


def main(folder: Path, further: dict[str, Path]) -> None:
    """Run what is missing, then print the table."""
    models = {"embedded": None, "random": random_model(folder / "model-random"), **further}
    print("| model | dtype | temperature | tokens | mean | largest rollout mean | largest token |")
    print("|---|---|---|---|---|---|---|")
    for name, model in models.items():
        for dtype in DTYPES:
            for temperature in TEMPERATURES:
                rows = measured(folder / f"{name}-{dtype}-{temperature}", model, dtype, temperature)
                print(f"| {name} | {dtype} | {temperature} | {summary(rows)} |", flush=True)


def measured(run: Path, model: Path | None, dtype: str, temperature: str) -> list[dict[str, Any]]:
    """The rows of one case that trained."""
    if not (run / "checkpoints" / LAST).exists():
        shutil.rmtree(run, ignore_errors=True)
        chosen = () if model is None else ("--hf-checkpoint", str(model), *LONG)
        words = (*COMMON, *chosen, *DTYPES[dtype], "--rollout-temperature", temperature, "--output-dir", str(run))
        subprocess.run([sys.executable, "-m", "slime_core", "run", *words], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "parity/mean" in row]


def summary(rows: list[dict[str, Any]]) -> str:
    """Tokens of all rollouts, their mean, the largest mean of a rollout, the largest difference of a token."""
    tokens = math.fsum(row["parity/tokens"] for row in rows)
    mean = math.fsum(row["parity/mean"] * row["parity/tokens"] for row in rows) / tokens
    worst, largest = (max(row[f"parity/{name}"] for row in rows) for name in ("mean", "max"))
    return f"{tokens:.0f} | {mean:.1e} | {worst:.1e} | {largest:.1e}"


def random_model(target: Path) -> Path:
    """A Qwen3 with random weights and the embedded tokenizer, at ``target``."""
    if (target / "config.json").exists():
        return target
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(  # type: ignore[call-arg]  # it takes every key
        vocab_size=8192,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=40,
        max_position_embeddings=256,
        rope_theta=1e4,
        tie_word_embeddings=False,
        initializer_range=1 / math.sqrt(320),
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # The last normalisation hands over numbers of spread 1.
        model.lm_head.weight.normal_(std=LOGIT_SPREAD / math.sqrt(config.hidden_size))
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(ARITHMETIC / "model").save_pretrained(target)
    return target


if __name__ == "__main__":
    main(Path(sys.argv[1]), {name: Path(path) for name, _, path in (word.partition("=") for word in sys.argv[2:])})
