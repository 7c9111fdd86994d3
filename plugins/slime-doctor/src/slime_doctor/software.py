"""Checks of the software: versions, plugins, torch, GPUs, and environment variables of Ray, NCCL and gloo."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypedDict

import psutil  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slime_doctor.finding import Finding

CORE = "slime-rl"
TESTED = {
    "sglang": "0.5.23",
    "sglang-router": "0.3.2",
    "ray": "2.60.0",
    "megatron-core": "0.16.1",
    "mbridge": "0.15.1",
    "torch": "2.13.0",
    "transformers": "5.19.0",
}
"""The versions of ``requirements/cpu.txt`` whose behaviour slime relies on beyond their documented interfaces."""

LIMIT_S = 300
"""Time limit of a program that a check starts, in seconds; importing torch takes seconds, on a cold disk a minute."""

FULL = 0.1
"""Share of a GPU's memory that may be in use before a run starts."""

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class Torch(TypedDict):
    """Output of ``slime_doctor.probe``.

    Example: ``{"cuda": "13.0", "devices": ["NVIDIA H100 80GB HBM3"], "nccl": "2.28.9", "gloo": True}``.
    """

    cuda: str
    devices: list[str]
    nccl: str
    gloo: bool


class Gpu(TypedDict):
    """A line of ``nvidia-smi``; memory in MiB."""

    name: str
    total: int
    used: int
    driver: str


def findings(torch: Torch | str) -> Iterator[Finding]:
    """Run all checks of this file.

    Arguments:
        torch: the result of :func:`torch_facts`.
    """
    yield versions(_requirements(), _installed())
    yield plugins()
    if isinstance(torch, str):
        yield Finding("torch", "fail", torch, "reinstall torch (docs/install.md)")
    else:
        yield devices(torch, nvidia_gpus(), nvidia_cuda())
        yield collectives(torch)
        if torch["devices"]:
            yield build_tools(torch["cuda"], os.environ)
    yield from interfaces(os.environ, psutil.net_if_addrs())
    yield ray_token(os.environ, Path.home())
    yield reachable(os.environ)


# --- Packages ---------------------------------------------------------------------------------------------------------


def _requirements(distribution: str = CORE) -> list[Requirement]:
    requirements = map(Requirement, metadata.requires(distribution) or ())
    return [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]


def _installed() -> dict[str, str]:
    return {canonicalize_name(entry.metadata["Name"]): entry.version for entry in metadata.distributions()}


def _unmet(requirements: Sequence[Requirement], installed: Mapping[str, str]) -> list[str]:
    return [
        f"{entry.name} {installed.get(entry.name, 'is missing')} ({entry.specifier})"
        for entry in requirements
        if entry.name not in installed or not entry.specifier.contains(installed[entry.name].partition("+")[0])
    ]


def versions(requirements: Sequence[Requirement], installed: Mapping[str, str]) -> Finding:
    """Check that the packages that the core requires are installed, in the tested versions."""
    if unmet := _unmet(requirements, installed):
        step = "install the versions in parentheses (docs/install.md)"
        return Finding("versions", "fail", ", ".join(unmet), step)
    untested = [
        f"{name} {installed[name]} (tested: {tested})"
        for name, tested in TESTED.items()
        if name in installed and installed[name].partition("+")[0] != tested
    ]
    if untested:
        step = "if a run fails, install the tested version"
        return Finding("versions", "warn", ", ".join(untested), step)
    return Finding("versions", "ok", ", ".join(f"{name} {installed[name]}" for name in (CORE, *TESTED)))


def plugins() -> Finding:
    """Check that every installed plugin loads, in a separate process, and accepts the version of the core."""
    listed = run(sys.executable, "-m", "slime_core", "plugins", "list", "--json")
    if isinstance(listed, str) or not listed.stdout.startswith("["):
        text = listed if isinstance(listed, str) else last_line(listed)
        return Finding("plugins", "fail", text, "slime plugins list")
    rows, installed = json.loads(listed.stdout), _installed()
    mistakes = [f"{row['name']}: {row['error'].partition(chr(10))[0]}" for row in rows if "error" in row]
    for distribution in dict.fromkeys(row["distribution"] for row in rows if "error" not in row):
        bounds = [entry for entry in _requirements(distribution) if canonicalize_name(entry.name) == CORE]
        mistakes += [f"{distribution}: {text}" for text in _unmet(bounds, installed)]
    if mistakes:
        return Finding("plugins", "fail", "; ".join(mistakes), "reinstall or uninstall its distribution")
    return Finding("plugins", "ok", f"{len(rows)} load: {', '.join(row['name'] for row in rows)}")


