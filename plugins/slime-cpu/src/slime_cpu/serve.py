"""Environment and arguments of an SGLang server on a machine without a GPU.

``python -m slime_cpu.serve --model-path FOLDER --port 30000`` starts such a server as an external engine of runs.
Arguments are those of ``sglang.launch_server``; the arguments for a CPU come before them, so given ones have priority.
The process becomes the server; the environment of other processes does not change.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"

MODULE = "_slime_server"
"""Module that ``python -m`` starts in that environment: SGLang's own server, with forked processes."""

TOTAL_TOKENS = 32_768
"""Default KV cache of a CPU server: SGLang's own default would take most of the machine's memory."""

RUNNING_REQUESTS = 256
"""Default limit on the sequences that a CPU server decodes together: one rollout of 32 x 8."""


def server_environment(*, threads: int = 1, processes: int = 1) -> dict[str, str]:
    """Return the environment variables for ``python -m sglang.launch_server`` on a CPU; its children inherit them.

    PYTHONPATH is prepended to this process's, so that the server finds the same modules as this process.

    Arguments:
        threads: number of threads of each process of the server.
        processes: number of processes; if there are several (tensor parallel), they share the cores.
    """
    inherited = os.environ.get("PYTHONPATH")
    return _cores_of(processes) | {
        "SGLANG_USE_CPU_ENGINE": "1",  # sglang 0.5.23, srt/platforms/__init__.py:50
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), *([inherited] if inherited else [])]),
        "CUDA_VISIBLE_DEVICES": "",  # a CPU run on a machine with GPUs must not see them
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",  # compiling for a CPU would need a C++ toolchain and minutes
        # glibc keeps freed memory, as in slime_cpu.device: mallopt(3), "Environment variables".
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(64 * 2**20),
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_ARENA_MAX": "1",
    }


def _cores_of(processes: int) -> dict[str, str]:
    # Format "0,1|2,3": srt/utils/numa_utils.py:454, which requires it if there are more processes than NUMA nodes.
    if processes == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[number::processes] or [cores[number % len(cores)]] for number in range(processes)]
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares)}


def server_arguments() -> list[str]:
    """Return the arguments to add to ``python -m sglang.launch_server`` on a CPU.

    The backends are those written in torch, and the limits are defaults. Without ``--sleep-on-idle`` an idle scheduler
    uses most of a core.
    """
    return [
        "--device=cpu",
        "--attention-backend=torch_native",
        "--sampling-backend=pytorch",
        "--cuda-graph-backend-decode=disabled",
        "--cuda-graph-backend-prefill=disabled",
        "--sleep-on-idle",
        f"--max-total-tokens={TOTAL_TOKENS}",
        f"--max-running-requests={RUNNING_REQUESTS}",
    ]


def command(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return program and arguments of the server, and its variables in addition to this process's.

    Example: ``command(["--model-path", "m", "--tp-size", "2"])`` serves the folder ``m`` with two processes.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp-size", "--tensor-parallel-size", "--tp", type=int, default=1)
    processes = parser.parse_known_args(arguments)[0].tp_size
    program = [sys.executable, "-m", MODULE, *server_arguments(), "--skip-server-warmup", *arguments]
    return program, server_environment(threads=len(os.sched_getaffinity(0)), processes=processes)


if __name__ == "__main__":
    program, variables = command(sys.argv[1:])
    os.execve(program[0], program, {**os.environ, **variables})
