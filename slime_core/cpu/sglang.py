"""What an SGLang server needs to run on a machine without a GPU. Touches no process but the server's."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["server_arguments", "server_environment"]

STAND_INS = Path(__file__).parent / "stand_ins"


def server_environment() -> dict[str, str]:
    """Environment variables to set for ``python -m sglang.launch_server`` on a CPU; its children inherit them.

    PYTHONPATH is put before what this process has, so that the server still finds what this process finds.
    """
    inherited = os.environ.get("PYTHONPATH")
    return {
        "SGLANG_USE_CPU_ENGINE": "1",  # sglang 0.5.23, srt/platforms/__init__.py:50
        "PYTHONPATH": os.pathsep.join([str(STAND_INS), *([inherited] if inherited else [])]),
        "CUDA_VISIBLE_DEVICES": "",  # a CPU run on a machine with GPUs must not see them
        "OMP_NUM_THREADS": "1",  # an engine shares the machine with the learner
        "TORCHDYNAMO_DISABLE": "1",  # nothing to compile for: inductor wants a C++ toolchain and minutes
    }


def server_arguments() -> list[str]:
    """Arguments to add to ``python -m sglang.launch_server`` on a CPU.

    The backends are the ones written in torch. Without ``--sleep-on-idle`` an idle scheduler spins on most of a core.
    """
    return [
        "--device=cpu",
        "--attention-backend=torch_native",
        "--sampling-backend=pytorch",
        "--cuda-graph-backend-decode=disabled",
        "--cuda-graph-backend-prefill=disabled",
        "--sleep-on-idle",
    ]
