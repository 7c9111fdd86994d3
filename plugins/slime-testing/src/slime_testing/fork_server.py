"""Forks processes from a server that has imported Megatron and transformers, because the imports take ten seconds.

    ForkServer   client in the test process; starts the server at its first use
    main         the server: reads a line of JSON, forks a process, writes its process id and later its exit status

Each forked process has a separate command line, environment, import path and error file; processes do not affect each
other.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["ForkServer", "main"]

START_LIMIT_S = 300.0
"""Time limit of the server's imports, in seconds."""


class ForkServer:
    """Runs :mod:`slime_testing.model_process`, one forked process for each call.

    Arguments:
        environment: variables to set in addition to this process's.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._root: _Root | None = None

    def run(self, *words: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        """Run one process until it ends; ``words`` are its command line.

        Raises:
            subprocess.TimeoutExpired: the process did not end within ``limit_s`` seconds and was killed.
        """
        environment = {**os.environ, **self._environment}
        if self._root is None:
            self._root = _Root(environment)
        with tempfile.NamedTemporaryFile("r+", encoding="utf-8", errors="replace") as errors:
            self._root.send({"words": words, "errors": errors.name, "path": sys.path, "environment": environment})
            forked = self._root.answer(START_LIMIT_S)
            if forked is None:
                status, output = self._root.end()
                self._root = None
                return subprocess.CompletedProcess(words, status or 1, "", output)
            ended = self._root.answer(limit_s)
            if ended is None:
                os.kill(forked, signal.SIGKILL)
                self._root.answer(START_LIMIT_S)
                raise subprocess.TimeoutExpired(list(words), limit_s, stderr=errors.read().encode())
            return subprocess.CompletedProcess(words, ended, "", errors.read())


class _Root:
    """Handle of the server process; it ends with this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        atexit.register(self.end)

    def send(self, request: dict[str, Any]) -> None:
        """Send the description of a process to run."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; answer() returns None then
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, limit_s: float) -> int | None:
        """Return the next number that the server writes; None if it has ended, or wrote none in ``limit_s`` seconds."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            return None
        line = b""
        while not line.endswith(b"\n") and (byte := os.read(self._process.stdout.fileno(), 1)):
            line += byte
        return int(line) if line else None

    def end(self) -> tuple[int, str]:
        """End the server; return its exit status and its standard error."""
        atexit.unregister(self.end)
        self._process.communicate()
        with self._errors:
            self._errors.seek(0)
            return self._process.returncode, self._errors.read()


def main() -> None:
    """Answer each line of standard input with the id of a forked process and, once it has ended, its exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of imported code must not mix with the answers
    _import()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answers.close()
            os._exit(_execute(json.loads(line)))
        answers.write(f"{child}\n")
        answers.flush()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        answers.write(f"{status}\n")
        answers.flush()


def _import() -> None:
    """Import the modules that every model needs."""
    from slime_testing.harness.megatron import prepare_megatron

    prepare_megatron()
    import mbridge  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401
    from megatron.core.models.gpt import gpt_model  # noqa: F401

    import slime_testing.model_process  # noqa: F401
    from slime_core.modeling import MBridgeSpec  # noqa: F401


def _execute(request: dict[str, Any]) -> int:
    """Run a request in the forked process; return the exit status."""
    from slime_testing import model_process

    errors = os.open(request["errors"], os.O_WRONLY)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:] = request["path"]
    try:
        model_process.main(*map(Path, request["words"]))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
