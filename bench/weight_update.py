"""Compares weight updates of a real engine with a bare broadcast of the same bytes to a process that loads them.

    python -m bench.weight_update outputs/weights [--model outputs/smollm2/model] [--rounds 7]

A learner of one rank (Megatron, in this process) publishes to an SGLang server on the CPU over each transport.
Alternately, for comparison, a process that has loaded the model's parameters receives their bytes in one gloo broadcast
and copies them into the parameters. An update is everything from pause to resume: export, checks, transfer, loading,
the checksums of both sides. The buffers of the broadcast are allocated once. Needs two cores, so that neither side
waits.

The second table says where an update's seconds go, as medians: the learner's parts by function, the engine's by HTTP
call. Parts overlap, so they do not add up to the update. CPU seconds are those of whole processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from slime_core.rollout.engines.engine import EngineSettings, SGLangServer
from slime_core.runtime.machine import cpu_threads
from slime_core.weights import PublisherSettings, TransportName, engine_control, publisher, transports
from slime_core.weights.publisher import Publisher
from slime_testing.harness.megatron import start_single_rank

FLOOR = "broadcast and loading alone"
PARTS = {
    "learner: finiteness": (publisher, "_require_finite"),
    "learner: checksums": (publisher, "_add"),
    "learner: flat copy": (transports, "flatten"),
}
"""Part of an update -> its function."""

Seconds = defaultdict[str, float]
Export = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def main() -> None:
    """Measure everything, then print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, default=Path("outputs/smollm2/model"))
    parser.add_argument("--rounds", type=int, default=7)
    known = get_args(TransportName)
    parser.add_argument("--transports", nargs="+", choices=known, default=known)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        receive(arguments.model, arguments.receive, arguments.rounds)
        return
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    export = learner(arguments.model)
    settings = EngineSettings(arguments.model, folder / "engine.log", dtype="float32", threads=cpu_threads())
    with ExitStack() as stack:
        server = stack.enter_context(SGLangServer(settings))
        floor = stack.enter_context(bare(arguments.model, export, arguments.rounds))
        server.wait_ready()
        senders = {
            one: Publisher([server.url], settings=how(arguments.model, one, folder), weights=export(), sends=True)
            for one in arguments.transports
        }
        totals, parts = measure(floor, senders, export, rounds=arguments.rounds)
        for sender in senders.values():
            sender.close()
    print_tables(totals, parts, nbytes=sum(weight.nbytes for _, weight in export()))


def learner(model: Path) -> Export:
    """Build a learner of one rank with the weights of ``model``, and their exporter."""
    layout = start_single_rank()
    torch.set_num_threads(cpu_threads())
    from slime_core import RunView
    from slime_models.llama import Llama
    from slime_models.qwen3 import Qwen3

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    spec = {"llama": Llama, "qwen3": Qwen3}[config["model_type"]](RunView())
    chunks = spec.build(config, dtype=torch.float32, parallel=layout)
    spec.load_weights(chunks, model)
    return lambda: spec.export_weights(chunks)


def how(model: Path, transport: TransportName, folder: Path) -> PublisherSettings:
    """Return the settings of a run on a CPU."""
    return PublisherSettings(model, transport=transport, disk_folder=folder / "versions")


def measure(
    floor: Callable[[], Mapping[str, float]], senders: Mapping[str, Publisher], export: Export, *, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[Mapping[str, float]]]]:
    """Return seconds of each round and its parts by transport; the first round opens connections and is left out."""
    totals: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        sides = {FLOOR: floor} | {one: partial(update, sender, export, number) for one, sender in senders.items()}
        found = {name: with_cpu(side) for name, side in sides.items()}
        for name, seconds in found.items() if number else ():
            totals[name].append(seconds["all"])
            parts[name].append(seconds)
        print(json.dumps({name: round(seconds["all"], 3) for name, seconds in found.items()}), file=sys.stderr)
    return totals, parts


