"""The servers of a run as child processes: SGLang's (:class:`SGLangServer`), and the router in front of all engines
(:class:`Router`). :class:`RouterClient` registers engines with it, or with an external router. Only this file starts
SGLang.

The server is the unmodified ``sglang.launch_server``, never imported; on a CPU, the one that the plugin of the device
starts. The warm-up request is skipped on a CPU; on a GPU it compiles kernels, and the server is ready after it. The key
of the run comes through the environment (:mod:`.keyed`).

The router is sglang-router and not its successor smg: it removes an engine at once, where smg takes seconds and refuses
to add the engine again meanwhile. A request through it costs no measurable time (256 samples in 32 requests on two
cores: 0.40 s through it, 0.39 s directly), so engines are not addressed directly. Its health checks request
``/model_info``, not ``/health``: while an engine is paused for new weights, ``/health`` hangs for 20 s and returns 503,
and the router would drop the engine. ``/model_info`` is answered by the server's HTTP process, which ends when its
scheduler dies, so the router still notices a dead engine. It does not notice a scheduler that hangs; the
timeouts of requests and waits do.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slime_core.components.devices import Device, find_device
from slime_core.config.engines import RouterPolicy, WorkerType
from slime_core.config.model_config import weights_dtype
from slime_core.config.secrets import ENGINE_KEY, engine_access, needed_environment, send_key_to
from slime_core.errors import ConfigError, EngineError, WeightSyncError
from slime_core.rollout.engines import keyed
from slime_core.rollout.engines.server import READY, HealthCheck, Server
from slime_core.runtime.machine import program_path
from slime_core.runtime.supervisor import supervised
from slime_core.weights.engine_control import call
from slime_core.weights.hugging_face import expected_specs

GPU_MODULE = "sglang.launch_server"

COMPUTED = ("float32", "bfloat16", "float16")
"""Dtypes in which a server computes."""

SHARED_MEMORY = "sgl*"
"""Names of the files in /dev/shm through which the processes of a server communicate."""


AUTO = "auto"


START_S = 600.0
"""Seconds for a server to start, without reading its weights: on a GPU it compiles kernels and captures graphs."""

READ_BYTES_S = 0.5e9
"""Bytes of weights that a slow shared file system reads in a second."""

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def start_limit_s(requested: float | None, model: Path) -> float:
    """Return the seconds that a server of the checkpoint in ``model`` may take to start, and to answer its first
    request: ``requested``, or if it is None what its weights need."""
    if requested is not None:
        return requested
    sizes = (sum(file.stat().st_size for file in model.glob(pattern)) for pattern in WEIGHT_FILES)
    return START_S + max(sizes) / READ_BYTES_S


def checkpoint_dtype(model: Path) -> str:
    """Return the dtype of the checkpoint in ``model``: that of its ``config.json``, else that of its largest weight.

    SGLang's ``auto`` differs: it computes in half precision if the checkpoint is in float32 (sglang 0.5.23,
    srt/configs/model_config.py, ``_get_and_verify_dtype``). It decides only if the folder has no dtype in which a
    server can compute.
    """
    stored = weights_dtype(model)
    if stored is None:
        with suppress(WeightSyncError):
            stored = max(expected_specs(model).values(), key=lambda weight: weight.nbytes).dtype
    return stored if stored in COMPUTED else AUTO


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one server.

    Example: ``EngineSettings(model=Path("Qwen3-0.6B"), log_file=Path("run/logs/engine-0.log"))``.

    Arguments:
        model: Hugging Face folder; the server also takes its tokenizer from there.
        log_file: receives the server's output.
        name: for messages.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: of weights and computation; ``"auto"`` takes the checkpoint's, see :func:`checkpoint_dtype`.
        seed: of sampling. On a CPU the server repeats itself only where requests come one after another.
        host: address to listen on; loopback unless other nodes must reach it.
        context_length: longest prompt plus response in tokens. None: that of the checkpoint, which is also the largest
            value.
        mem_fraction: share of a GPU's memory for weights and KV cache. None: SGLang decides.
        tensor_parallel: GPUs of one server; on a CPU, processes.
        num_nodes, node_rank: over how many nodes the server runs, and which of its parts this is; the one of rank 0
            takes all requests.
        meeting_address: HOST:PORT on the node of rank 0 for the rendezvous of the parts.
        releases_memory: the server can release the memory of its GPU; on a CPU it confirms such requests and keeps its
            memory.
        trust_remote_code: run Python code of the model folder.
        threads: CPU threads of one server.
        worker_type: the part of a request that it computes: all of it, or, on GPUs, prefill or decode alone.
        extra: further arguments of ``sglang.launch_server``; they win.
        variables: environment variables in addition to those that this process passes on.
        start_timeout_s: seconds until it must answer. None: :func:`start_limit_s`.
        health: how it is probed.
    """

    model: Path
    log_file: Path
    name: str = "engine"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str = "auto"
    seed: int = 0
    host: str = "127.0.0.1"
    context_length: int | None = None
    mem_fraction: float | None = None
    tensor_parallel: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    meeting_address: str | None = None
    trust_remote_code: bool = False
    releases_memory: bool = False
    threads: int = 1
    worker_type: WorkerType = "regular"
    extra: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float | None = None
    health: HealthCheck = field(default_factory=HealthCheck)

    @property
    def plugin_device(self) -> Device | None:
        """The device of a plugin that the server runs on; None: GPUs."""
        return None if self.device == "cuda" else find_device(self.device)

    def arguments(self) -> list[str]:
        """Arguments of the server without its port."""
        device = self.plugin_device
        valued = {
            "model-path": self.model,
            "host": self.host,
            "dtype": checkpoint_dtype(self.model) if self.dtype == AUTO else self.dtype,
            "random-seed": self.seed,
            "context-length": self.context_length,
            "mem-fraction-static": self.mem_fraction,
            "tensor-parallel-size": self.tensor_parallel,
            "nnodes": None if self.num_nodes == 1 else self.num_nodes,
            "node-rank": None if self.num_nodes == 1 else self.node_rank,
            "dist-init-addr": self.meeting_address,
            "disaggregation-mode": None if self.worker_type == "regular" else self.worker_type,
            # One line per request would hide the lines that explain a crash.
            "log-level-http": "warning",
        }
        flags = {
            "skip-server-warmup": device is not None,  # it would save 20 ms there
            "trust-remote-code": self.trust_remote_code,
            "enable-memory-saver": self.releases_memory and device is None,
        }
        return [
            *(f"--{name}={value}" for name, value in valued.items() if value is not None),
            *(f"--{name}" for name, is_set in flags.items() if is_set),
            *(device.server_arguments() if device else []),
            *self.extra,
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment of the server, with the key of the run, if any."""
        # The other nodes connect to this address; SGLang guesses another address if a node has several.
        address = {"SGLANG_HOST_IP": self.host} if self.num_nodes > 1 else {}
        path = {"PATH": program_path()}  # SGLang compiles kernels with the environment's ninja
        # No run releases graphs, and a server that could does not start with breakable ones, SGLang's for prefills
        # (sglang 0.5.23, srt/model_executor/runner_backend/breakable_cuda_graph_backend.py:91).
        graphs = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"} if self.releases_memory else {}
        variables = {**path, **address, **graphs, **self.variables, ENGINE_KEY: engine_access().key_text}
        environment = {**needed_environment(), **variables}
        if (device := self.plugin_device) is None:
            return environment
        return {**environment, **device.server_environment(threads=self.threads, processes=self.tensor_parallel)}


_PARSER = """
import argparse, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(usage="", allow_abbrev=False)
ServerArgs.add_cli_args(parser)
parser.parse_args(["--model-path=none", *sys.argv[1:]])
"""


def check_sglang_flags(arguments: Sequence[str], device: Literal["cpu", "cuda"]) -> None:
    """Let SGLang's parser read ``arguments`` in a child process, which takes a few seconds.

    Abbreviations are refused, because one could set what slime sets. Without SGLang on this machine nothing is checked.

    Raises:
        ConfigError: the parser refuses them.
    """
    environment = EngineSettings(model=Path(), log_file=Path(), device=device).environment()
    command = [sys.executable, "-W", "ignore", "-c", _PARSER, *arguments]
    parser = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if parser.returncode == ARGPARSE_ERROR:
        raise ConfigError(f"SGLang's flags: {parser.stderr.strip().rpartition('error: ')[2]}")


ARGPARSE_ERROR = 2
"""Exit code of argparse for arguments that it refuses."""


class SGLangServer(Server):
    """One SGLang server.

    ``bootstrap_port`` is the port from which a prefill engine sends its KV cache (0: not a prefill engine); known when
    :meth:`wait_ready` has returned.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.bootstrap_port = 0
        # Answers 200 after the warm-up request. The parts on further nodes answer /health alone.
        self.probe = "/health" if settings.node_rank else READY
        if not settings.node_rank:
            self.health = settings.health
        super().__init__(
            settings.name,
            host=settings.host,
            env=settings.environment(),
            log_file=settings.log_file,
            start_timeout_s=start_limit_s(settings.start_timeout_s, settings.model),
        )

    def command(self, port: int, second: int) -> list[str]:
        """The command line, as :meth:`Server.command`; a prefill engine serves its KV cache on port ``second``."""
        self.bootstrap_port = second if self.settings.worker_type == "prefill" else 0
        bootstrap = [f"--disaggregation-bootstrap-port={second}"] if self.bootstrap_port else []
        device = self.settings.plugin_device
        module = GPU_MODULE if device is None else device.SERVER
        program = [sys.executable, keyed.__file__, module, *self.settings.arguments(), f"--port={port}", *bootstrap]
        return supervised(SHARED_MEMORY, program)


# The launcher imports sglang, and with it torch, for a tracing mode that is not used here; the import is optional
# (sglang_router 0.3.2, mini_lb.py:21). Without it the router starts in 0.7 s instead of 2 s.
# The launcher's parser knows fewer policies than the router itself, so the policy is passed separately. The key of the
# run comes in the environment, because a command line is no secret. With a key, sglang_router 0.3.2 requires it for
# responses and for /workers, and passes the header of a request on to the engine.
LAUNCH = (
    "import os, sys; sys.modules['sglang'] = None; from sglang_router import launch_router as launcher; "
    "arguments = launcher.parse_router_args(sys.argv[2:]); arguments.policy = sys.argv[1]; "
    f"arguments.api_key = os.environ.pop('{ENGINE_KEY}', '') or None; "
    "launcher.launch_router(arguments)"
)


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings of the router.

    Arguments:
        log_file: receives the router's output.
        host: address to listen on.
        policy: how engines are chosen. ``cache_aware`` sends prompts with a common prefix to the same engine, as long
            as loads are even; ``consistent_hashing`` and ``manual`` send requests with the same header
            ``x-smg-routing-key`` to the same engine.
        splits_prefill: its engines do either prefill or decode, and each request goes to one of each.
        health_interval_s: seconds between two health checks of an engine.
    """

    log_file: Path
    host: str = "127.0.0.1"
    policy: RouterPolicy = "cache_aware"
    splits_prefill: bool = False
    health_interval_s: int = 5

    def arguments(self, *, port: int, metrics_port: int) -> list[str]:
        """Arguments of ``sglang_router.launch_router``."""
        valued = {
            "host": self.host,
            "port": port,
            "prometheus-host": self.host,
            "prometheus-port": metrics_port,
            "log-level": "warn",
            "health-check-endpoint": "/model_info",
            "health-check-interval-secs": self.health_interval_s,
            "health-check-timeout-secs": self.health_interval_s,
            "health-failure-threshold": 2,
            "health-success-threshold": 1,
            # Pauses included; the client, whose limit counts from progress, hangs up long before.
            "request-timeout-secs": 7 * 24 * 3600,
            "worker-startup-check-interval": 1,
            # cache_aware ignores prefixes while the busiest engine has more requests than the idlest by this number and
            # ratio. The defaults, 64 and 1.5, are for requests of one sample; a request here is a group, so 64 groups
            # with a common system prompt all went to one engine.
            "balance-abs-threshold": 1,
            "balance-rel-threshold": 1.0,
            # The client already bounds the requests in flight; a second queue would only hide that bound.
            "max-concurrent-requests": -1,
        }
        return [
            *(f"--{name}={value}" for name, value in valued.items()),
            # The client retries. The router would also retry after 408 and 429, uncounted.
            "--disable-retries",
            *(["--pd-disaggregation"] if self.splits_prefill else []),
        ]


@dataclass(frozen=True, slots=True)
class Worker:
    """The entry of an engine in a router.

    Arguments:
        url: its address.
        worker_type: the part of a request that it computes.
        bootstrap_port: of a prefill engine, where decode engines fetch the cache; 0: it is none.
        ranks: its processes, which join an update group.
    """

    url: str
    worker_type: WorkerType = "regular"
    bootstrap_port: int = 0
    ranks: int = 1

    @property
    def entry(self) -> dict[str, Any]:
        """The body of the request that registers it; with the key for the router's own requests to the engine."""
        key = engine_access().key_text
        entry = {"url": self.url, "api_key": key} if key else {"url": self.url}
        if self.worker_type == "regular":
            return entry
        port = {"bootstrap_port": self.bootstrap_port} if self.worker_type == "prefill" else {}
        return {**entry, "worker_type": self.worker_type, **port}


ROUTER_START_S = 60.0
"""Seconds until a router must be ready."""


class Router(Server):
    """A router that the run starts; :class:`RouterClient` registers engines with it."""

    # Not /health, which returns 200 without any engine; not /readiness, which logs an error each time it returns 503.
    probe = "/liveness"

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        super().__init__(
            "router",
            host=settings.host,
            env={**needed_environment(), "NO_COLOR": "1", ENGINE_KEY: engine_access().key_text},
            log_file=settings.log_file,
            start_timeout_s=ROUTER_START_S,
        )

    def command(self, port: int, second: int) -> list[str]:
        """The command line, as :meth:`Server.command`; the router serves its metrics on port ``second``."""
        arguments = self.settings.arguments(port=port, metrics_port=second)
        return [sys.executable, "-c", LAUNCH, self.settings.policy, *arguments]


CALL_LIMIT_S = 10.0
REGISTRATION_LIMIT_S = 60.0
POLL_S = 0.05


class RouterClient:
    """Registers engines with the sglang-router at ``url``, the run's own or an external one, and removes them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._added: set[str] = set()
        send_key_to(url)

    def add(self, workers: Iterable[Worker]) -> None:
        """Register ``workers``; :meth:`deregister` does not remove workers that were registered before.

        Raises:
            EngineError: the router does not answer, or refused one.
        """
        ids = self._ids()
        for worker in workers:
            if worker.url not in ids:
                self._call("/workers", worker.entry)
                self._added.add(worker.url)

    def wait_registered(self, urls: Iterable[str]) -> None:
        """Wait until the engines at ``urls`` get requests.

        Raises:
            EngineError: the router does not answer, or did not register all within a minute.
        """
        expected, deadline_s = set(urls), time.monotonic() + REGISTRATION_LIMIT_S
        while missing := sorted(expected - set(self.healthy_workers())):
            if time.monotonic() > deadline_s:
                raise EngineError(f"The router at {self.url} did not register {missing}")
            time.sleep(POLL_S)

    def remove(self, url: str) -> None:
        """Send no further requests to the engine at ``url``; ignore an engine that is not registered.

        Raises:
            EngineError: the router does not answer, or refused.
        """
        self._added.discard(url)
        ids = self._ids()
        if url in ids:
            self._call(f"/workers/{ids[url]}", method="DELETE")

    def deregister(self) -> None:
        """Remove the engines that :meth:`add` registered.

        Raises:
            EngineError: the router does not answer, or refused.
        """
        for url in list(self._added):
            self.remove(url)

    def healthy_workers(self) -> list[str]:
        """Return the URLs of the engines that get requests now, sorted."""
        return sorted(entry["url"] for entry in self._entries() if entry["is_healthy"])

    def _ids(self) -> dict[str, str]:
        return {entry["url"]: entry["id"] for entry in self._entries()}

    def _entries(self) -> list[dict[str, Any]]:
        match answer := self._call("/workers"):
            case {"workers": [*entries]}:
                return entries
        raise EngineError(f"The server at {self.url} is no sglang-router: GET /workers returned {answer!r:.100}")

    def _call(self, path: str, body: dict[str, Any] | None = None, *, method: str | None = None) -> Any:
        try:
            return call(self.url, path, body, method=method, timeout_s=CALL_LIMIT_S)
        except WeightSyncError as error:
            raise EngineError(f"The router does not work: {error}") from error
