"""One SGLang server as a child process. The only file that starts SGLang.

The server is the unmodified ``sglang.launch_server``, never imported. What it needs on a CPU is passed through its
environment (:mod:`slime_core.cpu.serve`). There a launcher lets its processes fork
(``_slime_server`` among the stand-ins): it starts in 6 s with 0.7 GB on two idle cores instead of about 20 s with 1.8
GB, nearly all of it imports. The warm-up request is skipped. The key of the run comes through the environment too
(:mod:`.keyed`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slime_core.config.secrets import ENGINE_KEY, engine_access, needed_environment
from slime_core.config.serving import WorkerType
from slime_core.cpu import serve as cpu
from slime_core.rollout.engines import keyed
from slime_core.rollout.engines.server import HANG_LIMIT_S, Server
from slime_core.rollout.engines.supervisor import supervised

__all__ = ["EngineSettings", "SGLangServer"]

GPU_MODULE = "sglang.launch_server"

LONGEST_WATCHDOG_S = 86_400.0
"""A socket takes no time limit of years."""

SHARED_MEMORY = "sgl*"
"""Names of the files in /dev/shm through which the processes of a server communicate."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one server is started.

    Example: ``EngineSettings(model=Path("Qwen3-0.6B"), log_file=Path("run/logs/engine-0.log"))``.

    Arguments:
        model: Hugging Face folder; the server also takes its tokenizer from there.
        log_file: receives the server's output.
        name: for messages.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: of weights and computation; ``"auto"`` takes the checkpoint's.
        seed: of sampling. On a CPU the server does not repeat itself even with the same seed.
        host: address to listen on; loopback unless other nodes must reach it.
        context_length: longest prompt plus response in tokens; None: that of the checkpoint, which is also the largest
            value.
        max_running_requests: sequences decoded together; None: SGLang decides, on a CPU 256.
        max_total_tokens: size of the KV cache in tokens; None: from ``mem_fraction``, on a CPU 32,768.
        mem_fraction: share of a GPU's memory for weights and KV cache; None: SGLang decides.
        tensor_parallel: GPUs of one server; on a CPU, processes.
        gives_memory_away: prepare for freeing memory, on a GPU; on a CPU a server answers such requests and does
            nothing.
        trust_remote_code: run Python code of the model folder.
        skip_tokenizer: leave the tokenizer out: no texts, no stop texts; 5 to 10% less work a request on a CPU.
        threads: CPU threads of one server.
        worker_type: the part of a request that it computes: all of it, or, on GPUs, prefill or decode alone.
        extra: further arguments of ``sglang.launch_server``; they win.
        start_timeout_s: seconds until it must answer.
    """

    model: Path
    log_file: Path
    name: str = "engine"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "auto"
    seed: int = 0
    host: str = "127.0.0.1"
    context_length: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    mem_fraction: float | None = None
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    gives_memory_away: bool = False
    skip_tokenizer: bool = False
    threads: int = 1
    worker_type: WorkerType = "regular"
    extra: tuple[str, ...] = field(default=())
    start_timeout_s: float = 300.0

    @property
    def module(self) -> str:
        """The Python module to run."""
        return cpu.MODULE if self.device == "cpu" else GPU_MODULE

    def arguments(self) -> list[str]:
        """Arguments of the server without its port."""
        on_cpu = self.device == "cpu"
        valued = {
            "model-path": self.model,
            "host": self.host,
            "dtype": self.dtype,
            "random-seed": self.seed,
            "context-length": self.context_length,
            "max-running-requests": self.max_running_requests or (cpu.RUNNING_REQUESTS if on_cpu else None),
            "max-total-tokens": self.max_total_tokens or (cpu.TOTAL_TOKENS if on_cpu else None),
            "mem-fraction-static": self.mem_fraction,
            "tensor-parallel-size": self.tensor_parallel,
            "disaggregation-mode": None if self.worker_type == "regular" else self.worker_type,
            # One line per request would hide the lines that explain a crash.
            "log-level-http": "warning",
        }
        flags = {
            # The warm-up request saves nothing: 20 ms on a CPU, and CUDA graphs are captured before it.
            "skip-server-warmup": True,
            "trust-remote-code": self.trust_remote_code,
            "skip-tokenizer-init": self.skip_tokenizer,
            "enable-memory-saver": self.gives_memory_away and not on_cpu,
        }
        return [
            *(f"--{name}={value}" for name, value in valued.items() if value is not None),
            *(f"--{name}" for name, wanted in flags.items() if wanted),
            *(cpu.server_arguments() if on_cpu else []),
            *self.extra,
        ]

    def environment(self) -> dict[str, str]:
        """The server's whole environment: what it needs, and the key of the run, if there is one."""
        found = {**needed_environment(), ENGINE_KEY: engine_access().key_text}
        if self.device != "cpu":
            return found
        return {**found, **cpu.server_environment(threads=self.threads, processes=self.tensor_parallel)}


class SGLangServer(Server):
    """One SGLang server.

    ``bootstrap_port`` is where a prefill engine hands the cache over (0: it is none); known when :meth:`wait_ready` has
    returned.
    """

    probe = "/model_info"
    """SGLang listens only after its scheduler has loaded the model."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.bootstrap_port = 0
        self.hang_limit_s = _watchdog_s(settings.extra)
        super().__init__(
            settings.name,
            host=settings.host,
            env=settings.environment(),
            log_file=settings.log_file,
            start_timeout_s=settings.start_timeout_s,
        )

    def command(self, port: int, second: int) -> list[str]:
        """As :meth:`Server.command`; on ``second`` a prefill engine hands the cache over."""
        self.bootstrap_port = second if self.settings.worker_type == "prefill" else 0
        bootstrap = [f"--disaggregation-bootstrap-port={second}"] if self.bootstrap_port else []
        program = [sys.executable, keyed.__file__, self.settings.module]
        return supervised(SHARED_MEMORY, [*program, *self.settings.arguments(), f"--port={port}", *bootstrap])


def _watchdog_s(arguments: Sequence[str]) -> float:
    """Seconds that one forward pass may take, as the server gets them."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--watchdog-timeout", type=float, default=HANG_LIMIT_S)
    try:
        return min(float(parser.parse_known_args(arguments)[0].watchdog_timeout), LONGEST_WATCHDOG_S)
    except argparse.ArgumentError:  # SGLang refuses it too
        return HANG_LIMIT_S
