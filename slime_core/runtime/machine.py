"""Free resources of this machine: memory, shared memory, GPUs. Reads files of the operating system; imports no Ray."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shutil import which

import psutil  # type: ignore[import-untyped]

from slime_core.config.schema import RunConfig

CGROUP, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
SHARED = Path("/dev/shm")
DEVICES = ("nvidia[0-9]*", "kfd", "dxg")
"""Names under /dev of NVIDIA's driver, AMD's, and that of a Windows host."""


COMPILER = "a C++ compiler"
KERNEL_PACKAGES = {"fa4": "flash-attn-4", "transformer_engine": "transformer-engine"}
"""Implementation that a learner can be told to use -> the distribution that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources that processes can use if they start now.

    Arguments:
        cores: that this process may run on.
        memory: bytes that are free or can be freed, within the limit of this process's cgroup.
        shared_memory: free bytes of /dev/shm; None if there is none.
        has_gpus: a GPU driver has devices here.
        torch: version of torch; ``+cpu`` at its end marks a build without CUDA.
        missing_build_tools: the programs that SGLang needs to compile GPU kernels and that an engine would not find.
        kernel_packages: those of :data:`KERNEL_PACKAGES` that are installed.
    """

    cores: int
    memory: int
    shared_memory: int | None
    has_gpus: bool
    torch: str
    missing_build_tools: tuple[str, ...] = ()
    kernel_packages: frozenset[str] = frozenset()

    @property
    def can_use_gpus(self) -> bool:
        """Whether torch can compute on a GPU here."""
        return self.has_gpus and not self.torch.endswith("+cpu")


def cluster_address(ray_address: str | None) -> str | None:
    """Return the address of the Ray cluster that a run joins; None if it starts a private one on this machine.

    Arguments:
        ray_address: the setting; by default the variable ``RAY_ADDRESS``, which ``ray job submit`` sets.
    """
    address = ray_address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address or None


def program_path() -> str:
    """Return ``PATH`` with the programs of this Python environment first: ``ninja`` is installed there."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _missing_build_tools() -> tuple[str, ...]:
    path = program_path()
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    needed = {
        "nvcc": which("nvcc", path=os.pathsep.join([f"{toolkit}/bin", path])),
        COMPILER: which(os.environ.get("CXX", "c++"), path=path) or which("g++", path=path),
        "ninja": which("ninja", path=path),
    }
    return tuple(name for name, program in needed.items() if program is None)


