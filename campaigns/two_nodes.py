"""Runs over two or three Ray nodes in network namespaces of their own, on one bridge; see ``ray job submit``.

    python -m campaigns.two_nodes FOLDER [PART ...]        about seven minutes on two idle cores; needs root

Loopback is not shared, so a store or a server that listens there, or at the address of another node, is out of reach.
``separate``: learner and engines have cores of their own, weights travel by gloo. ``colocated``: one learner rank and
one engine on each node; each rank hands its own engine the weights. ``disk``: as ``separate``, and engines read the
weights from a folder. ``missing``: the second node does not have the model folder. ``spare``: one learner rank and one
engine, on two of three nodes; one of the two is lost (its interface goes down, all its processes are killed), and the
run restarts on the nodes that are left. ``spread``: one engine of two processes, which no node has the cores for,
takes two of three nodes. ``busy``: another job holds a core and has an actor; the run names what it
waited for, then takes what is free, and leaves the rest as it was. ``slurm``: ``examples/cluster/slime.sbatch``, with
stand-ins for Slurm's programs. The exit code says whether all is as promised.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.config.schema import ARITHMETIC

START_LIMIT_S, RUN_LIMIT_S = 300, 1500
"""Seconds on a busy machine; an idle one needs a tenth."""

REPO = Path(__file__).resolve().parents[1]
PARTS = ("separate", "colocated", "disk", "missing", "spare", "spread", "busy", "slurm")
HEAD, OTHER, SPARE = "10.117.0.1", "10.117.0.2", "10.117.0.3"
SPARE_STEPS = 12

PORT, DASHBOARD = 6390, 8290
TOKEN = secrets.token_hex(32)
SMALL = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--eval-prompt-data", "none")
BRIEF = (
    *SMALL,
    "--eval-interval",
    "none",
    "--progress",
    "lines",
    "--device",
    "cpu",
    "--plugin",
    "grpo",
    "--no-save-hf",
)
TWO_RANKS = (
    *("--actor-num-nodes", "2", "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "2"),
    *("--num-rollout", "2"),
)
LAYOUTS = {
    "separate": TWO_RANKS,
    "colocated": (*TWO_RANKS, "--colocate", "--check-weight-update-equal"),
    "disk": (*TWO_RANKS, "--update-weight-transport", "disk", "--check-weight-update-equal"),
    "missing": TWO_RANKS,
    "spare": ("--num-rollout", str(SPARE_STEPS)),
    "spread": ("--num-rollout", "3", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2"),
    "busy": TWO_RANKS,
}
OTHER_JOB = """
import sys, time
from pathlib import Path
import ray
from ray.util.placement_group import placement_group, remove_placement_group

@ray.remote(num_cpus=0)
class Tenant:
    def __init__(self):
        self.calls = 0
    def call(self):
        self.calls += 1
        return self.calls

folder, address = Path(sys.argv[1]), sys.argv[2]
ray.init(address=address, namespace="other", log_to_driver=False)
tenant = Tenant.options(name="tenant").remote()
ray.get(tenant.call.remote())
group = placement_group([{"CPU": 1}], name="other job")
ray.get(group.ready())
(folder / "holds").touch()
while not (folder / "release").exists():
    time.sleep(0.2)
remove_placement_group(group)
(folder / "released").touch()
while not (folder / "end").exists():
    time.sleep(0.2)
(folder / "calls").write_text(str(ray.get(tenant.call.remote(), timeout=60)))
"""
"""Another program on the cluster: an actor, and a core that it holds until it is told to release it."""


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


class Node:
    """A network namespace with one address, in which commands run."""

    def __init__(self, name: str, address: str, device: str, folder: Path) -> None:
        self.name, self.address, self.device, self.folder = name, address, device, folder

    def environment(self) -> dict[str, str]:
        """Each node names its own interface: the host name resolves to an address outside the namespace."""
        interface = {"GLOO_SOCKET_IFNAME": self.device, "NCCL_SOCKET_IFNAME": self.device}
        return {
            **os.environ,
            **interface,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_raylet_start_wait_time_s": "300",
            "TMPDIR": "/tmp",
            "SLIME_NODE": self.name,
        }

    def run(self, *words: str, limit_s: float, hides: Path | None = None) -> subprocess.CompletedProcess[str]:
        """``words`` inside the namespace; where ``hides`` is given, with an empty folder over that path."""
        inside = ["ip", "netns", "exec", self.name, *words]
        if hides is not None:
            covered = f'mount -t tmpfs none "{hides}" && exec "$@"'
            inside = ["unshare", "--mount", "sh", "-c", covered, "sh", *inside]
        return subprocess.run(
            inside, env=self.environment(), capture_output=True, text=True, timeout=limit_s, check=False
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """``words`` inside the namespace, in the background."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *words], env=self.environment())


