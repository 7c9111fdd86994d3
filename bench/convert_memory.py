"""Memory and time of `slime convert` for a model of three billion parameters: the table of docs/checkpoints.md.

    python -m bench.convert_memory outputs/convert

Writes random bfloat16 weights of the shape of Qwen2.5-3B, converts them to torch_dist and back in one process and in
two, compares the result with the source, and deletes all of it: it needs 20 GB of disk. Memory: the proportional set
sizes (PSS) of the command and all its descendants, added up every 50 ms, the largest; pages of mapped files count.
Exit code 1: a conversion took more than 1.3 times the largest rank's share of the weights and 2 GiB, or bits differ.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SAMPLED_S = 0.05
GIB = 2**30
BELOW_ONE = 0x3F80
"""The bits of 1.0 in bfloat16; those of positive numbers below it are smaller."""

HEAD = """| conversion | processes | largest rank's share, GiB | limit, GiB | peak, GiB | seconds |
|---|---|---|---|---|---|"""


def shapes() -> dict[str, torch.Size]:
    """Return the names and shapes of the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**CONFIG)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    return {name: tensor.shape for name, tensor in state.items() if name != "lm_head.weight"}


def write(folder: Path) -> None:
    """Write the Hugging Face folder, one file per six layers."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    files: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes().items():
        layer = name.split(".")[2]
        part = int(layer) // 6 if layer.isdigit() else 6
        files.setdefault(f"model-{part + 1:05d}-of-00007.safetensors", {})[name] = shape
    for file, members in files.items():
        bits = {name: torch.empty(shape, dtype=torch.int16).random_(0, BELOW_ONE) for name, shape in members.items()}
        save_file({name: one.view(torch.bfloat16) for name, one in bits.items()}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, members in files.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def largest_share(ranks: int) -> int:
    """Return the bytes of the largest of ``ranks`` pipeline stages; the first and the last hold the tied embedding."""
    sizes = {name: 2 * shape.numel() for name, shape in shapes().items()}
    embedding = sizes.pop("model.embed_tokens.weight")
    return embedding + sum(sizes.values()) // ranks


def descendants(pid: int) -> Iterator[int]:
    """Return ``pid`` and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from descendants(int(child))


def memory(pid: int) -> int:
    """Return the sum of the proportional set sizes, in bytes, of ``pid`` and its descendants."""
    found = 0
    for one in descendants(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has ended
        found += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found


def measured(words: list[str | Path], ranks: int) -> tuple[int, float]:
    """Return the peak bytes and the seconds of ``slime convert`` with ``words``."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    start, peak = time.monotonic(), 0
    with subprocess.Popen([sys.executable, *launcher, "-m", "slime_core", "convert", *map(str, words)]) as running:
        while running.poll() is None:
            try:
                peak = max(peak, memory(running.pid))
            except OSError:
                continue  # a process ended while its children were listed
            time.sleep(SAMPLED_S)
    if running.returncode:
        sys.exit(f"{words[0]} failed")
    return peak, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    root = parser.parse_args().folder
    source, fits = root / "hf", True
    root.mkdir(parents=True)  # fails where it exists: all of it is deleted at the end
    try:
        write(source)
        print(HEAD, flush=True)
        for ranks in (1, 2):
            stored, back = root / f"torch_dist-{ranks}", root / f"back-{ranks}"
            share = largest_share(ranks)
            limit = int(1.3 * share) + 2 * GIB
            for words in (
                ["hf-to-torch-dist", "--hf-checkpoint", source, "--save", stored],
                ["torch-dist-to-hf", "--input-dir", stored, "--output-dir", back],
            ):
                peak, seconds = measured(words, ranks)
                fits &= peak <= limit
                sizes = " | ".join(f"{one / GIB:.2f}" for one in (share, limit, peak))
                print(f"| {words[0]} | {ranks} | {sizes} | {seconds:.0f} |", flush=True)
            shutil.rmtree(stored)
            measured(["verify", source, back], 1)
            shutil.rmtree(back)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    sys.exit(not fits)


if __name__ == "__main__":
    main()
