"""The examples for batch systems: what can be checked of them without docker, Kubernetes and Slurm."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime_core.config.load import load, peek
from slime_core.plugins.activation import activate_line

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "cluster"
SCRIPT = FOLDER / "slime.sbatch"

JOB = {
    "entrypoint",
    "submissionMode",
    "shutdownAfterJobFinishes",
    "backoffLimit",
    "submitterPodTemplate",
    "rayClusterSpec",
}
CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
HEAD = {"rayStartParams", "template"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
"""Fields that KubeRay's types have: ray-operator/apis/ray/v1/rayjob_types.go and raycluster_types.go, tags ``json``."""

SRUN = """#!/usr/bin/env bash
# Runs the command here, in place of the nodes that it is meant for.
node=
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) node=${1#*=} ;; --exclude=*) node="not ${1#*=}" ;; esac
    shift
done
echo "$node: $*" >>"$CALLS"
exec "$@"
"""
STAND_INS = {
    "srun": SRUN,
    "scontrol": "#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n",
    "hostname": "#!/bin/sh\necho 10.0.0.1 172.17.0.1\n",
    # Given a program, the Python that waits for the nodes; the token is made by the real one.
    "python": "#!/bin/sh\n"
    'while [ "$1" = - ] && [ "$(grep -c . "$TOKENS" 2>/dev/null)" != 2 ]; do sleep 0.05; done\n'
    f'[ "$1" = - ] && exec cat >/dev/null\nexec {sys.executable} "$@"\n',
    "ray": '#!/bin/sh\necho "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$TOKENS"\nexec sleep 600\n',
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a job whose programs are stand-ins; ``slime`` is left to the test."""
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name, text in STAND_INS.items():
        write(bin_folder / name, text)
    return {
        "PATH": os.environ["PATH"],
        "VENV": str(tmp_path / "venv"),
        "CALLS": str(tmp_path / "calls"),
        "TOKENS": str(tmp_path / "tokens"),
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }


def write(program: Path, text: str) -> None:
    program.write_text(text)
    program.chmod(0o755)


def test_the_slurm_job_starts_ray_on_every_node_and_the_run_on_the_first(cluster: dict[str, str]) -> None:
    write(Path(cluster["VENV"], "bin", "slime"), "#!/bin/sh\nexit 3\n")
    ended = subprocess.run(["bash", SCRIPT, "--plugin", "grpo", "a b"], env=cluster, check=False, timeout=600)
    assert ended.returncode == 3
    calls = Path(cluster["CALLS"]).read_text().splitlines()
    ray = "ray start --block --disable-usage-stats"
    assert sorted(call for call in calls if " ray start" in call) == [
        f"n1: {ray} --head --node-ip-address=10.0.0.1 --port=6379 --include-dashboard=false",
        f"not n1: {ray} --address=10.0.0.1:6379",
    ]
    assert calls[0] == "n1: hostname --ip-address"
    assert calls[-1] == "n1: slime run --ray-address 10.0.0.1:6379 --plugin grpo a b"
    tokens = Path(cluster["TOKENS"]).read_text().splitlines()
    assert len(tokens) == 2
    assert len(set(tokens)) == 1
    assert re.fullmatch("token [0-9a-f]{64}", tokens[0])


def test_the_token_is_on_no_command_line(cluster: dict[str, str]) -> None:
    write(Path(cluster["VENV"], "bin", "slime"), "#!/bin/sh\nexit 0\n")
    given = cluster | {"RAY_AUTH_TOKEN": "my-secret", "HEAD_ADDRESS": "10.9.9.9", "RAY_NUM_CPUS": "4"}
    assert subprocess.run(["bash", SCRIPT], env=given, check=False, timeout=600).returncode == 0
    calls = Path(cluster["CALLS"]).read_text()
    assert "my-secret" not in calls
    assert "hostname" not in calls
    assert "--num-cpus=4 --address=10.9.9.9:6379" in calls
    assert Path(cluster["TOKENS"]).read_text().splitlines() == ["token my-secret"] * 2


def test_sigterm_reaches_the_run_and_its_exit_code_counts(cluster: dict[str, str], tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = f"trap 'echo saved >>{tmp_path}/saved; exit 130' TERM; touch {ready}; while :; do sleep 0.1; done"
    write(Path(cluster["VENV"], "bin", "slime"), f"#!/usr/bin/env bash\n{program}\n")
    job = subprocess.Popen(["bash", SCRIPT], env=cluster)
    ended_s = time.monotonic() + 600
    while not ready.exists() and time.monotonic() < ended_s:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=600) == 130
    assert (tmp_path / "saved").read_text() == "saved\n"


def rayjob() -> Any:
    return yaml.safe_load((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))


def test_the_ray_job_has_only_fields_that_kuberay_knows() -> None:
    job = rayjob()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    assert spec.keys() <= JOB
    assert cluster.keys() <= CLUSTER
    assert cluster["headGroupSpec"].keys() <= HEAD
    assert all(group.keys() <= WORKERS for group in cluster["workerGroupSpecs"])


def test_every_pod_has_the_token_shared_memory_and_volumes_that_it_mounts() -> None:
    spec = rayjob()["spec"]
    cluster = spec["rayClusterSpec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in (*pods, spec["submitterPodTemplate"]["spec"]):
        (container,) = pod["containers"]
        assert [one["name"] for one in container["env"]] == ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN"]
        mounted = {one["name"] for one in container.get("volumeMounts", ())}
        assert mounted == {one["name"] for one in pod.get("volumes", ())}
    assert all("/dev/shm" in [one["mountPath"] for one in pod["containers"][0]["volumeMounts"]] for pod in pods)


def test_slime_knows_the_flags_of_the_entrypoint() -> None:
    program, command, *words = shlex.split(rayjob()["spec"]["entrypoint"])
    assert (program, command) == ("slime", "run")
    seen = peek(words)
    active = activate_line(seen)
    config = load(words, **active.for_load, check_rules=False).config
    assert (config.num_learner_ranks, config.cluster.rollout_num_gpus) == (8, 8)


def test_versions_in_the_examples_are_those_that_are_pinned() -> None:
    pins = (ROOT / "requirements" / "cpu.txt").read_text()
    assert f"ray=={rayjob()['spec']['rayClusterSpec']['rayVersion']}\n" in pins


def test_what_the_container_file_copies_and_installs_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (install,) = re.findall(r"pip install --no-cache-dir (.*)", text)
    assert all((ROOT / path / "pyproject.toml").is_file() for path in install.split())
    assert re.findall(r"^RUN make (\w+)", text, flags=re.MULTILINE) == ["setup"]
    assert all(line.split()[0] in {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD"} for line in instructions(text))


def instructions(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]
