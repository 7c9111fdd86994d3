"""Works around a random bias in the head of some reward models.

SGLang 0.5.23 builds these heads with ``nn.Linear`` and its default bias (srt/models/qwen3_classification.py:136,
qwen2_classification.py:46), which no checkpoint has and ``load_weights`` never fills. So a server adds a random number
to every score, another one at each start, and two engines of one reward model disagree about the samples of one group.
The engines therefore load a copy of the checkpoint in which that bias is zero. Remove this when SGLang builds these
heads without a bias.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slime_core.config.described import described

__all__ = ["with_head_bias"]

RANDOM_HEADS = frozenset({"Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification"})
"""Architectures whose head has a bias in SGLang and none in transformers."""

WEIGHT, BIAS = "score.weight", "score.bias"
ADDED = "model-score-bias.safetensors"
INDEX = "model.safetensors.index.json"


def with_head_bias(model: Path, folder: Path) -> Path:
    """``model`` itself, or ``folder``, which then holds links to all its files, and a head's bias of zero.

    Arguments:
        model: Hugging Face folder of a reward model.
        folder: made where the head would be random; the nodes that serve the model must see it.
    """
    architectures = (described(model) or {}).get("architectures") or []
    files = _files_of(model)
    if not RANDOM_HEADS.intersection(architectures) or WEIGHT not in files or BIAS in files:
        return model
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file.resolve())
    save_file({BIAS: np.zeros(_num_labels(files[WEIGHT]), np.float32)}, folder / ADDED, metadata={"format": "pt"})
    _add_to_index(folder / INDEX)
    return folder


def _files_of(model: Path) -> dict[str, Path]:
    """Name of a weight -> its file; empty: there are none, or they cannot be read, which SGLang will report."""
    found: dict[str, Path] = {}
    for file in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as content:
                found |= dict.fromkeys(content.keys(), file)
        except (OSError, SafetensorError):
            return {}
    return found


def _num_labels(file: Path) -> int:
    with safe_open(file, framework="numpy") as content:
        rows, _ = content.get_slice(WEIGHT).get_shape()
    return int(rows)


def _add_to_index(index: Path) -> None:
    """Name the added file in the index; without an index, SGLang reads every file."""
    if index.exists():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"][BIAS] = ADDED
        index.unlink()  # a link to the checkpoint's own
        index.write_text(json.dumps(content, indent=2), encoding="utf-8")