def run(*command: str) -> subprocess.CompletedProcess[str] | str:
    """Run the program; return the ended process, or a text if it did not start or end in time."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not ended after {LIMIT_S} s"
    except OSError as problem:
        return f"{command[0]}: {problem.strerror}"


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the exit code of a failed program and the last line that it printed."""
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    return f"exit code {ended.returncode}: {lines[-1] if lines else 'no output'}"


# --- torch and GPUs ---------------------------------------------------------------------------------------------------


def torch_facts() -> Torch | str:
    """Return the facts about the installed torch, or the reason why it does not load."""
    ended = run(sys.executable, "-m", "slime_doctor.probe")
    if isinstance(ended, str):
        return ended
    if ended.returncode:
        return last_line(ended)
    facts: Torch = json.loads(ended.stdout.splitlines()[-1])
    return facts


def nvidia_gpus() -> list[Gpu]:
    """Return the GPUs that NVIDIA's driver shows; empty without a driver."""
    fields = "name,memory.total,memory.used,driver_version"
    ended = run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if isinstance(ended, str) or ended.returncode:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in ended.stdout.splitlines() if line.strip()]
    return [Gpu(name=name, total=int(total), used=int(used), driver=driver) for name, total, used, driver in rows]


def nvidia_cuda() -> str:
    """Return the newest CUDA version that the driver supports, such as ``"13.0"``; empty: unknown."""
    ended = run("nvidia-smi")
    match = None if isinstance(ended, str) else re.search(r"CUDA Version: (\d+\.\d+)", ended.stdout)
    return match[1] if match else ""


def devices(torch: Torch, gpus: Sequence[Gpu], driver_cuda: str) -> Finding:
    """Check that driver and torch show the same GPUs, and that they are free."""
    if not gpus and not torch["devices"]:
        return Finding("devices", "ok", "no GPU: learner and engines compute on the CPU")
    if not torch["cuda"]:
        step = "install torch for CUDA in a separate environment (docs/install.md), or train on the CPU"
        return Finding("devices", "warn", f"{len(gpus)} GPUs, and a torch without CUDA", step)
    shown = ", ".join(dict.fromkeys(torch["devices"] or [gpu["name"] for gpu in gpus]))
    text = f"{len(torch['devices'])} x {shown}, torch for CUDA {torch['cuda']}"
    if gpus:
        text += f", driver {gpus[0]['driver']} for CUDA {driver_cuda or 'unknown'}"
    # A driver runs builds of the same major version, also newer minor ones (CUDA, "Minor Version Compatibility").
    if driver_cuda and int(driver_cuda.partition(".")[0]) < int(torch["cuda"].partition(".")[0]):
        return Finding("devices", "fail", text, f"update the driver, or install torch for CUDA {driver_cuda}")
    if not torch["devices"]:
        return Finding("devices", "fail", f"{text}; torch sees no GPU", "check CUDA_VISIBLE_DEVICES and the driver")
    full = [number for number, gpu in enumerate(gpus) if gpu["used"] > FULL * gpu["total"]]
    if full:
        return Finding("devices", "warn", f"{text}; in use: {full}", "end the programs that nvidia-smi lists")
    return Finding("devices", "ok", text)


def collectives(torch: Torch) -> Finding:
    """Check the libraries through which ranks communicate: gloo on CPUs, NCCL on GPUs."""
    if not torch["gloo"]:
        return Finding("gloo and NCCL", "fail", "torch has no gloo", "install a build of torch that has it")
    if torch["devices"] and not torch["nccl"]:
        return Finding("gloo and NCCL", "fail", "torch has no NCCL", "install a build of torch that has it")
    has_nccl = f"NCCL {torch['nccl']}" if torch["nccl"] else "no NCCL, which only GPUs need"
    return Finding("gloo and NCCL", "ok", f"gloo; {has_nccl}")


