"""The Ray cluster of a run: a private one on this machine, or a running one that it joins; checks of its nodes.

A private cluster takes seconds to start; services that a run does not use are left out (:data:`UNUSED_SERVICES`), and
Ray's agents start in the background. So start it first and load other things meanwhile. Stopping takes 1 to 2 seconds.

A client that reaches Ray's ports can run code in its processes, so a private cluster listens on loopback only and
refuses calls without the run's token.

Only the nodes of a joined cluster are inspected (:func:`inspect_nodes`, :func:`require_inputs`). The node of a private
cluster is the driver's machine, environment and folder.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import ray
from ray._private import ray_constants, services, worker
from ray._private.node import Node
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    AuthenticationTokenLoader,
    persist_port,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime_core.errors import (
    ConfigError,
    ManifestMismatch,
    NodeDied,
    PlacementError,
    SlimeError,
    WaitTimeout,
    table,
)
from slime_core.plugins.manifest import Difference, Manifest, attach, mismatches
from slime_core.runtime.actors import Call
from slime_core.runtime.machine import family, runs
from slime_core.runtime.supervisor import with_raylet
from slime_core.runtime.waiting import wait
from slime_core.user_code.failures import boundary

T = TypeVar("T")
R = TypeVar("R")

SMALL_MACHINE_BYTES = 64 * 2**30
SMALL_STORE_BYTES = 256 * 2**20
"""Shards of a small run are megabytes; Ray's own default would take a third of the memory from the engines."""

TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
TOKEN_VARIABLES = (TOKEN_VARIABLE, "RAY_AUTH_TOKEN_PATH")
"""With one of these, a user chooses the token."""

TOKEN_BYTES = 32

UNUSED_SERVICES = ("start_monitor", "start_api_server", "start_log_monitor")
"""Services that ray 2.60 starts on every head node (_private/node.py:1655, :1666 and :1766), without a public switch:
an autoscaler of a cluster that does not grow, a dashboard without pages, for which ``ray.init`` waits, and a reader of
the workers' logs for a driver that does not show them. Three processes that take 2 to 3 s of CPU."""

NEEDED_SERVICES = ("gcs_server", "raylet")
"""The processes without which a cluster is dead. (Other children may be of another thread that starts processes.)"""

AGENT_PORTS = range(20_000, 30_000)
"""Below the ports that Linux gives to any connection (32768 on), above those that `ray start` gives to workers."""

AGENT_COMMANDS = ("--dashboard_agent_command", "--runtime_env_agent_command")
"""Options of a raylet that hold the command lines of its agents (ray 2.60, _private/services.py:2023)."""

AGENT_START_LIMIT_MS = "300000"
"""Time that an actor waits for the agent that sets up its environment; Ray's default, 30 s, is short for a cold or busy
machine."""

LOOK_LIMIT_S = 120.0
"""Seconds for all nodes together to look at what they have; an idle node takes one or two, most of it the start of a
worker process."""

PRESTART = "--num_prestart_python_workers"
"""Option of a raylet: workers that it starts before anything needs them (ray 2.60, _private/services.py:2020). The
first driver waits for all of them, without a limit and in native code. A run cannot use them, because actors with
environment variables start in new processes."""

LEFTOVER_GRACE_S = 5.0
BUSY = (
    "Its services have 30 s to answer. Free some CPU cores and memory, or join a cluster that runs already with "
    "--ray-address. If the path of a socket is too long, name a shorter folder, such as TMPDIR=/tmp."
)
PROBE_LIMIT_S = 3.0

HTTP2_SETTINGS = 4
HTTP2_HEAD = 9
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, HTTP2_SETTINGS, 0, 0, 0, 0, 0])
"""Each side of a gRPC connection sends such a frame first: its head has 9 bytes, the fourth is the type (RFC 9113, 3.4
and 4.1)."""


