"""``python -m _slime_server`` is ``python -m sglang.launch_server`` whose processes are forked instead of started
afresh.

SGLang starts scheduler and detokenizer with the ``spawn`` method, because CUDA does not survive a fork; each of them
imports torch, transformers and sglang again. Without a GPU nothing forbids forking: at that point the server has one
thread. On two cores that halves the time to start (10 s instead of 20 s) and the memory (pages are shared). Collecting
garbage only afterwards saves a little more. Upstream: sglang 0.5.23, srt/entrypoints/engine.py:1995. Can go when the
start method can be chosen.

A server that returns the routes of its experts keeps them in memory that it registers with CUDA, on a CPU too, where that
fails: srt/mem_cache/pool_host/common.py:453. Here it is ordinary memory. Can go when upstream asks for the device.

Attention written in torch reads keys and values from the cache, which holds compressed ones under multi-latent attention
(DeepSeek V3); a prompt gets uncompressed keys beside them (srt/models/deepseek_common/attention_backend_handler.py:233)
and fails. Here the projections are absorbed into queries, as they are for every later token. Its rotary positions have
to be scaled on a CPU (srt/layers/rotary_embedding/factory.py:478); here plain ones are built as for other models. Can go
when upstream registers a handler for torch_native, and builds plain positions.

Two imports that cost a second or more and serve nothing here are left out: Megatron-core, which a dump for debugging
looks at (srt/debug_utils/dumper.py:1824, which does without where there is none), and 250 files of models, which are
imported all the same where ``_slime_models`` lacks the one that is served.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

select = multiprocessing.set_start_method


def fork_instead(method: str | None, force: bool = False) -> None:
    """What ``multiprocessing.set_start_method`` does, with ``fork`` in the place of ``spawn``."""
    gc.enable()
    gc.freeze()  # what was imported is not visited again, so its pages stay shared
    if "--enable-return-routed-experts" in sys.argv:
        leave_memory_unregistered()
    if has_latent_attention(sys.argv[1:]):
        serve_latent_attention()
    select("fork" if method == "spawn" else method, force=force)


def has_latent_attention(argv: list[str]) -> bool:
    """Whether the model that is served caches compressed keys and values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", type=Path)
    folder = parser.parse_known_args(argv)[0].model_path
    return folder is not None and "kv_lora_rank" in json.loads((folder / "config.json").read_text("utf-8"))


def serve_latent_attention() -> None:
    """Prompts take the path of responses, and rotary positions need not be scaled."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
    scaled = factory.get_rope_cpu

    def get_rope_cpu(*arguments: Any) -> Any:
        *plain, _ = arguments
        return factory.get_rope(*plain) if arguments[5] is None else scaled(*arguments)

    factory.get_rope_cpu = get_rope_cpu


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
