"""Tiny checkpoints of every family that slime-models builds, with random weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from slime_core import RunView
from slime_core.config.schema import ARITHMETIC
from slime_core.modeling.layout import ParallelLayout

ROLLOUTS = 3
LIVE = (
    *("--plugin", "grpo", "--rm-type", "random", "--progress", "none", "--skip-eval-before-train"),
    *("--prompt-data", str(ARITHMETIC / "data" / "train.jsonl"), "--apply-chat-template", "--lr", "1e-3"),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "24"),
    *("--num-rollout", str(ROLLOUTS), "--save-hf", "false", "--parity-interval", "1", "--check-weight-update-equal"),
    *("--parity-mean-tolerance", "1000", "--parity-max-tolerance", "1000"),
)
"""Random rewards, so that weights move; every rollout is compared, and no difference ends the run."""

SIZES: Mapping[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,  # a padding row of zeros would tie all experts
}
HEADS: Mapping[str, Any] = {"head_dim": 16, "rope_theta": 1e4}
MIXTURE: Mapping[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3": ("Qwen3", {**HEADS, "tie_word_embeddings": False}),
    "qwen2, tied": ("Qwen2", {"rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen2, untied": ("Qwen2", {"rope_theta": 1e4, "tie_word_embeddings": False}),
    "llama": (
        "Llama",
        {"hidden_size": 96, "num_attention_heads": 6, "rope_theta": 1e5, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("Qwen3Moe", {**HEADS, **MIXTURE, "norm_topk_prob": True, "tie_word_embeddings": False}),
    "qwen3_moe, not normed, tied": (
        "Qwen3Moe",
        {**HEADS, **MIXTURE, "num_experts_per_tok": 3, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
}
"""Name -> what transformers calls the family, and its own settings."""

MODULES = {"Qwen3": "qwen3", "Qwen2": "qwen2", "Llama": "llama", "Qwen3Moe": "qwen3_moe"}


def config_of(name: str, **changes: Any) -> Any:
    """The transformers config of a family."""
    import transformers

    family, own = FAMILIES[name]
    return getattr(transformers, f"{family}Config")(**{**SIZES, **own, **changes})


def write(name: str, folder: Path, **changes: Any) -> Path:
    """A random checkpoint with the embedded tokenizer; neither norms nor biases are all the same."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, f"{FAMILIES[name][0]}ForCausalLM")(config_of(name, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for file in (ARITHMETIC / "model").iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, folder / file.name)
    return folder


def spec_of(name: str) -> Any:
    """A fresh model spec of the family."""
    import importlib

    family = FAMILIES[name][0]
    return getattr(importlib.import_module(f"slime_models.{MODULES[family]}"), family)(None, RunView())


def build(name: str, folder: Path, layout: ParallelLayout, **overrides: Any) -> tuple[Any, list[Any]]:
    """The spec, and the chunks with the weights of ``folder``."""
    from transformers import AutoConfig

    spec = spec_of(name)
    chunks = spec.build(
        AutoConfig.from_pretrained(folder).to_dict(), dtype=torch.float32, parallel=layout, overrides=overrides
    )
    spec.load_weights(chunks, folder)
    return spec, chunks


def of_hugging_face(folder: Path) -> Any:
    """The model as transformers runs it, experts one by one."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")


def by_expert(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers 5 holds the experts of a layer in one tensor; checkpoints hold each alone."""
    found = {}
    for name, weight in weights.items():
        if ".experts." not in name:
            found[name] = weight
            continue
        parts = {"down_proj": weight}
        if name.endswith("gate_up_proj"):
            parts = dict(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
        for part, stacked in parts.items():
            found |= {f"{name.rpartition('.')[0]}.{n}.{part}.weight": one for n, one in enumerate(stacked)}
    return found


def live_run(model: Path, run: Path, *flags: str) -> list[dict[str, float]]:
    """The metrics of each rollout of a ``slime run`` of ``model``; one that is finished is only read."""
    if not (run / "checkpoints" / f"step-{ROLLOUTS:06d}").exists():
        words = [*LIVE, *flags, "--hf-checkpoint", str(model), "--output-dir", str(run)]
        done = subprocess.run([sys.executable, "-m", "slime_core", "run", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "parity/mean" in row]
