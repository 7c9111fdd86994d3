"""Live runs with an external engine and with groups of engines, and the table of docs/results.md.

    python -m campaigns.engines FOLDER [PART ...]        about four minutes on two idle cores

``external``: a server that is started as a user would is given to a run by its address, serves another model, dies in
the middle of a run, and is dead. ``groups``: two engines of one and of two processes with settings of their own, a
reward model on two engines, and conversations of two turns. The exit code says whether all is as the table promises.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3ForSequenceClassification

from campaigns.fault_injection import wait_until
from slime_core.config.schema import ARITHMETIC
from slime_core.weights.engine_control import call
from tests.external_engine import end, served

MODEL = ARITHMETIC / "model"
TURNS = Path(__file__).parent / "two_turns.py"
START_LIMIT_S, RUN_LIMIT_S = 600, 2400
"""Seconds on a busy machine; an idle one needs a tenth."""
ROLLOUTS = 3
PARTS = ("external", "groups")
PARITY, SCORES = 1e-5, 1e-5
"""Largest mean difference of log-probs between trainer and engine, and difference of a score from transformers'."""

SMALL = ("--rollout-batch-size", "16", "--n-samples-per-prompt", "4", "--eval-prompt-data", "none")
BRIEF = (*SMALL, "--eval-interval", "none", "--progress", "none", "--device", "cpu", "--plugin", "grpo")

GROUPS = """
[cluster]
rollout_num_gpus = 3
[engine]
sglang_router_policy = "consistent_hashing"
[[engine.engine_groups]]
num_gpus = 1
overrides = {{ chunked_prefill_size = 512 }}
[[engine.engine_groups]]
num_gpus = 2
num_gpus_per_engine = 2
overrides = {{ max_running_requests = 48 }}
[[engine.engine_models]]
name = "scorer"
model_path = "{scorer}"
num_gpus = 2
is_embedding = true
[sglang]
log_requests = true
log_requests_level = 0
[rollout]
generate_function = "turns"
rm_type = "0.5*exact_match + 0.5*served_rm"
rm_model = "scorer"
"""

Rows = list[tuple[str, str, bool]]
"""What was looked at, what was found, whether that is right."""


def main(folder: Path, parts: Sequence[str]) -> int:
    """Print the table; 0 where every line is right."""
    folder.mkdir(parents=True, exist_ok=True)
    looks: dict[str, Callable[[Path], Rows]] = {"external": external, "groups": groups}
    found = [(part, *row) for part in parts for row in looks[part](folder / part)]
    print("| part | what | found | |")
    print("|---|---|---|---|")
    for part, what, outcome, is_right in found:
        print(f"| {part} | {what} | {outcome} | {'yes' if is_right else 'NO'} |")
    return 0 if all(row[-1] for row in found) else 1


# --- External engines -------------------------------------------------------------------------------------------------


def external(folder: Path) -> Rows:
    """Four runs before one server."""
    folder.mkdir(exist_ok=True)
    with served(folder / "server.log") as (server, url):
        named = ("--rollout-external-engine-addrs", url.removeprefix("http://"))
        ended = slime(folder / "run", *named, "--num-rollout", str(ROLLOUTS), "--check-weight-update-equal")
        rows = [
            ("a run ends", f"code {ended.returncode}", ended.returncode == 0),
            parity(folder / "run"),
            ("the server afterwards", *left_running(server, url)),
        ]
        other = another_model(folder / "other")
        data = ("--prompt-data", str(ARITHMETIC / "data" / "train.jsonl"), "--rollout-max-response-len", "8")
        refused = slime(folder / "refused", *named, *data, "--num-rollout", "1", "--hf-checkpoint", str(other))
        rows.append(("another model", *says(refused, "is not that of")))
        rows.append(("it dies midway", *dies_midway(folder / "dies", named, server)))
        dead = slime(folder / "dead", *named, "--num-rollout", "1")
        rows.append(("it is dead", *says(dead, "it does not answer as an SGLang server")))
    return rows


