"""Part 1: the machine. Only an old GPU fails; a missing compiler matters to engines, which compile kernels at start."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib.metadata import distributions

import torch

from gpu_kit.report import DEVICE, GIB, ON_GPU, report

PROGRAMS = {"nvcc": "release", "c++": "", "ninja": ""}
"""Programs that SGLang's kernels are compiled with, and a word of the line of ``--version`` that matters."""

PACKAGES = ("transformers", "megatron-core", "mbridge", "triton", "flash-attn-4", "transformer-engine", "sglang", "ray")


def main() -> None:
    """Report the machine."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    report("Python", python, expected="3.11 or 3.12")
    report("torch", torch.__version__, expected="2.11 or later")
    for name in PACKAGES:
        versions = [distribution.version for distribution in distributions(name=name)]
        report(name, *versions[:1] or ["not installed"])
    if ON_GPU:
        properties = torch.cuda.get_device_properties(DEVICE)
        report("GPU", properties.name)
        report("GPU memory", properties.total_memory / GIB, "GiB")
        capability = f"{properties.major}.{properties.minor}"
        report("compute capability", capability, expected="8.0 or later, for bfloat16", ok=properties.major >= 8)
        report("driver", _output("nvidia-smi", "--query-gpu=driver_version,mig.mode.current", "--format=csv,noheader"))
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        report("CUDA of torch", f"{torch.version.cuda}, NCCL {nccl}, cuDNN {torch.backends.cudnn.version()}")
    else:
        report("GPU", "none: every part runs with small sizes on the CPU")
    for program, word in PROGRAMS.items():
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
        found = shutil.which(program, path=path)
        lines = _output(found, "--version").splitlines() if found else []
        report(program, next((line for line in lines if word in line), "missing"), expected="needed by engines on GPUs")
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    report("grouped_mm, varlen", f"{hasattr(torch.nn.functional, 'grouped_mm')}, {has_varlen}", expected="True, True")
    report("/dev/shm free", shutil.disk_usage("/dev/shm").free / GIB, "GiB", expected="1 GiB or more")
    report("cores", len(os.sched_getaffinity(0)))
    report("memory", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, "GiB")
    for name, number, needed in (
        ("open files", resource.RLIMIT_NOFILE, "8,192 or more"),
        ("locked memory", resource.RLIMIT_MEMLOCK, "no limit, for page-locked copies"),
        ("processes", resource.RLIMIT_NPROC, "4,096 or more"),
    ):
        limit = resource.getrlimit(number)[1]
        report(f"limit of {name}", "no limit" if limit == resource.RLIM_INFINITY else limit, expected=needed)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as problem:
        return f"failed: {problem}"


if __name__ == "__main__":
    main()
