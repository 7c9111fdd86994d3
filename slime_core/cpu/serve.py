"""An SGLang server on a CPU, for runs to find: ``python -m slime_core.cpu.serve --model-path FOLDER --port 30000``.

The arguments are those of ``sglang.launch_server``; what a CPU needs is put before them, so they win. The process
becomes the server.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from slime_core.cpu.sglang import MODULE, RUNNING_REQUESTS, TOTAL_TOKENS, server_arguments, server_environment

__all__ = ["command"]


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
