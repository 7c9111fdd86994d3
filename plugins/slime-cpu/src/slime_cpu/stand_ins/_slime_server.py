"""Runs ``python -m sglang.launch_server`` with forked instead of spawned processes: ``python -m _slime_server``.

SGLang starts scheduler and detokenizer with the ``spawn`` method, because CUDA does not survive a fork; each of them
imports torch, transformers and sglang again. Without a GPU forking is safe: at that point the server has one thread. On
two cores that halves the time to start (10 s instead of 20 s) and the memory (pages are shared). Disabling garbage
collection until then saves a little more. Upstream: sglang 0.5.23, srt/entrypoints/engine.py:1995. Can go when the
start method becomes a setting.

A server that returns the routes of its experts keeps them in memory that it registers with CUDA, which fails on a CPU:
srt/mem_cache/pool_host/common.py:453. Here it is ordinary memory. Can go when upstream checks the device.

SGLang's attention in torch reads keys and values from the cache, which contains compressed ones under multi-latent
attention (DeepSeek V3); but a prompt also gets uncompressed keys (srt/models/deepseek_common/
attention_backend_handler.py:233) and fails. Here the projections are absorbed into queries, as for every later token.
SGLang requires scaled rotary positions for it on a CPU (srt/layers/rotary_embedding/factory.py:478); here plain ones
are built as for other models. Can go when upstream registers a handler for torch_native, and builds plain positions.

A paused scheduler polls for requests without a break, which takes a whole core from the learner that publishes weights
meanwhile (srt/managers/scheduler.py:2034). Here it sleeps until one comes, as an idle one does with ``--sleep-on-idle``.
Can go when upstream sleeps there too.

It also loads weights on one thread. The copies of single weights are so short that the threads of OpenMP mostly wait for
each other, and they spin meanwhile, on cores that the learner needs: a second of CPU time for 540 MB instead of 0.1 s.

Checksums of weights are XXH3 with 128 bits instead of SHA-256, which takes twelve times as long (srt/utils/
weight_checker.py:254). They must show that no byte was lost on the way, not that nobody forged it. They have 32
hexadecimal digits instead of 16, which tells the learner the hash function. Can go when upstream offers a fast one.

Two imports that take a second or more and are not needed are skipped: Megatron-core, which a debugging dump uses
(srt/debug_utils/dumper.py:1824, which works without it), and 250 files of models, which are still imported if
``_slime_models`` lacks the served one.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

select = multiprocessing.set_start_method


def fork_instead(method: str | None, force: bool = False) -> None:
    """Replace ``multiprocessing.set_start_method``: use ``fork`` instead of ``spawn``, and prepare the server."""
    gc.enable()
    gc.freeze()  # the collector skips imported objects from now on, so their pages stay shared
    if "--enable-return-routed-experts" in sys.argv:
        leave_memory_unregistered()
    if has_latent_attention(sys.argv[1:]):
        serve_latent_attention()
    batch_attention()
    sleep_while_paused()
    load_weights_on_one_thread()
    hash_weights_quickly()
    select("fork" if method == "spawn" else method, force=force)


def has_latent_attention(argv: list[str]) -> bool:
    """Return whether the served model caches compressed keys and values."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", type=Path)
    folder = parser.parse_known_args(argv)[0].model_path
    return folder is not None and "kv_lora_rank" in json.loads((folder / "config.json").read_text("utf-8"))


def batch_attention() -> None:
    """``--attention-backend torch_native`` computes sequences together (:mod:`_slime_attention`)."""
    from _slime_attention import BatchedAttention
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    ATTENTION_BACKENDS["torch_native"] = BatchedAttention


def sleep_while_paused() -> None:
    """A paused scheduler waits for its next request."""
    from sglang.srt.managers.scheduler import Scheduler

    record = Scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(scheduler: Any) -> None:
        record(scheduler)
        scheduler.maybe_sleep_on_idle()

    Scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def load_weights_on_one_thread() -> None:
    """Receiving and loading weights, over any transport, uses one thread."""
    import torch
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    observe = SchedulerWeightUpdaterManager._observe_weight_load

    @contextmanager
    def observe_one_thread(manager: Any, source: str) -> Iterator[None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with observe(manager, source):
                yield
        finally:
            torch.set_num_threads(threads)

    SchedulerWeightUpdaterManager._observe_weight_load = observe_one_thread


def hash_weights_quickly() -> None:
    """The digest of a weight is XXH3 of its bytes."""
    import torch
    import xxhash
    from sglang.srt.utils import weight_checker

    def hash_tensor(tensor: torch.Tensor) -> str:
        return xxhash.xxh3_128_hexdigest(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    weight_checker._hash_tensor = hash_tensor


def serve_latent_attention() -> None:
    """Let prompts use the code path of responses, and accept rotary positions that are not scaled."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)
    scaled = factory.get_rope_cpu

    def get_rope_cpu(*arguments: Any) -> Any:
        *plain, _ = arguments
        return factory.get_rope(*plain) if arguments[5] is None else scaled(*arguments)

    factory.get_rope_cpu = get_rope_cpu


def leave_memory_unregistered() -> None:
    """Allocate host buffers without registering them with the CUDA driver."""
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