def left_running(server: psutil.Popen, url: str) -> tuple[str, bool]:
    """What the server says when the run is over."""
    version = call(url, "/model_info", timeout_s=5)["weight_version"]
    request = {"input_ids": [3, 8, 4], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    ids = call(url, "/generate", request, timeout_s=30)["output_ids"]
    is_right = server.is_running() and version == str(ROLLOUTS) and bool(ids)
    return f"answers, with weights of version {version}", is_right


def another_model(folder: Path) -> Path:
    """The embedded checkpoint with another base of its rotations."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "rope_theta": 20_000.0}))
    return folder


def dies_midway(folder: Path, named: tuple[str, ...], server: psutil.Popen) -> tuple[str, bool]:
    """The server is killed after two steps of a long run."""
    words = command(folder, *named, "--num-rollout", "200")
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = folder / "metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, RUN_LIMIT_S, "two steps")
        killed_s = time.monotonic()
        end(server)
        _, errors = running.communicate(timeout=RUN_LIMIT_S)
        took_s = time.monotonic() - killed_s
    finally:
        running.kill()
    is_right = running.returncode == 1 and "an external one, is gone" in errors and took_s < 60
    return f"after {took_s:.0f} s: {short(errors)}", is_right


# --- Engines of several kinds -----------------------------------------------------------------------------------------


def groups(folder: Path) -> Rows:
    """One run with engines of two sizes, a reward model on two engines, and conversations."""
    scorer, file = reward_model(folder / "scorer"), folder / "run.toml"
    file.write_text(GROUPS.format(scorer=scorer))
    words = ("--plugin", str(TURNS), "--config", str(file), "--num-rollout", str(ROLLOUTS))
    ended = slime(folder / "run", *words, "--check-weight-update-equal")
    rows = [("a run ends", f"code {ended.returncode}", ended.returncode == 0)]
    if ended.returncode:
        print(ended.stdout + ended.stderr, file=sys.stderr)
        return rows
    logs = [(folder / "run" / "logs" / f"engine-{number}.log").read_text() for number in (0, 1)]
    rows.append(parity(folder / "run"))
    rows.append(("settings of the groups", *own_settings(logs)))
    rows.append(("turns of a conversation", *affinity(logs)))
    rows.append(("scores against transformers", *scored(folder / "run", scorer)))
    return rows


def reward_model(folder: Path) -> Path:
    """A tiny reward model: the embedded checkpoint under a head of one output, which has no bias."""
    config = AutoConfig.from_pretrained(MODEL)
    config.num_labels = 1
    torch.manual_seed(5)
    scorer = Qwen3ForSequenceClassification(config)
    scorer.model.load_state_dict(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).model.state_dict())
    torch.nn.init.normal_(scorer.score.weight, std=0.05)
    scorer.float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def own_settings(logs: list[str]) -> tuple[str, bool]:
    """The settings that each engine logged at its start."""
    names = ("tp_size", "chunked_prefill_size", "max_running_requests")
    settings = [{name: re.findall(rf"'{name}': (\d+)", log)[0] for name in names} for log in logs]
    is_right = settings == [
        dict(zip(names, values, strict=True)) for values in (("1", "512", "256"), ("2", "4096", "48"))
    ]
    return "; ".join(", ".join(f"{name} {value}" for name, value in one.items()) for one in settings), is_right


def affinity(logs: list[str]) -> tuple[str, bool]:
    """Which conversations' turns each engine received, by its log of requests."""
    turns = [set(re.findall(r"Receive: .*?rid='turn-(\S+?)-(\d)'", log)) for log in logs]
    homes = [{session for session, _ in found} for found in turns]
    both, counts = homes[0] & homes[1], [len(home) for home in homes]
    is_whole = sum(map(len, turns)) == 2 * sum(counts) == 2 * ROLLOUTS * 16 * 4
    return f"{counts[0]} and {counts[1]} conversations, {len(both)} on both engines", not both and is_whole and all(
        counts
    )


def scored(run: Path, scorer: Path) -> tuple[str, bool]:
    """Largest difference between the rewards that were trained on and what transformers computes."""
    model, tokenizer = (
        Qwen3ForSequenceClassification.from_pretrained(scorer).float(),
        AutoTokenizer.from_pretrained(scorer),
    )
    differences = []
    for path in sorted((run / "samples").glob("train-*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            ids = torch.tensor([tokenizer(row["prompt"] + row["response"])["input_ids"]])
            with torch.no_grad():
                score = model(ids).logits.item()
            differences.append(abs(row["metadata"]["reward_parts"]["served_rm"] - score))
    largest = max(differences)
    return f"{len(differences)} scores, largest difference {largest:.1e}", largest < SCORES


# --- Runs -------------------------------------------------------------------------------------------------------------


def command(folder: Path, *words: str) -> list[str]:
    """A short run into ``folder``, which must not be there."""
    shutil.rmtree(folder, ignore_errors=True)
    return [sys.executable, "-m", "slime_core", "run", *BRIEF, "--output-dir", str(folder), *words]


def slime(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """That run, at its end."""
    return subprocess.run(command(folder, *words), capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)


def parity(run: Path) -> tuple[str, str, bool]:
    """Largest mean difference of log-probs over the steps."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    name = "train/train_rollout_logprob_abs_diff"
    differences = [row[name] for row in rows if name in row]
    is_right = len(differences) == ROLLOUTS and max(differences) < PARITY
    return "trainer and engines agree", f"{max(differences):.1e} in {len(differences)} steps", is_right


def says(ended: subprocess.CompletedProcess[str], text: str) -> tuple[str, bool]:
    """The message of a run that was refused."""
    return short(ended.stderr), ended.returncode == 2 and text in ended.stderr and "Traceback" not in ended.stderr


def short(errors: str) -> str:
    """A message on one line, with folders left out."""
    message = " ".join(errors.partition("slime: ")[2].split())
    return re.sub(r"(?<!\S)/\S*/", "", re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", message)).replace("|", "\\|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    # Python 3.11 holds the default of no words at all against the choices, as one of them.
    parser.add_argument("parts", nargs="*", default="all", choices=["all", *PARTS])
    given = parser.parse_args()
    sys.exit(main(given.folder.resolve(), PARTS if "all" in given.parts else given.parts))
