"""What repeats when rollouts are sampled again with the same seed on a CPU engine: the table of docs/debugging.md.

    python -m campaigns.repeat FOLDER

The built-in model, one engine, one thread. Requests are sent to engines that were started with the same
``--random-seed``, once one after another and once all at a time; then whole runs of two rollouts with the same
``--seed``, with one request in flight and with many. Each row says in how many of the answers every token is the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_core.config.schema import ARITHMETIC
from slime_core.errors import EngineError
from slime_core.rollout.engines.engine import EngineSettings, SGLangServer

NUM, MANY = 64, 32
RUN = (
    *("--plugin", "grpo", "--progress", "lines", "--num-rollout", "2", "--seed", "5", "--rollout-batch-size", "8"),
    *("--n-samples-per-prompt", "4", "--eval-prompt-data", "none", "--eval-interval", "none"),
)
ALONE = ("--sglang-server-concurrency", "1")


def main(folder: Path) -> None:
    """Print the table."""
    folder.mkdir(parents=True, exist_ok=True)
    print("| sampled twice | same answers |\n|---|---|")
    first, second = (answers_of_an_engine(folder) for _ in range(2))
    for name, answers in first.items():
        row(name, answers, second[name])
    seeded = first["with a sampling_seed each, 32 at a time"]
    row("the same sampling_seed, twice on one engine", seeded[:1], first["the same sampling_seed again"][:1])
    for name, flags in (("a run with --sglang-server-concurrency 1", ALONE), ("a run", ())):
        first_run, second_run = (samples_of_a_run(folder / f"run-{len(flags)}-{number}", flags) for number in range(2))
        row(f"{name}: prompts and tokens", *([one[:2] for one in run] for run in (first_run, second_run)))
        row(f"{name}: log-probabilities too, bit for bit", first_run, second_run)
    print(f"\n--enable-deterministic-inference: {refusal(folder, '--enable-deterministic-inference')}")


def row(name: str, first: Sequence[Any], second: Sequence[Any]) -> None:
    """Print a row."""
    same = sum(one == other for one, other in zip(first, second, strict=True))
    print(f"| {name} | {same} of {len(first)} |", flush=True)


def answers_of_an_engine(folder: Path) -> dict[str, list[Any]]:
    """What a fresh engine answers to the same requests in the same order."""
    lines = (ARITHMETIC / "data" / "held_out.jsonl").read_text().splitlines()[:NUM]
    prompts = [json.loads(line)["prompt"] for line in lines]
    greedy: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 8}
    sampled = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
    with engine(folder) as url:
        found = {}
        for name, sampling, at_a_time in (
            ("one after another", sampled, 1),
            ("greedy, one after another", greedy, 1),
            (f"greedy, {MANY} at a time", greedy, MANY),
            (f"{MANY} at a time", sampled, MANY),
            (f"with a sampling_seed each, {MANY} at a time", {**sampled, "sampling_seed": 7}, MANY),
            ("the same sampling_seed again", {**sampled, "sampling_seed": 7}, 1),
        ):
            with ThreadPoolExecutor(at_a_time) as pool:
                found[name] = list(pool.map(lambda prompt, of=sampling: ask(url, prompt, of), prompts))
        found["siblings of one request (n = 4), one after another"] = [
            ask(url, prompt, {**sampled, "n": 4}) for prompt in prompts
        ]
        return found


@contextmanager
def engine(folder: Path, *extra: str) -> Iterator[str]:
    """An engine of the built-in model; yields its URL."""
    settings = EngineSettings(ARITHMETIC / "model", folder / "engine.log", dtype="float32", seed=5, extra=extra)
    with SGLangServer(settings) as server:
        server.wait_ready()
        yield server.url


def ask(url: str, prompt: str, sampling: dict[str, Any]) -> Any:
    """The tokens of the answer."""
    content = json.dumps({"text": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{url}/generate", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    return [one["output_ids"] for one in (found if isinstance(found, list) else [found])]


def samples_of_a_run(folder: Path, flags: Sequence[str]) -> list[Any]:
    """Prompt, tokens and log-probabilities of every trained sample, in order."""
    saved = folder.with_name(f"{folder.name}-saved") / "{rollout_id}.jsonl"
    words = ["run", *RUN, *flags, "--output-dir", str(folder), "--save-debug-rollout-data", str(saved)]
    subprocess.run([sys.executable, "-m", "slime_core", *words], check=True, capture_output=True)
    lines = [line for path in sorted(saved.parent.glob("*.jsonl")) for line in path.read_text().splitlines()[1:]]
    return [[one["prompt"], one["tokens"], one["rollout_log_probs"]] for one in map(json.loads, lines)]


def refusal(folder: Path, flag: str) -> str:
    """How an engine ends that gets ``flag``."""
    try:
        with engine(folder, flag) as url:
            return f"starts, at {url}"
    except EngineError as error:
        lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
        return lines[-1] if lines else str(error)[-300:]


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