def build_tools(cuda: str, environment: Mapping[str, str]) -> Finding:
    """Check that SGLang finds what it compiles GPU kernels with at its start.

    Arguments:
        cuda: the version of CUDA that torch was built for, such as ``"13.0"``.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    toolkit = environment.get("CUDA_HOME") or environment.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=os.pathsep.join([f"{toolkit}/bin", path]))
    compiler = shutil.which(environment.get("CXX", "c++"), path=path) or shutil.which("g++", path=path)
    programs = {"nvcc": nvcc, "a C++ compiler": compiler, "ninja": shutil.which("ninja", path=path)}
    missing = [name for name, program in programs.items() if program is None]
    if missing:
        step = f"install the CUDA toolkit {cuda}, a C++ compiler and ninja (docs/install.md)"
        return Finding("build tools", "fail", f"not found: {', '.join(missing)}", step)
    version = run(str(nvcc), "--version")
    release = None if isinstance(version, str) else re.search(r"release (\d+)\.\d+", version.stdout)
    version = release[1] if release else "unknown"
    if version != cuda.partition(".")[0]:
        step = f"install the CUDA toolkit {cuda} and set CUDA_HOME to it"
        return Finding("build tools", "fail", f"nvcc of CUDA {version}, torch for CUDA {cuda}", step)
    return Finding("build tools", "ok", f"nvcc of CUDA {version}, {compiler}, ninja")


# --- Environment variables --------------------------------------------------------------------------------------------


def interfaces(environment: Mapping[str, str], present: Collection[str]) -> Iterator[Finding]:
    """Check that the network interfaces selected for gloo and NCCL exist.

    NCCL takes prefixes, whole names after ``=`` and excluded ones after ``^`` (NCCL, "Environment Variables"); gloo
    takes whole names.
    """
    for variable in (GLOO, NCCL):
        if not (value := environment.get(variable)):
            continue
        is_exact = variable == GLOO or value.startswith("=")
        names = [name for name in value.removeprefix("=").split(",") if name]
        missing = [
            name
            for name in names
            if not any(entry == name if is_exact else entry.startswith(name) for entry in present)
        ]
        if missing and not value.startswith("^"):
            step = f"correct {variable}; there are {', '.join(sorted(present))}"
            yield Finding("interfaces", "fail", f"{variable}={value}, and there is no {', '.join(missing)}", step)
        else:
            yield Finding("interfaces", "ok", f"{variable}={value}")


def ray_token(environment: Mapping[str, str], home: Path) -> Finding:
    """Report who can send commands to the Ray cluster of a run."""
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    if environment.get("RAY_AUTH_MODE") == "disabled":
        text = "RAY_AUTH_MODE=disabled: every user of this machine can run code in a run's cluster"
        return Finding("ray token", "warn", text, "unset RAY_AUTH_MODE")
    if not environment.get("RAY_ADDRESS") and "RAY_AUTH_TOKEN_PATH" not in environment:
        return Finding("ray token", "ok", "each run makes one for its cluster")
    if "RAY_AUTH_TOKEN" in environment:
        return Finding("ray token", "ok", "RAY_AUTH_TOKEN")
    if not path.is_file():
        text = f"no token in RAY_AUTH_TOKEN and none in {path}"
        return Finding("ray token", "warn", text, "export the token that the cluster was started with")
    if stat.S_IMODE(path.stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
        return Finding("ray token", "warn", f"other users can read {path}", f"chmod 600 {path}")
    return Finding("ray token", "ok", f"{path}")


def reachable(environment: Mapping[str, str]) -> Finding:
    """Report the addresses at which servers of a run listen, and who can reach them."""
    address = environment.get("RAY_ADDRESS", "")
    open_servers = environment.get("SLIME_ENGINE_KEY") == ""
    keyed = "no key: SLIME_ENGINE_KEY is set and empty" if open_servers else "a key for each run"
    step = "unset SLIME_ENGINE_KEY: who reaches an engine can replace its weights" if open_servers else ""
    if address in ("", "local"):
        text = (
            f"engines, router, ranks and Ray listen on 127.0.0.1, which programs of this machine reach; {keyed}. One "
            "store of each SGLang scheduler listens on all interfaces, without a key"
        )
        return Finding("addresses", "warn" if open_servers else "ok", text, step)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdecimal():  # else "auto", which Ray looks up
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as problem:
            text = f"RAY_ADDRESS={address} does not answer: {problem.strerror or problem}"
            return Finding(
                "addresses", "fail", text, "ray start --head, or unset RAY_ADDRESS to use this machine alone"
            )
    text = (
        f"runs join the cluster at {address}: over several nodes servers listen on the nodes' addresses, which every "
        f"machine of that network reaches; {keyed}"
    )
    step = step or "keep that network to the cluster: ranks talk without a key"
    return Finding("addresses", "warn", text, step)