class Session:
    """Connect this process to a Ray cluster in a ``with`` block. The block ends all processes of a private cluster.

    Arguments:
        address: ``"local"``: a private cluster. ``"auto"`` or ``host:port``: the running one. None: the one in
            ``RAY_ADDRESS``, which ``ray job submit`` sets, or a private one if the variable is unset.
        namespace: of the run's named actors; different for every run.
        num_cpus: cores of a private cluster; by default those that this process may use.

    Raises:
        PlacementError: there is no cluster at ``address``, or the private one does not start.
    """

    def __init__(self, address: str | None = None, *, namespace: str, num_cpus: int | None = None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or "local"
        self.namespace = namespace
        self.num_cpus = num_cpus or len(os.sched_getaffinity(0))
        self._services: dict[psutil.Process, str] = {}
        self._has_token = False

    @property
    def own(self) -> bool:
        """Whether the cluster is private: it ends with this session."""
        return self.address == "local"

    def __enter__(self) -> Session:
        before = psutil.Process().children()
        try:
            with _keep_sigterm_handler():
                self._enter()
        except BaseException:
            # Ray does not report what it had started before the failure, so its processes are found here.
            self._services = _children_since(before)
            self._stop()
            raise
        self._services = _children_since(before)
        return self

    def check_alive(self) -> None:
        """Raise NodeDied if GCS or raylet of a private cluster has ended; Ray's calls may wait minutes for it."""
        for service, name in self._dead():
            node: Any = worker._global_node
            raise NodeDied(
                f"Ray died: its process {name} ({service.pid}) has ended. Often the kernel's out-of-memory killer did "
                f"it (see dmesg). Ray's logs are in {node.get_logs_dir_path()}."
            )

    def end_in_order(self, end: Callable[[], None]) -> None:
        """Call ``end``, which makes Ray end something, unless a private cluster is dead: then Ray's calls would wait
        for it, and without a GCS Ray ends this process after a minute. Its processes end with the session."""
        if not self._dead():
            end()

    def _dead(self) -> list[tuple[psutil.Process, str]]:
        services = self._services.items() if self.own else ()
        return [(service, name) for service, name in services if name in NEEDED_SERVICES and not runs(service)]

    def _enter(self) -> None:
        if self.own:
            # On a machine that is too busy, Ray raises a bare Exception.
            with boundary("Ray", "starting on this machine", error=PlacementError, next_step=BUSY):
                self._start()
        else:
            self._join()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, Exception):
                self.check_alive()  # whatever else failed, failed because of this
        finally:
            self._stop()

    def _stop(self) -> None:
        tree = [process for service in self._services for process in family(service)] if self.own else []
        if self._dead():
            # All workers end with the raylet, and the servers that they started; then Ray waits for nothing.
            for service in self._services:
                with suppress(psutil.NoSuchProcess):
                    service.kill()
        try:
            ray.shutdown()
        finally:
            _end(tree)
            if self._has_token:
                self._set_token(None)

    def _start(self) -> None:
        # Ray reads this from the environment only; a run sends no usage statistics unless the user enables them.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # ray 2.60 requires a token, by default the one in ~/.ray, which all clusters of a user share and everyone can
        # read who can read the home folder.
        if not any(name in os.environ for name in TOKEN_VARIABLES):
            self._set_token(secrets.token_hex(TOKEN_BYTES))
        # Ray starts workers at niceness 15, so that any other load of the machine would starve the run.
        os.environ.setdefault("RAY_worker_niceness", "0")
        with _on_loopback(), _without_unused_services(), _in_own_process_groups(), agents_in_background():
            self._init(
                address="local",
                num_cpus=self.num_cpus,
                include_dashboard=False,
                object_store_memory=SMALL_STORE_BYTES if psutil.virtual_memory().total < SMALL_MACHINE_BYTES else None,
            )

    def _set_token(self, token: str | None) -> None:
        os.environ.pop(TOKEN_VARIABLE, None)
        os.environ.update({} if token is None else {TOKEN_VARIABLE: token})
        self._has_token = token is not None
        AuthenticationTokenLoader.instance().reset_cache()  # it reads the variable once

    def _join(self) -> None:
        try:
            if self.address != "auto":
                _probe(self.address)
            self._init(address=self.address)
        except (OSError, ValueError, RuntimeError) as error:
            raise PlacementError(
                f"No Ray cluster answers at {self.address!r} ({error}). Start one with "
                "`ray start --head`, give its host:port, or leave the address out to run on this machine alone."
            ) from error

    def _init(self, **options: Any) -> None:
        try:
            ray.init(namespace=self.namespace, log_to_driver=False, logging_level=logging.ERROR, **options)
        except SystemExit as ended:  # what Ray's own handler of SIGTERM raises
            raise KeyboardInterrupt from ended


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    # Ray replaces the program's handler; Python allows handlers in the main thread only.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _replaced(owner: Any, **values: object) -> Iterator[None]:
    """Give ``owner`` these attributes inside the block, and restore the former ones after it."""
    before = {name: vars(owner)[name] for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _on_loopback() -> AbstractContextManager[None]:
    # ray 2.60: `_node_ip_address="127.0.0.1"` is replaced by the node's outer address, and with that everything but one
    # agent listens on all interfaces. Where Ray expects no second node, as on a Mac, it keeps to 127.0.0.1 altogether.
    return _replaced(ray_constants, ENABLE_RAY_CLUSTER=False)


def _without_unused_services() -> AbstractContextManager[None]:
    # Goes when ray.init can leave them out. Another version of Ray may know them by other names: then they start.
    return _replaced(Node, **{name: lambda *_, **__: None for name in UNUSED_SERVICES if name in vars(Node)})


def _in_own_process_groups() -> AbstractContextManager[None]:
    # `timeout`, systemd and batch systems send SIGTERM to the whole group of a run. Ray's services would be gone before
    # the run could end in order: it would wait a minute for them, and then die of it. They end with the driver anyway.
    return _replaced(services, ConsolePopen=_ServicePopen)


def agents_in_background() -> AbstractContextManager[None]:
    """Nodes that start inside the block do not wait for their agents.

    ray 2.60: a raylet waits for each of its two agents to write the ports that it listens at, 15 s a port without an
    option, and then aborts; on a busy or cold machine the imports of an agent take longer. It does not wait where ports
    are given.
    """
    before = Node.start_raylet

    def start_raylet(node: Any, *args: Any, **options: Any) -> None:
        params = node._ray_params
        for name in ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port"):
            setattr(params, name, _free_agent_port())
        # This one has no flag. An agent without HTTP writes -1; the agent replaces it by its port.
        persist_port(node._session_dir, node._node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, -1)
        before(node, *args, **options)

    os.environ.setdefault("RAY_agent_register_timeout_ms", AGENT_START_LIMIT_MS)
    return _replaced(Node, start_raylet=start_raylet)


@cache
def _agent_ports() -> Iterator[int]:
    # Processes start at different ports: an agent listens seconds after its port was chosen.
    start = os.getpid() * 50 % len(AGENT_PORTS)
    return cycle([*AGENT_PORTS[start:], *AGENT_PORTS[:start]])


def _free_agent_port() -> int:
    for port in islice(_agent_ports(), len(AGENT_PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise PlacementError(f"Ray's agents need free ports in {AGENT_PORTS[0]} to {AGENT_PORTS[-1]}; all are in use.")


class _ServicePopen(services.ConsolePopen):
    def __init__(self, command: Sequence[str], **kwargs: Any) -> None:
        super().__init__([_changed_for_run(word) for word in command], process_group=0, **kwargs)


def _changed_for_run(word: str) -> str:
    """Return ``word`` of a raylet's command line, changed so that no driver waits for workers (:data:`PRESTART`), and
    that the kernel kills an agent when the raylet ends."""
    option, _, command = word.partition("=")
    if option == PRESTART:
        return f"{PRESTART}=0"
    if option not in AGENT_COMMANDS:
        return word
    return f"{option}={subprocess.list2cmdline(with_raylet())} {command}"


def _probe(address: str) -> None:
    # Ray itself retries for minutes if the port is closed, or is not Ray's.
    host, _, port = address.removeprefix("ray://").rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_LIMIT_S) as connection:
        connection.settimeout(PROBE_LIMIT_S)
        if os.environ.get("RAY_USE_TLS", "0") not in ("", "0", "false"):
            return  # such a server answers encrypted connections only
        connection.sendall(HTTP2_GREETING)
        answer = connection.recv(HTTP2_HEAD, socket.MSG_WAITALL)
    if len(answer) < HTTP2_HEAD or answer[3] != HTTP2_SETTINGS:
        raise ValueError("the program that listens there does not speak gRPC")


def _children_since(before: Sequence[psutil.Process]) -> dict[psutil.Process, str]:
    """The children of this process that were not there before, and their names."""
    return {child: child.name() for child in psutil.Process().children() if child not in before}


def _end(processes: Iterable[psutil.Process]) -> None:
    # Ray ends its workers, but not processes that a worker started in a new session, as some servers do. Handles
    # compare start times, so a process id that was used again is not mistaken for an old one.
    _, alive = psutil.wait_procs(processes, timeout=LEFTOVER_GRACE_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=LEFTOVER_GRACE_S)


def cluster_gpus() -> int:
    """GPUs of the nodes of the joined cluster."""
    return int(ray.cluster_resources().get("GPU", 0))


@cache
def gpus_at(address: str) -> int | None:
    """Return the GPUs that the nodes of the Ray cluster at ``address`` report; None if no cluster answers.

    Joins the cluster for a moment, and starts nothing there.
    """
    if ray.is_initialized():
        return cluster_gpus()
    try:
        with Session(address, namespace="slime-look"):
            return cluster_gpus()
    except PlacementError:
        return None


def head_address() -> str | None:
    """Return the address of this process's node; None if the cluster has no other node."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return str(ray.util.get_node_ip_address()) if len(nodes) > 1 else None


def inspect_nodes(manifest: Manifest, *, limit_s: float = LOOK_LIMIT_S) -> None:
    """Raise ManifestMismatch if a living node of the cluster has other plugins than ``manifest``, or cannot load them.

    Actors refuse plugins that differ from the driver's, but one actor at a time, and only when it starts: after engines
    have loaded their weights. Here one task a node, in a worker process like theirs, attaches the manifest and reports.

    Arguments:
        limit_s: how long to wait for the nodes, all together.

    Raises:
        ManifestMismatch: one table of everything that differs, or that cannot be loaded, on any node.
        WaitTimeout: a node has not answered in time, and no other has reported a difference.
    """
    nodes = labels([node for node in ray.nodes() if node["Alive"]])
    deadline_s = time.monotonic() + limit_s
    differing, broken, silent = {}, {}, []
    for label, call in zip(nodes.values(), _on_nodes(nodes, _differences, manifest), strict=True):
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            if differences := wait([call], what="every node to look at its plugins", fail_after_s=left_s)[0]:
                differing[label] = differences
        except WaitTimeout:
            silent.append(label)
        except SlimeError as failure:  # a plugin fails there, or slime is not installed, or in another version
            broken[label] = str(failure)
    if differing or broken:
        raise ManifestMismatch(mismatch_text(differing, broken, total=len(nodes)))
    if silent:
        raise WaitTimeout(
            f"{len(silent)} of {len(nodes)} nodes did not report their plugins within {limit_s:g} s: "
            f"{', '.join(silent)}.\n"
            "Find out with `ray status` and Ray's logs on those nodes why they start no process; then start again."
        )


def _differences(manifest: Manifest) -> list[Difference]:
    """Return how this node's plugins differ from ``manifest``; load them as an actor does if they do not."""
    differences = mismatches(manifest)
    if not differences:
        attach(manifest)
    return differences


_INSTALL = "Install the same plugins on every node, or share one environment between the nodes."


def mismatch_text(differing: Mapping[str, Sequence[Difference]], broken: Mapping[str, str], *, total: int) -> str:
    """One table of everything that differs, and below it what cannot be loaded.

    Arguments:
        differing, broken: node -> the differences of its plugins, or the error of one that fails while it is imported.
        total: nodes of the cluster.
    """
    parts = [f"{len(differing) + len(broken)} of {total} nodes cannot run the driver's plugins; nothing was started."]
    rows = [(node, *difference) for node, differences in differing.items() for difference in differences]
    parts += [table(rows, head=("node", "plugin", "driver", "node has")), _INSTALL] if differing else []
    parts += [f"on node {node}: {failure}" for node, failure in broken.items()]
    return "\n".join(parts)


def require_inputs(node_ids: Collection[str], paths: Sequence[Path], *, limit_s: float = LOOK_LIMIT_S) -> None:
    """Raise ConfigError if a node of ``node_ids`` lacks one of ``paths``; runs one task per node.

    Raises:
        ConfigError: names every node that lacks some, and the paths.
        WaitTimeout: a node has not answered in time.
    """
    nodes = {node: label for node, label in labels(ray.nodes()).items() if node in node_ids}
    calls = _on_nodes(nodes, _missing, [str(path) for path in paths])
    missing = wait(calls, what="every node to look for the run's inputs", fail_after_s=limit_s)
    lines = [f"  node {label}: {path}" for label, paths in zip(nodes.values(), missing, strict=True) for path in paths]
    if lines:
        raise ConfigError(
            f"Inputs are missing or empty on some of the {len(nodes)} nodes of the run; nothing was started:\n"
            + "\n".join(lines)
            + "\nCopy them to the same path, or to a file system that all nodes share."
        )


def _missing(paths: list[str]) -> list[str]:
    # A folder is empty if a shared file system was not mounted.
    return [path for path in paths if not (any(Path(path).iterdir()) if Path(path).is_dir() else Path(path).is_file())]


def _on_nodes(nodes: Mapping[str, str], task: Callable[[T], R], argument: T) -> list[Call[R]]:
    """Start ``task`` on every node; ``nodes`` maps ids to names for messages."""
    remote: Any = ray.remote(num_cpus=0, max_retries=0)(task)
    on_node = {
        node: remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)) for node in nodes
    }
    return [Call(on_node[node].remote(argument), f"node {label}", "look") for node, label in nodes.items()]


def labels(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return node id -> its name in messages: host name and address, with the id if two nodes share those."""
    names = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in nodes}
    count = Counter(names.values())
    return {node: name if count[name] == 1 else f"{name} {node[:8]}" for node, name in names.items()}