def with_cpu(side: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
    """Call the function; return its seconds and the CPU seconds of both sides."""
    before = cpu_seconds()
    seconds = side()
    return {**seconds, **{name: now - before[name] for name, now in cpu_seconds().items()}}


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds of this process and of its descendants: the engine, or the receiver."""
    own = psutil.Process()
    times = [sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True))]
    return {"CPU, sender": times[0], "CPU, receiver": sum(times[1:])}


def update(sender: Publisher, export: Export, number: int) -> Mapping[str, float]:
    """Publish once; return the seconds and those of the parts."""
    seconds: Seconds = defaultdict(float)
    with ExitStack() as stack:
        for part, (module, function) in PARTS.items():
            timed = clocked(getattr(module, function), seconds, lambda *_, part=part: part)
            stack.enter_context(mock.patch.object(module, function, timed))
        call = clocked(engine_control.call, seconds, lambda _, endpoint, *__: f"engine: {endpoint}")
        stack.enter_context(mock.patch.object(engine_control, "call", call))
        started_s = time.perf_counter()
        assert sender.publish(passing(export(), seconds), version=str(number)) == 1
        seconds["all"] = time.perf_counter() - started_s
    return seconds


def clocked(function: Callable[..., Any], seconds: Seconds, name: Callable[..., str]) -> Callable[..., Any]:
    """Wrap ``function`` to add its seconds to the entry that ``name`` returns for its arguments."""

    def run(*arguments: Any, **options: Any) -> Any:
        started_s = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds[name(*arguments)] += time.perf_counter() - started_s

    return run


def passing(weights: Iterator[tuple[str, torch.Tensor]], seconds: Seconds) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``weights``, and record the seconds that producing them takes."""
    make = clocked(lambda: next(weights, None), seconds, lambda: "learner: export")
    while (weight := make()) is not None:
        yield weight


# --- The floor -------------------------------------------------------------------------------------------------------


@contextmanager
def bare(model: Path, export: Export, rounds: int) -> Iterator[Callable[[], Mapping[str, float]]]:
    """Broadcast once to a process that loads the bytes; return the seconds of both."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    command = [sys.executable, "-m", "bench.weight_update", "-", "--model", str(model), "--rounds", str(rounds)]
    other = subprocess.Popen([*command, "--receive", str(store.port)])
    group = gloo(store, 0)
    flat = transports.flatten([weight for _, weight in export()])
    done = torch.zeros(2, dtype=torch.float64)

    def once() -> Mapping[str, float]:
        started_s = time.perf_counter()
        group.broadcast(flat, 0).wait()
        group.broadcast(done, 1).wait()
        whole = time.perf_counter() - started_s
        return {"all": whole, "loading": float(done[0]), "broadcast": whole - float(done[0])}

    try:
        yield once
        other.wait(timeout=60)
    finally:
        other.kill()


def receive(model: Path, port: int, rounds: int) -> None:
    """Receive and load broadcasts in the other process."""
    from safetensors.torch import load_file

    torch.set_num_threads(1)  # as in an engine: of two threads each waits for the other, which takes longer
    parameters = [one.clone() for file in sorted(model.glob("*.safetensors")) for one in load_file(file).values()]
    flat = transports.flatten(parameters)
    places = flat.split([one.nbytes for one in parameters])
    pieces = [place.view(one.dtype).view(one.shape) for place, one in zip(places, parameters, strict=True)]
    group = gloo(dist.TCPStore("127.0.0.1", port, 2, is_master=False), 1)  # type: ignore[attr-defined]
    done = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds + 1):
        group.broadcast(flat, 0).wait()
        started_s = time.perf_counter()
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.copy_(piece)
        done[0] = time.perf_counter() - started_s
        group.broadcast(done, 1).wait()


def gloo(store: Any, rank: int) -> Any:
    """Create a process group of two processes."""
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(dist.PrefixStore("floor", store), rank, 2, timedelta(seconds=300))  # type: ignore[attr-defined]


# --- Tables ----------------------------------------------------------------------------------------------------------


def print_tables(
    totals: Mapping[str, Sequence[float]], parts: Mapping[str, Sequence[Mapping[str, float]]], *, nbytes: int
) -> None:
    """Print two Markdown tables: the updates, and their parts."""
    rounds = len(totals[FLOOR])
    print(f"{nbytes / 1e6:.0f} MB, {rounds} rounds; load average {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores\n")
    print("| update | median s | least | most | ratio of medians |\n|---|---|---|---|---|")
    least = statistics.median(totals[FLOOR])
    for name, found in totals.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.2f} | {min(found):.2f} | {max(found):.2f} | {median / least:.1f} |")
    names = list(dict.fromkeys(part for rows in parts.values() for row in rows for part in row if part != "all"))
    print("\n| seconds of | " + " | ".join(parts) + " |\n|---|" + "---|" * len(parts))
    for part in names:
        medians = [statistics.median(row.get(part, 0.0) for row in rows) for rows in parts.values()]
        print(f"| {part} | " + " | ".join(f"{one:.3f}" if one else "" for one in medians) + " |")


if __name__ == "__main__":
    main()
