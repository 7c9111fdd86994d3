"""What lets Megatron-core and SGLang run on a machine without a GPU.

    megatron.py      ``install()``: an import hook for Megatron-core and mbridge, in the process that trains; what
                     ``torch.cuda`` means to them; collectives over parts of unequal size
    serve.py         environment and arguments of an inference server that runs on a CPU; such a server, started by hand
    stand_ins/       packages that only such a server sees, through its PYTHONPATH

``accelerator`` says which device this process computes on. Nothing here acts when it is imported. The rule between the
parts: ``megatron.py`` never touches torch or any third library, and the stand-ins never reach a process that trains.
"""

from __future__ import annotations

from typing import Literal, cast

from slime_core.errors import ConfigError

Accelerator = Literal["cuda", "cpu"]


def accelerator(requested: str = "auto") -> Accelerator:
    """The device type to compute on: ``requested``; with ``"auto"`` a GPU where torch sees one, else the CPU.

    Raises:
        ConfigError: ``requested`` is none of ``auto``, ``cuda``, ``cpu``, or a GPU was requested and torch sees none.
    """
    import torch

    if requested not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"device = {requested!r}; accepted: auto, cuda or cpu")
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device = cuda, but torch {torch.__version__} sees no GPU; check the driver, or give --device cpu"
        )
    return cast(Accelerator, requested)
