"""Runs that train recorded rollouts and save after each: their flags, and what they wrote."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

__all__ = ["FLAGS", "TIMES", "rows", "tensors", "write_rollouts"]

RECORDED = Path(__file__).parent / "golden" / "rollouts"
FLAGS = (
    *("--plugin", "grpo", "--progress", "lines", "--save-interval", "1", "--num-steps-per-rollout", "2"),
    *("--max-restarts", "0"),
    *("--rollout-batch-size", "6", "--n-samples-per-prompt", "4", "--rollout-temperature", "1.4"),
    *("--eval-prompt-data", "none", "--eval-interval", "none"),
)
TIMES = ("perf/", "timers/")


def write_rollouts(folder: Path, count: int) -> Path:
    """As many recorded rollouts as are needed, by turns those of the golden tests; returns their template."""
    folder.mkdir(exist_ok=True)
    recorded = [path.read_text() for path in sorted(RECORDED.glob("*.jsonl"))]
    for number in range(count):
        head, _, samples = recorded[number % len(recorded)].partition("\n")
        head = json.dumps({**json.loads(head), "rollout": number})
        (folder / f"{number}.jsonl").write_text(f"{head}\n{samples}")
    return folder / "{rollout_id}.jsonl"


def tensors(folder: Path) -> dict[str, Any]:
    """Key -> dtype and bytes of each tensor of a torch_dist folder, and the numbers that are no tensors."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(one.size, dtype=one.properties.dtype)
        for key, one in described.items()
        if isinstance(one, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it reads in one process, as it is told to
        load(state, checkpoint_id=folder, no_dist=True)
    common = torch.load(folder / "common.pt", weights_only=True)
    return {key: value.numpy().tobytes() for key, value in state.items()} | {"common": repr(common)}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics, without times."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in found]