def checked(*words: str) -> None:
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{' '.join(words)}: {found.stderr.strip()}")


def require_privileges() -> None:
    """Ends with the reason where namespaces cannot be made."""
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            raise SystemExit(f"two_nodes needs the program {tool} (packages iproute2 and util-linux); it is not here")
    probe = f"slime-probe-{os.getpid()}"
    found = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(
            f"two_nodes makes network namespaces, which this user may not: {found.stderr.strip()}. Run it as root, or "
            "with CAP_NET_ADMIN and CAP_SYS_ADMIN (docker run --privileged)"
        )
    checked("ip", "netns", "del", probe)


@contextmanager
def nodes(folder: Path, addresses: Sequence[str]) -> Iterator[list[Node]]:
    """A namespace for each address; the first has a bridge, to which the others are connected."""
    letters = "abc"[: len(addresses)]
    found = [
        Node(f"slime-{letter}-{os.getpid()}", address, f"sl{letter}{os.getpid()}", folder / letter)
        for letter, address in zip(letters, addresses, strict=True)
    ]
    with ExitStack() as stack:
        for node in found:
            checked("ip", "netns", "add", node.name)
            stack.callback(subprocess.run, ["ip", "netns", "del", node.name], check=False)
        head, *others = found
        checked("ip", "-n", head.name, "link", "add", head.device, "type", "bridge")
        for node in others:
            port = f"{node.device}p"
            checked("ip", "link", "add", port, "netns", head.name, "type", "veth", "peer", "name", node.device)
            checked("ip", "link", "set", node.device, "netns", node.name)
            checked("ip", "-n", head.name, "link", "set", port, "master", head.device, "up")
        for node in found:
            inside = ("ip", "-n", node.name)
            checked(*inside, "addr", "add", f"{node.address}/24", "dev", node.device)
            for device in (node.device, "lo"):
                checked(*inside, "link", "set", device, "up")
        yield found


@contextmanager
def cluster(
    folder: Path, *, addresses: Sequence[str] = (HEAD, OTHER), hides: Mapping[str, Path] | None = None
) -> Iterator[tuple[Node, list[Node]]]:
    """A Ray cluster; yields its head and its other nodes.

    Arguments:
        hides: address of a node -> a path in whose place it has an empty folder of its own.
    """
    with nodes(folder, addresses) as (head, *others):
        # One core each: Ray packs bundles, and would put all on one node.
        shared = ("--num-cpus=1", "--disable-usage-stats", "--object-store-memory=200000000")
        start = [program("ray"), "start", *shared]
        store = Path(f"/tmp/slra{os.getpid()}")
        first = ("--head", f"--port={PORT}", "--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD}")
        try:
            for node in (head, *others):
                words = (*first, f"--temp-dir={store}") if node is head else (f"--address={HEAD}:{PORT}",)
                hidden = (hides or {}).get(node.address)
                found = node.run(
                    *start, *words, f"--node-ip-address={node.address}", limit_s=START_LIMIT_S, hides=hidden
                )
                if found.returncode:
                    raise SystemExit(f"ray start on {node.name}: {found.stdout[-1500:]}{found.stderr[-1500:]}")
            wait_for_dashboard(head)
            yield head, others
        finally:
            for node in (*others, head):
                end_processes(node)
            shutil.rmtree(store, ignore_errors=True)


def wait_for_dashboard(head: Node) -> None:
    ended_s = time.monotonic() + START_LIMIT_S
    while head.run(program("ray"), "job", "list", f"--address=http://{HEAD}:{DASHBOARD}", limit_s=120).returncode:
        if time.monotonic() > ended_s:
            raise SystemExit("ray's dashboard does not answer")
        time.sleep(2)


