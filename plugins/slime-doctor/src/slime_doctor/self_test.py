"""The self-test of ``slime doctor``: two processes add numbers, then a short run on real engines and learner ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_doctor.finding import Finding
from slime_doctor.probe import RANKS
from slime_doctor.software import last_line

LIMIT_S = 900
"""Limit in seconds for the run; an engine may take ten minutes to compile its kernels on a GPU."""

END_S = 20
"""Limit in seconds for an interrupted run to end its processes."""

EXPECTED = {"127.0.0.1", "::1", "::"}
"""Addresses at which processes of a run on one machine listen. ``::`` (all interfaces) is a store that SGLang's
scheduler opens (docs/architecture.md)."""

DEMO = (
    *("--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
    *("--advantage-estimator", "sft", "--no-eval", "--check-weight-update-equal", "--ray-address", "local"),
)
"""``sft`` is the core's own estimator, whose gradient is never 0."""


def findings(gpus: int, words: Sequence[str]) -> Iterator[Finding]:
    """Run both parts.

    Arguments:
        gpus: that torch can use.
        words: further flags of ``slime run``.
    """
    yield all_reduce("nccl" if gpus >= RANKS else "gloo")
    with tempfile.TemporaryDirectory(prefix="slime-doctor-") as folder:
        yield two_rollouts([*DEMO, *placement(gpus), *words], Path(folder) / "run")


def all_reduce(backend: str) -> Finding:
    """Let two processes of this machine add 1 and 2."""
    check = f"{backend} all-reduce"
    with tempfile.TemporaryDirectory(prefix="slime-doctor-") as folder:
        command = [sys.executable, "-m", "slime_doctor.probe", "reduce"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), backend, f"{folder}/meeting"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(RANKS)
        ]
        ended = [_ended(rank) for rank in ranks]
    failed = [last_line(rank) for rank in ended if rank.returncode or rank.stdout.split()[-1:] != ["3.0"]]
    if failed:
        step = "docs/troubleshooting.md; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME=lo names the interface"
        return Finding(check, "fail", "; ".join(failed), step)
    return Finding(check, "ok", f"{RANKS} processes added up their numbers")


def _ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nnot ended after {LIMIT_S} s"
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def placement(gpus: int) -> list[str]:
    """Return flags for two ranks and an engine, or for fewer ranks if there are fewer GPUs."""
    if gpus == 0:
        return ["--device", "cpu", "--actor-num-gpus-per-node", "2"]
    ranks = ["--actor-num-gpus-per-node", str(min(gpus, 2))]
    return ranks if gpus > 2 else [*ranks, "--colocate", "--sglang-mem-fraction-static", "0.5"]


def two_rollouts(words: Sequence[str], folder: Path) -> Finding:
    """Start a run on real engines and learner ranks, in which the engines' weights are compared with those sent."""
    command = [sys.executable, "-m", "slime_core", "run", *words, "--output-dir", str(folder), "--progress", "lines"]
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as printed:
        run = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            addresses, in_time = _watch(run, started_s + LIMIT_S)
        finally:
            _end(run)
        printed.seek(0)
        output = printed.read()
    step = f"docs/troubleshooting.md; the same run: slime run {' '.join(words)}"
    if not in_time:
        return Finding("self-test", "fail", f"not ended after {LIMIT_S} s: {_last(output)}", step)
    if run.returncode:
        return Finding("self-test", "fail", f"slime run, exit code {run.returncode}: {_last(output)}", step)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return judge(rows, addresses, time.monotonic() - started_s)


def judge(rows: Sequence[Mapping[str, float]], addresses: set[str], seconds: float) -> Finding:
    """Return the finding of a run that ended, from its metrics.

    Arguments:
        rows: of metrics.jsonl.
        addresses: at which processes of the run listened.
    """
    steps = [row for row in rows if "train/grad_norm" in row]
    if len(steps) != 2 or not all(row["train/grad_norm"] > 0 for row in steps):
        return Finding("self-test", "fail", f"{len(steps)} of 2 optimizer steps with a gradient", "report it to slime")
    difference = steps[-1]["train/train_rollout_logprob_abs_diff"]
    text = (
        f"2 rollouts, 2 optimizer steps and 2 publications in {seconds:.0f} s; with the new weights, learner and "
        f"engine differ by {difference:.1e} nats per token"
    )
    text += f"; processes listened at {', '.join(sorted(addresses))}"
    if addresses - EXPECTED:
        return Finding("self-test", "warn", text, "keep other machines away from this one's ports (docs/engines.md)")
    return Finding("self-test", "ok", text)


def _watch(run: subprocess.Popen[bytes], until_s: float) -> tuple[set[str], bool]:
    """Wait for the run's end; return the addresses at which its processes listened, and whether it ended in time."""
    addresses: set[str] = set()
    while time.monotonic() < until_s:
        addresses |= _listening(run.pid)
        try:
            run.wait(timeout=2)
        except subprocess.TimeoutExpired:
            continue
        return addresses, True
    return addresses, False


def _listening(pid: int) -> set[str]:
    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return set()
    addresses: set[str] = set()
    for process in family:
        try:
            entries = process.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        listening = (entry.laddr.ip for entry in entries if entry.status == psutil.CONN_LISTEN)
        addresses |= {address.removeprefix("::ffff:") for address in listening}
    return addresses


def _end(run: subprocess.Popen[bytes]) -> None:
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGINT)
        try:
            run.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def _last(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "no output"
