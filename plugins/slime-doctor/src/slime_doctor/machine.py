"""Checks of the machine: platform, memory, shared memory, limits, disk, ports. Reads the operating system only."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_doctor.finding import Finding

GIB = 2**30
PYTHONS = ((3, 11), (3, 12))
"""Python versions that are tested and for which Megatron-core has wheels."""

BUSY = 3
"""Number of processes per core at which starting takes several times as long as on an idle machine."""

MEMORY_GIB = 4
"""Memory of the built-in demo with three processes: 2.2 GiB by ``slime check``, plus activations and a cache."""

SHARED_GIB = 1
"""Two buffers of weights in transit (``--update-weight-buffer-size``, 512 MiB)."""

DISK_GIB = 20
"""A checkpoint of a model of 1 billion parameters with its optimizer (16 bytes per parameter), and logs."""

OPEN_FILES = 8192
"""Limit that ray 2.60 recommends (_private/worker.py:1775); ray raises a soft limit to the hard one by itself."""

PROCESSES = 4096
"""The limit counts threads, and each of Ray's processes has dozens."""

PORTS = 64
"""Ports of a run: an engine takes 4, a router 2, a cluster of Ray about 15, each transport 1."""


def findings(output: Path) -> Iterator[Finding]:
    """Run all checks of this file.

    Arguments:
        output: where runs are going to write; it need not exist.
    """
    yield python(sys.version_info[:2], platform.system(), platform.machine())
    yield cores(len(os.sched_getaffinity(0)), os.getloadavg()[0])
    yield memory(available_memory(), psutil.virtual_memory().total)
    yield shared_memory(Path("/dev/shm"))
    yield limit("open files", resource.getrlimit(resource.RLIMIT_NOFILE)[1], OPEN_FILES, "ulimit -n")
    yield limit("processes", resource.getrlimit(resource.RLIMIT_NPROC)[0], PROCESSES, "ulimit -u")
    yield disk(output)
    yield ports()
    yield host_name(socket.gethostname())


def python(version: tuple[int, ...], system: str, processor: str) -> Finding:
    """Check Python version and platform."""
    text = f"Python {'.'.join(map(str, version))} on {system} {processor}"
    if version not in PYTHONS:
        return Finding("python", "fail", text, "make an environment of Python 3.11 or 3.12 (docs/install.md)")
    if (system, processor) != ("Linux", "x86_64"):
        return Finding("python", "warn", f"{text}; tested is Linux x86_64", "use such a machine if a run fails here")
    return Finding("python", "ok", text)


def cores(count: int, load: float) -> Finding:
    """Compare the cores of this process with the number of runnable processes, averaged over a minute."""
    text = f"{count}, and {load:.1f} processes of this machine want to run"
    if load > BUSY * count:
        return Finding(
            "cores", "warn", text, "end other programs: on a machine so busy, starting can exceed its limits"
        )
    return Finding("cores", "ok", text)


def available_memory() -> int:
    """Return the bytes available to new processes, within the limit of this process's control group."""
    available = int(psutil.virtual_memory().available)
    try:  # Linux, Documentation/admin-guide/cgroup-v2.rst; "max" is not a number
        group = Path("/sys/fs/cgroup")
        unused = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return min(available, unused)


def memory(available: int, total: int) -> Finding:
    """Check the available main memory."""
    text = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if available < MEMORY_GIB * GIB:
        return Finding("memory", "fail", text, f"end other programs: the built-in demo needs about {MEMORY_GIB} GiB")
    return Finding("memory", "ok", text)


def shared_memory(folder: Path) -> Finding:
    """Check the space in /dev/shm, through which processes of one machine pass tensors."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as problem:
        return Finding("shared memory", "fail", f"{folder}: {problem.strerror}", f"mount a tmpfs at {folder}")
    text = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB of {folder} free"
    if usage.free < SHARED_GIB * GIB:
        step = "docker run --shm-size 16g, or end the program that fills it; without: --update-weight-transport disk"
        return Finding("shared memory", "warn", text, step)
    return Finding("shared memory", "ok", text)


def limit(check: str, allowed: int, needed: int, command: str) -> Finding:
    """Check a resource limit of this process.

    Arguments:
        allowed: by the limit; ``resource.RLIM_INFINITY``: there is none.
        command: of the shell, which raises it.
    """
    if allowed == resource.RLIM_INFINITY:
        return Finding(check, "ok", "no limit")
    if allowed < needed:
        return Finding(
            check, "warn", f"at most {allowed:,}; runs with many processes need {needed:,}", f"{command} {needed}"
        )
    return Finding(check, "ok", f"at most {allowed:,}")


def disk(output: Path) -> Finding:
    """Check the free space of the disk that runs write to."""
    folder = next(place for place in (output, *output.parents) if place.exists())
    if not folder.is_dir():
        return Finding("disk", "fail", f"{folder} is a file", "name another folder: slime doctor --output-dir FOLDER")
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free for {output}"
    if not _is_writable(folder):
        return Finding("disk", "fail", f"{folder} cannot be written", "name another folder: --output-dir FOLDER")
    if free < DISK_GIB * GIB:
        step = "free some, or --output-dir FOLDER on a larger disk: a checkpoint has 16 bytes a parameter"
        return Finding("disk", "fail" if free < GIB else "warn", text, step)
    return Finding("disk", "ok", text)


def _is_writable(folder: Path) -> bool:
    probe = folder / f".slime-doctor-{psutil.Process().pid}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError:
        return False
    return True


def ports() -> Finding:
    """Check that the loopback interface, where servers of a run on this machine listen, has free ports."""
    with ExitStack() as opened:
        try:
            for _ in range(PORTS):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", 0))
        except OSError as problem:
            step = "end programs that hold ports, or widen /proc/sys/net/ipv4/ip_local_port_range"
            return Finding("ports", "fail", f"127.0.0.1 has fewer than {PORTS} free: {problem.strerror}", step)
    return Finding("ports", "ok", f"127.0.0.1 has {PORTS} free ones and more")


def host_name(name: str) -> Finding:
    """Check that the machine's name resolves; gloo uses it to find the interface that it listens on."""
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError as problem:
        step = f"add '127.0.1.1 {name}' to /etc/hosts, or export GLOO_SOCKET_IFNAME"
        return Finding("host name", "warn", f"{name} has no address ({problem.strerror})", step)
    return Finding("host name", "ok", f"{name} is {address}")
