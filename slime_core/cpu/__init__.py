"""Runs Megatron-core and SGLang on a machine without a GPU.

    megatron.py      ``install()``: an import hook for Megatron-core and mbridge, in training processes; their
                     replacement of ``torch.cuda``; collectives over parts of unequal size
    serve.py         environment and arguments of an inference server on a CPU; starts such a server by hand
    stand_ins/       packages that only such a server sees, through its PYTHONPATH

``accelerator`` returns the device type of this process. Importing these modules has no effects. ``megatron.py`` never
changes torch or any third library, and the stand-ins are never imported in a training process.
"""

from __future__ import annotations

from typing import Literal

from slime_core.errors import ConfigError

Accelerator = Literal["cuda", "cpu"]


def accelerator(requested: Accelerator | Literal["auto"] = "auto") -> Accelerator:
    """Return the device type: ``requested``; for ``"auto"``, a GPU if torch sees one, else the CPU.

    Raises:
        ConfigError: a GPU was requested and torch sees none.
    """
    import torch

    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device = cuda, but torch {torch.__version__} sees no GPU; check the driver, or give --device cpu"
        )
    return requested
