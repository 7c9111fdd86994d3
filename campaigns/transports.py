"""Publishes to a server of one process and one of two, over every transport, and prints the table of the results.

    python -m campaigns.transports [MODEL [ROUNDS]]    a minute on two idle cores with the built-in model

Each round publishes once over every transport to every server, so that all of them see the same load of the machine.
Afterwards the servers' log-probs are compared with those of a fresh server that read the same weights from disk. A
publication is everything from pause to resume: checks, transfer, loading, checksums of both sides.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import torch
from safetensors.torch import load_file

import slime_core
from slime_core.generation import SamplingParams
from slime_core.generation.context import run_all
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.engines.engine import EngineSettings, SGLangServer
from slime_core.weights import PublisherSettings, TransportName, hugging_face
from slime_core.weights.publisher import Publisher

EMBEDDED = Path(slime_core.__file__).parent / "builtin" / "arithmetic" / "model"
WIDTHS = (1, 2)
ROUNDS = 20
PROMPTS = [[3, 5 + one, 4] for one in range(8)]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
NOISE = 0.02
"""Standard deviation of the change of a weight, relative to the weight."""

LARGEST_DIFFERENCE = 1e-5

Weights = dict[str, torch.Tensor]


@dataclass
class Row:
    """One transport to one server."""

    transport: TransportName
    width: int
    sender: Publisher
    seconds: list[float] = field(default_factory=list)
    difference: float = 0.0


def main(model: Path, rounds: int) -> None:
    """Measure everything, then print the table."""
    weights = {
        name: one.float() for file in sorted(model.glob("*.safetensors")) for name, one in load_file(file).items()
    }
    changed = perturbed(weights)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        hugging_face.write(folder / "changed", changed.items(), template=model)
        urls = {width: stack.enter_context(server(model, width, folder)) for width in WIDTHS}
        fresh = stack.enter_context(server(folder / "changed", 1, folder))
        rows = [
            Row(transport, width, sender(urls[width], transport, width, model, folder, weights))
            for width in WIDTHS
            for transport in get_args(TransportName)
        ]
        measure(rows, rounds, weights, changed)
        for row in rows:
            row.sender.publish(weights.items(), version="before")
            row.sender.publish(changed.items(), version="after")
            row.difference = difference(log_probs(urls[row.width]), log_probs(fresh))
            row.sender.publish(weights.items(), version="before")
        for row in rows:
            row.sender.close()
    print_table(rows, sum(weight.nbytes for weight in weights.values()))
    if worst := [row for row in rows if row.difference > LARGEST_DIFFERENCE]:
        sys.exit(f"{worst[0].transport} differs by {worst[0].difference}, more than {LARGEST_DIFFERENCE}")


def measure(rows: list[Row], rounds: int, weights: Weights, changed: Weights) -> None:
    """Fill in the seconds of every row; the first round, which opens connections and files, is not counted."""
    for round_, (row, sent) in itertools.product(range(rounds + 1), zip(rows, itertools.cycle((weights, changed)))):
        started_s = time.perf_counter()
        row.sender.publish(sent.items(), version=str(round_))
        if round_:
            row.seconds.append(time.perf_counter() - started_s)


def perturbed(weights: Weights) -> Weights:
    """Weights that no server was started with."""
    noise = torch.Generator().manual_seed(1)
    return {name: one * (1 + NOISE * torch.randn(one.shape, generator=noise)) for name, one in weights.items()}


@contextmanager
def server(model: Path, width: int, folder: Path) -> Iterator[str]:
    """The URL of a server of ``width`` processes."""
    log_file = folder / f"{model.name}-{width}.log"
    settings = EngineSettings(model, log_file, dtype="float32", tensor_parallel=width)
    with SGLangServer(settings) as found:
        found.wait_ready()
        yield found.url


def sender(url: str, transport: TransportName, width: int, model: Path, folder: Path, weights: Weights) -> Publisher:
    """Publishes to ``url`` over ``transport``."""
    files = folder / f"weights-{width}"
    settings = PublisherSettings(model, transport=transport, devices_per_engine=width, disk_folder=files)
    return Publisher([url], settings=settings, weights=weights.items(), sends=True)


def log_probs(url: str) -> list[tuple[int, float]]:
    """Tokens and their log-probs."""

    async def ask() -> list[tuple[int, float]]:
        async with GenerateClient(url, timeout_s=120) as client:
            groups = await run_all(client.generate(ids, sampling=GREEDY) for ids in PROMPTS)
        return [pair for (one,) in groups for pair in zip(one.token_ids, one.log_probs, strict=True)]

    return asyncio.run(ask())


def difference(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> float:
    """Largest absolute difference of a token's log-probs; infinite where the tokens differ."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(a - b) if one == other else float("inf") for (one, a), (other, b) in pairs)


def print_table(rows: list[Row], nbytes: int) -> None:
    """Markdown."""
    print("| transport | engine | MB | median ms | worst log-prob difference |\n|---|---|---|---|---|")
    for row in rows:
        ms = 1000 * statistics.median(row.seconds)
        print(f"| {row.transport} | TP{row.width} | {nbytes / 1e6:.1f} | {ms:.0f} | {row.difference:.1e} |")
    print(f"\n{len(rows[0].seconds)} rounds, {os.cpu_count()} cores, load of the machine {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(Path(given.get(1, EMBEDDED)), int(given.get(2, ROUNDS)))
