"""What an SGLang server needs to run on a machine without a GPU: environment and arguments.

``python -m slime_core.cpu.serve --model-path FOLDER --port 30000`` starts such a server as an external engine of runs.
The arguments are those of ``sglang.launch_server``; the arguments for a CPU are put before them, so the given ones win.
The process becomes the server, and the environment of no other process changes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"

MODULE = "_slime_server"
"""What ``python -m`` starts in that environment: SGLang's own server, whose processes fork."""

TOTAL_TOKENS = 32_768
"""Default KV cache of a CPU server: SGLang's own default would take most of the machine's memory."""

RUNNING_REQUESTS = 256
"""Default number of sequences that a CPU server decodes together: one rollout of 32 x 8."""


def server_environment(*, threads: int = 1, processes: int = 1) -> dict[str, str]:
    """Environment variables to set for ``python -m sglang.launch_server`` on a CPU; its children inherit them.

    PYTHONPATH is put before what this process has, so that the server still finds what this process finds.

    Arguments:
        threads: of one process of the server.
        processes: of the server; several (tensor parallel) need their cores assigned.
    """
    inherited = os.environ.get("PYTHONPATH")
    return _cores_of(processes) | {
        "SGLANG_USE_CPU_ENGINE": "1",  # sglang 0.5.23, srt/platforms/__init__.py:50
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), *([inherited] if inherited else [])]),
        "CUDA_VISIBLE_DEVICES": "",  # a CPU run on a machine with GPUs must not see them
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",  # nothing to compile for: inductor wants a C++ toolchain and minutes
    }


def _cores_of(processes: int) -> dict[str, str]:
    # "0,1|2,3": srt/utils/numa_utils.py:454, which wants it where processes outnumber NUMA nodes.
    if processes == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[number::processes] or [cores[number % len(cores)]] for number in range(processes)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}


def server_arguments() -> list[str]:
    """Arguments to add to ``python -m sglang.launch_server`` on a CPU.

    The backends are the ones written in torch. Without ``--sleep-on-idle`` an idle scheduler spins on most of a core.
    """
    return [
        "--device=cpu",
        "--attention-backend=torch_native",
        "--sampling-backend=pytorch",
        "--cuda-graph-backend-decode=disabled",
        "--cuda-graph-backend-prefill=disabled",
        "--sleep-on-idle",
    ]


def command(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Program and arguments of the server, and its variables in addition to this process's.

    Example: ``command(["--model-path", "m", "--tp-size", "2"])`` serves the folder ``m`` by two processes.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    processes = parser.parse_known_args(arguments)[0].tp_size
    limits = [f"--max-total-tokens={TOTAL_TOKENS}", f"--max-running-requests={RUNNING_REQUESTS}"]
    program = [sys.executable, "-m", MODULE, *server_arguments(), *limits, "--skip-server-warmup", *arguments]
    return program, server_environment(threads=len(os.sched_getaffinity(0)), processes=processes)


if __name__ == "__main__":
    found, variables = command(sys.argv[1:])
    os.execve(found[0], found, {**os.environ, **variables})