def end_processes(node: Node) -> None:
    """End every process that is left in the namespace: those that were started there, and no others."""
    listed = subprocess.run(["ip", "netns", "pids", node.name], capture_output=True, text=True, check=False)
    for pid in map(int, listed.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def submit(head: Node, part: str, output: Path, *more: str) -> str:
    """Everything that the job printed, and its state."""
    run = [program("slime"), "run", *BRIEF, *LAYOUTS[part], *more, "--output-dir", str(output)]
    address = f"--address=http://{HEAD}:{DASHBOARD}"
    found = head.run(program("ray"), "job", "submit", address, "--log-style=record", "--", *run, limit_s=RUN_LIMIT_S)
    return found.stdout + found.stderr


def rows(output: Path) -> list[dict[str, Any]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def require(holds: bool, what: str, printed: str) -> None:
    print(f"{'holds' if holds else 'FAILS'}: {what}", flush=True)
    if not holds:
        raise SystemExit(printed[-6000:])


def learns(part: str, folder: Path) -> None:
    """Two steps over both nodes; their processes listen at the nodes' own addresses."""
    output = folder / part / "run"
    with cluster(folder / part) as (head, _):
        printed = submit(head, part, output)
    found = [row for row in rows(output) if "train/grad_norm" in row]
    require(len(found) == 2, f"{part}: two steps", printed)
    require(all(row["train/grad_norm"] > 0 for row in found), f"{part}: each step changes the weights", printed)
    worst = max(row["parity/mean"] for row in found if "parity/mean" in row)
    require(worst < 1e-5, f"{part}: learner and engines compute the same, {worst:.1e}", printed)
    logs = [path.read_text(errors="replace") for path in sorted((output / "logs").glob("engine-*.log"))]
    hosts = {address for log in logs for address in (HEAD, OTHER) if f"'host': '{address}'" in log}
    wanted = {HEAD, OTHER} if part == "colocated" else {OTHER}  # engines take the last node
    require(bool(hosts) and hosts == wanted, f"{part}: engines listen at {', '.join(sorted(hosts))}", printed)


def names_the_node(folder: Path) -> None:
    """The second node does not see the model: one message, and nothing is started."""
    model = folder / "missing" / "model"
    shutil.copytree(ARITHMETIC / "model", model)
    output = folder / "missing" / "run"
    with cluster(folder / "missing", hides={OTHER: model}) as (head, _):
        words = ("--hf-checkpoint", str(model), "--prompt-data", str(ARITHMETIC / "data" / "train.jsonl"))
        printed = submit(head, "missing", output, *words, "--rm-type", "exact_match")
    require(f"({OTHER}): {model}" in printed, f"missing: the node {OTHER} and the folder are named", printed)
    require(not list((output / "logs").glob("engine-*.log")), "missing: no engine was started", printed)


def takes_only_its_own(folder: Path) -> None:
    """A run on a cluster that another job uses: refused while a core is held, and afterwards without a trace."""
    place = folder / "busy"
    with cluster(place) as (head, _):
        place.mkdir(exist_ok=True)
        other = head.start(sys.executable, "-c", OTHER_JOB, str(place), f"{HEAD}:{PORT}")
        try:
            wait_for(place / "holds")
            printed = submit(head, "busy", place / "refused")
            require("1 CPU and 0 GPU free" in printed, "busy: what is free is named", printed)
            (place / "release").touch()
            wait_for(place / "released")
            printed = submit(head, "busy", place / "run")
            found = [row for row in rows(place / "run") if "train/grad_norm" in row]
            require(len(found) == 2, "busy: two steps beside the other job's actor", printed)
            (place / "end").touch()
            wait_for(place / "calls")
            calls = (place / "calls").read_text()
            require(calls == "2", f"busy: the other job's actor lives on, call {calls}", printed)
            status = head.run(program("ray"), "status", f"--address={HEAD}:{PORT}", limit_s=120).stdout
            require("0.0/2.0 CPU" in status, "busy: the cluster has both nodes, and every core is free", status)
        finally:
            other.kill()


SRUN = """#!/usr/bin/env bash
set -e
node={head}
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) node=${{1#*=}} ;; --exclude=*) node={other} ;; esac
    shift
done
device={head_device}
if [ "$node" = {other} ]; then device={other_device}; fi
exec ip netns exec "$node" env GLOO_SOCKET_IFNAME="$device" NCCL_SOCKET_IFNAME="$device" "$@"
"""


def runs_in_a_slurm_job(folder: Path) -> None:
    """The script of examples/cluster, whose ``srun`` enters the namespace of a node."""
    place, store = folder / "slurm", Path(f"/tmp/sls{os.getpid()}")
    programs = place / "bin"
    programs.mkdir(parents=True)
    with nodes(place, (HEAD, OTHER)) as (head, other):
        names = {"head": head.name, "other": other.name, "head_device": head.device, "other_device": other.device}
        texts = {"srun": SRUN.format(**names), "scontrol": f"#!/bin/sh\nprintf '{head.name}\\n{other.name}\\n'\n"}
        for name, text in texts.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        job = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "VENV": sys.prefix,
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_SUBMIT_DIR": str(REPO),
            "HEAD_ADDRESS": HEAD,
            "RAY_NUM_CPUS": "1",
            "RAY_TMPDIR": str(store),
            "START_LIMIT_S": str(START_LIMIT_S),
        }
        words = ["bash", REPO / "examples/cluster/slime.sbatch", *BRIEF, *TWO_RANKS, "--output-dir", place / "run"]
        try:
            found = subprocess.run(
                list(map(str, words)),
                env=head.environment() | job,
                capture_output=True,
                text=True,
                timeout=RUN_LIMIT_S,
                check=False,
            )
        finally:
            for node in (other, head):
                end_processes(node)
            shutil.rmtree(store, ignore_errors=True)
    printed = found.stdout + found.stderr
    require(found.returncode == 0, f"slurm: the job's exit code is {found.returncode}", printed)
    learnt = [row for row in rows(place / "run") if "train/grad_norm" in row]
    require(len(learnt) == 2, "slurm: two steps over both nodes, with the job's token", printed)


def wait_for(path: Path) -> None:
    ended_s = time.monotonic() + START_LIMIT_S
    while not path.exists():
        if time.monotonic() > ended_s:
            raise SystemExit(f"{path} does not appear")
        time.sleep(0.2)


def survives(folder: Path) -> None:
    """A node is lost, without a word on its connections; the run goes on, on the two others."""
    output = folder / "spare" / "run"
    with cluster(folder / "spare", addresses=(HEAD, OTHER, SPARE)) as (head, others), ThreadPoolExecutor(1) as threads:
        run = threads.submit(submit, head, "spare", output, "--save-interval", "2")
        deadline_s = time.monotonic() + RUN_LIMIT_S
        while not (output / "checkpoints" / "step-000002").exists():
            if run.done() or time.monotonic() > deadline_s:
                raise SystemExit("spare: no checkpoint came")
            time.sleep(0.2)
        lost = next(node for node in others if works(node))
        checked("ip", "-n", lost.name, "link", "set", lost.device, "down")
        end_processes(lost)
        lost_s = time.monotonic()
        print(f"spare: the node {lost.address} is lost", flush=True)
        printed = run.result()
        seconds = time.monotonic() - lost_s
    require("restart 1 of 3 in 1 s: the run continues from step-" in printed, "spare: the run restarts", printed)
    steps = [row["step"] for row in rows(output) if "train/grad_norm" in row]
    require(steps == list(range(SPARE_STEPS)), "spare: every step is trained once", printed)
    require("succeeded" in printed, f"spare: the job succeeds, {seconds:.0f} s after the loss", printed)
    ledger = subprocess.run([program("slime"), "ledger", str(output)], capture_output=True, text=True, check=False)
    require(ledger.returncode == 0, "spare: the ledger balances", ledger.stdout + ledger.stderr)


def spreads(folder: Path) -> None:
    """An engine over two nodes trains with a learner on the third; without one of its parts it is started again."""
    output, addresses = folder / "spread" / "run", (HEAD, OTHER, SPARE)
    # SGLang takes processes that share memory for processes of one node, and connects them over loopback.
    apart = cluster(folder / "spread", addresses=addresses, hides=dict.fromkeys(addresses, Path("/dev/shm")))
    with apart as (head, others), ThreadPoolExecutor(1) as threads:
        run = threads.submit(submit, head, "spread", output, "--check-weight-update-equal", "--use-fault-tolerance")
        while len(rows(output)) < 1 and not run.done():
            time.sleep(0.2)
        for node in others:
            for pid, words in processes(node):
                if "keyed.py" in words and "--node-rank=1" in words and "supervisor.py" not in words:
                    os.kill(pid, 9)
        printed = run.result()
    found = [row for row in rows(output) if "train/grad_norm" in row]
    require(len(found) == 3, "spread: three steps", printed)
    worst = max(row["parity/mean"] for row in found if "parity/mean" in row)
    require(worst < 1e-5, f"spread: learner and engine compute the same, {worst:.1e}", printed)
    logs = [path.read_text(errors="replace") for path in sorted((output / "logs").glob("engine-0*.log"))]
    hosts = {address for log in logs for address in addresses if f"'host': '{address}'" in log}
    require(hosts == {OTHER, SPARE}, f"spread: the parts listen at {', '.join(sorted(hosts))}", printed)
    again = "engine 0 gets requests again" in printed
    require(again, "spread: after the part on the second of its nodes is killed, the engine starts again", printed)


def works(node: Node) -> bool:
    """Whether a learner rank or an engine runs there."""
    names = "".join(words for _, words in processes(node))
    return "ray::LearnerActor" in names or "sglang::scheduler" in names


def processes(node: Node) -> list[tuple[int, str]]:
    """Ids and command lines of the processes there."""
    listed = subprocess.run(["ip", "netns", "pids", node.name], capture_output=True, text=True, check=False)
    found = [(pid, Path(f"/proc/{pid}/cmdline")) for pid in map(int, listed.stdout.split())]
    return [(pid, path.read_text(errors="replace")) for pid, path in found if path.exists()]


SPECIAL = {
    "missing": names_the_node,
    "spare": survives,
    "spread": spreads,
    "busy": takes_only_its_own,
    "slurm": runs_in_a_slurm_job,
}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    given = parser.parse_args(arguments)
    require_privileges()
    folder = given.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for part in given.parts or PARTS:
        SPECIAL.get(part, partial(learns, part))(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
