"""Trains one optimizer step on given samples, in the rank processes of a run, without Ray and without engines.

The caller's process resolves the settings and divides the samples into shards; each rank is
``python -m slime_testing.harness.learner FOLDER RANK`` and takes its shard from ``FOLDER``.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slime_core.components.construction import prepare_options
from slime_core.components.functions import with_functions
from slime_core.components.selection import policy_loss
from slime_core.config.load import load, peek
from slime_core.errors import RunError, WaitTimeout
from slime_core.learner import LearnerSettings
from slime_core.plugins.activation import activate_line
from slime_core.plugins.manifest import Manifest, attach
from slime_core.rollout.shards import BatchPlan, make_shards
from slime_core.types import Sample
from slime_core.weights.engine_control import reserve_port

if TYPE_CHECKING:
    import torch

__all__ = ["TrainedStep", "train_step"]

SETTINGS, MANIFEST, METRICS, WEIGHTS = "settings.pickle", "manifest.json", "metrics.json", "weights.safetensors"
ADDRESS, HOST = "address", "127.0.0.1"
TAIL = 3000
"""Characters of a failed rank's output that a message quotes."""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Result of one optimizer step.

    Example: ``TrainedStep({"train/loss": -0.08, "train/grad_norm": 0.9, ...}, {"model.norm.weight": tensor, ...})``.

    Arguments:
        metrics: as the learner reports them.
        weights: Hugging Face name -> float32 tensor on the CPU, after the step.
    """

    metrics: Mapping[str, float]
    weights: Mapping[str, torch.Tensor]


def train_step(
    samples: Sequence[Sample],
    advantages_B: NDArray[np.float32] | None,
    *,
    model: Path,
    flags: Sequence[str],
    ranks: int = 1,
    limit_s: float = 300.0,
) -> TrainedStep:
    """Train on all samples in one optimizer step, one micro-batch a data-parallel rank, on the CPU.

    Takes about fifteen seconds, nearly all of it imports in the ranks.

    Arguments:
        samples: finished, with tokens and log-probabilities.
        advantages_B: float32, one a sample; None if the estimator's scope is ``token``.
        model: Hugging Face folder with the start weights.
        flags: of ``slime run``: plugins (``--plugin grpo``), algorithm, optimizer; they activate plugins as in a run.
        ranks: data-parallel ranks.
        limit_s: seconds until all ranks have ended.

    Raises:
        ConfigError: a flag is unknown or out of range.
        PluginError: a plugin cannot be found or loaded.
        RunError: a rank failed; the message ends with its output.
        WaitTimeout: a rank was still running after ``limit_s``.
    """
    (architecture,) = json.loads((model / "config.json").read_text(encoding="utf-8"))["architectures"][:1]
    flags = ["--device", "cpu", *flags]
    peeked = peek(flags)
    active = with_functions(activate_line(peeked, architecture=architecture))
    resolved = load(flags, **active.for_load, check_rules=False)
    settings = LearnerSettings(
        resolved.config,
        model.resolve(),
        architecture,
        policy_loss(resolved.config, active.registry),
        options=prepare_options(resolved.config, active.registry, resolved.plugin_options, active.functions),
        num_steps=1,
        world_size=ranks,
        num_threads=1,
    )
    plan = BatchPlan(num_ranks=ranks, max_tokens=sum(len(sample.tokens) for sample in samples))
    shards = make_shards(
        samples, advantages_B, plan, rollout=0, temperature=resolved.config.rollout.rollout_temperature
    )
    with tempfile.TemporaryDirectory(prefix="slime-train-step-") as name:
        folder = Path(name)
        (folder / MANIFEST).write_text(active.manifest.to_json(), encoding="utf-8")
        for rank, shard in enumerate(shards):
            (folder / f"{rank}.{SETTINGS}").write_bytes(pickle.dumps((replace(settings, rank=rank), shard)))
        _run(folder, ranks, limit_s)
        from safetensors.torch import load_file

        metrics = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        return TrainedStep(metrics, load_file(folder / WEIGHTS))


def _run(folder: Path, ranks: int, limit_s: float) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    outputs = [(folder / f"{rank}.log").open("wb") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), str(rank)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for rank, output in enumerate(outputs)
    ]
    deadline_s = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):  # a rank that died leaves the others waiting for it
                break
            if time.monotonic() > deadline_s:
                running = [rank for rank, process in enumerate(processes) if process.poll() is None]
                who = f"a training step waited {limit_s:g} s for the ranks {running}"
                raise WaitTimeout(f"{who}; {_last_output(folder, running)}")
            time.sleep(0.05)
        died = [rank for rank, process in enumerate(processes) if process.poll()]
        if died:
            raise RunError(f"learner ranks {died} failed; {_last_output(folder, died)}")
    finally:
        for process, output in zip(processes, outputs, strict=True):
            process.kill()
            process.wait()
            output.close()


def _last_output(folder: Path, ranks: Sequence[int]) -> str:
    log = (folder / f"{ranks[0]}.log").read_text(encoding="utf-8", errors="replace")
    return f"last output of rank {ranks[0]}:\n{log[-TAIL:]}"


def main(folder: Path, rank: int) -> None:
    """One rank: attach the plugins, build the learner, train the shard; rank 0 writes metrics and weights."""
    registry = attach(Manifest.from_json((folder / MANIFEST).read_text(encoding="utf-8")))
    # Only now: options of a single-file plugin can be read once its module is there.
    settings, shard = pickle.loads((folder / f"{rank}.{SETTINGS}").read_bytes())
    from slime_core.learner.rank import LearnerRank

    learner = LearnerRank(replace(settings, address=_address(folder, rank)), registry)
    try:
        metrics = learner.train(shard)
        weights = {name: weight.detach().float().cpu().clone() for name, weight in learner.export_weights()}
    finally:
        learner.close()
    if rank == 0:
        from safetensors.torch import save_file

        save_file(weights, folder / WEIGHTS)
        (folder / METRICS).write_text(json.dumps(metrics), encoding="utf-8")


def _address(folder: Path, rank: int) -> str:
    """Address of the ranks' rendezvous: rank 0 reserves a port and writes it to a file, which the others read."""
    place, unfinished = folder / ADDRESS, folder / f"{ADDRESS}.unfinished"
    if rank == 0:
        unfinished.write_text(f"{HOST}:{reserve_port(HOST)}", encoding="utf-8")
        unfinished.rename(place)
    while not place.exists():  # the parent process enforces the time limit
        time.sleep(0.02)
    return place.read_text(encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
