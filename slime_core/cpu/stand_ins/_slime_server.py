"""``python -m _slime_server`` is ``python -m sglang.launch_server`` whose processes are forked instead of started
afresh.

SGLang starts scheduler and detokenizer with the ``spawn`` method, because CUDA does not survive a fork; each of them
imports torch, transformers and sglang again. Without a GPU nothing forbids forking: at that point the server has one
thread. On two cores that halves the time to start (10 s instead of 20 s) and the memory (pages are shared). Collecting
garbage only afterwards saves a little more. Upstream: sglang 0.5.23, srt/entrypoints/engine.py:1995. Can go when the
start method can be chosen.

A server that returns the routes of its experts keeps them in memory that it registers with CUDA, on a CPU too, where that
fails: srt/mem_cache/pool_host/common.py:453. Here it is ordinary memory. Can go when upstream asks for the device.

Two imports that cost a second or more and serve nothing here are left out: Megatron-core, which a dump for debugging
looks at (srt/debug_utils/dumper.py:1824, which does without where there is none), and 250 files of models, which are
imported all the same where ``_slime_models`` lacks the one that is served.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
from typing import Any

select = multiprocessing.set_start_method


def fork_instead(method: str | None, force: bool = False) -> None:
    """What ``multiprocessing.set_start_method`` does, with ``fork`` in the place of ``spawn``."""
    gc.enable()
    gc.freeze()  # what was imported is not visited again, so its pages stay shared
    if "--enable-return-routed-experts" in sys.argv:
        leave_memory_unregistered()
    select("fork" if method == "spawn" else method, force=force)


def leave_memory_unregistered() -> None:
    """Buffers on a CPU's side are allocated, and no driver is told."""
    from sglang.srt.mem_cache.pool_host import common

    def allocate(*shape: Any, **options: Any) -> Any:
        return common.alloc_with_host_register(*shape, **{**options, "pin_memory": False})

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


if __name__ == "__main__":
    gc.disable()
    sys.modules["megatron"] = None  # type: ignore[assignment]
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "_slime_models")
    multiprocessing.set_start_method = fork_instead
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