def cpu_threads() -> int:
    """Return the threads of one operation on a CPU: ``OMP_NUM_THREADS``, or the cores that this process may run on."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() and int(threads) else len(os.sched_getaffinity(0))


def nccl_environment(config: RunConfig) -> dict[str, str]:
    """Return NCCL's variables of learner ranks and engines; variables of the driver count on every node.

    Rank 0 and the engines form one NCCL group only if weights are broadcast (``distributed``); then all of them need
    the same values. SGLang 0.5.23 sets the variables to 0 if they are unset, and to 1 for two of its flags
    (entrypoints/engine.py:1898-1915). With the other transports the learner keeps NCCL's defaults, NVLS included.
    """
    names = ("NCCL_ALGO", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
    # A ring adds in one order; sums in switches (NVLS) may not.
    ring = {"NCCL_ALGO": "Ring"} if config.is_deterministic else {}
    chosen = ring | {name: os.environ[name] for name in names if name in os.environ}
    if config.transport != "distributed" or not (config.debug.trains and config.num_engines):
        return chosen
    groups = (*config.engine_groups, *config.eval_groups)
    engines = [dict(flags) for flags in (config.sglang.given, *(group.overrides for group in groups))]
    symmetric = any(flags.get("enable_symm_mem") is True for flags in engines)
    nvls = symmetric or any(flags.get("enable_nccl_nvls") is True for flags in engines)
    required = ({"NCCL_CUMEM_ENABLE": "1"} if symmetric else {}) | ({"NCCL_NVLS_ENABLE": "1"} if nvls else {})
    return {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"} | chosen | required


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = re.compile(r"(expandable_segments\s*:\s*)true", re.IGNORECASE)


def allocator_environment(config: RunConfig) -> dict[str, str]:
    """Return the variables of torch's allocator with expandable segments switched off, if a variable switches them on
    and learner and engines share GPUs.

    SGLang could not release such memory (torch_memory_saver 0.0.10 raises), and the learner could not share it with an
    engine through CUDA IPC.
    """
    if not config.cluster.colocate:
        return {}
    variables = {name: os.environ.get(name, "") for name in ALLOCATOR}
    return {name: EXPANDABLE.sub(r"\1False", value) for name, value in variables.items() if EXPANDABLE.search(value)}


def openmp_environment(config: RunConfig) -> dict[str, str]:
    """Return OpenMP's variables of ranks and engines that share a CPU; those of the driver have priority.

    If generation and training overlap, threads without work sleep. By default they spin, on cores that others need.
    """
    if config.rollout.async_buffer_size == 0:
        return {}
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def rank_environment(config: RunConfig, *, on_gpu: bool) -> dict[str, str]:
    """Return the variables of a process that trains or samples.

    On a GPU: those of NCCL, and defaults for unset variables. With one queue of kernels, tensor parallelism overlaps
    communication in the order that Megatron-core expects. Ray gives an actor one thread on the CPU; an optimizer on the
    host gets the node's cores, divided among its ranks, as many as this machine has.
    """
    if not on_gpu:
        # A CPU run on a machine with GPUs must not see them, because torch would use them.
        return {"OMP_NUM_THREADS": str(cpu_threads()), "CUDA_VISIBLE_DEVICES": "", **openmp_environment(config)}
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if config.megatron.optimizer.get("optimizer_cpu_offload"):
        variables["OMP_NUM_THREADS"] = str(max(1, cpu_threads() // config.cluster.actor_num_gpus_per_node))
    variables = {name: os.environ.get(name, default) for name, default in variables.items()}
    if config.transport == "tensor":
        variables |= allocator_environment(config)
    return nccl_environment(config) | variables


def free_resources() -> Machine:
    """Return the free resources of this machine now."""
    group = OWN_GROUP.read_text() if OWN_GROUP.exists() else ""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory=min([psutil.virtual_memory().available, *_left_in_groups(CGROUP, group)]),
        shared_memory=_free(SHARED),
        has_gpus=any(True for name in DEVICES for _ in Path("/dev").glob(name)),
        torch=metadata.version("torch"),
        missing_build_tools=_missing_build_tools(),
        kernel_packages=frozenset(filter(_is_installed, KERNEL_PACKAGES.values())),
    )


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _free(folder: Path) -> int | None:
    try:
        return psutil.disk_usage(str(folder)).free  # type: ignore[no-any-return]
    except OSError:
        return None


def _left_in_groups(root: Path, group: str) -> list[int]:
    """Return the free bytes below the memory limit of this process's control group and of each of its parents that has
    a limit. The file cache counts as free.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current, memory.stat).

    Arguments:
        root: mount point of the control groups.
        group: content of /proc/self/cgroup.
    """
    path = root / next((line.removeprefix("0::/") for line in group.splitlines() if line.startswith("0::/")), "")
    sizes = []
    for folder in (path, *(parent for parent in path.parents if parent.is_relative_to(root))):
        with suppress(OSError, ValueError):  # no such group, or "max": no limit
            rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            sizes.append(limit - used + int(rows.get("inactive_file", 0)))
    return sizes


def family(process: int | psutil.Process) -> list[psutil.Process]:
    """Return ``process`` (or the process of this id) and its descendants; empty if it has ended."""
    try:
        root = psutil.Process(process) if isinstance(process, int) else process
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def runs(process: psutil.Process) -> bool:
    """Return whether ``process`` is alive; a zombie is not."""
    return bool(process.is_running() and status(process) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))


def status(process: psutil.Process) -> str:
    """Return the process's status, one of psutil's constants."""
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)
