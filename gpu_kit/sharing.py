"""Part 7: weights that another process reads as an engine does; a learner that leaves the GPU and comes back.

With a GPU the weights are shared by CUDA IPC, without one through /dev/shm. ``python -m gpu_kit.sharing read`` is the
other process: it reads pickles as SGLang's servers do (srt/utils/patch_torch.py), and answers with a digest.
"""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from gpu_kit.learner import DENSE, LONG, SHORT, TOKENS, attempt, built, draw, shard_of, write_model
from gpu_kit.report import DEVICE, GIB, ON_GPU, digest, free_memory, report, report_equal, report_limit, sized
from slime_core.weights.engine_control import Bucket
from slime_core.weights.hugging_face import WeightSpec
from slime_core.weights.transports import DEVICE_ARGUMENT, TensorTransport

SHAPES = sized([(4096, 4096)] * 8 + [(4096,), (1,)], [(64, 64)] * 4 + [(48,), (1,)])


class ReadingProcess:
    """What TensorTransport calls of an engine's control: sends payloads to another process, and takes its answer."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "gpu_kit.sharing", "read"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer, self.seconds = self._read(), 0.0

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def begin_update(self) -> None:
        """Nothing to pause."""

    def end_update(self) -> None:
        """Nothing to resume."""

    def update_from_tensor(self, payloads: Sequence[Sequence[str]], *, version: str | None) -> None:
        ((payload,),) = payloads
        assert self._process.stdin is not None
        start_s = time.perf_counter()
        print(payload, file=self._process.stdin, flush=True)
        self.answer = self._read()
        self.seconds = time.perf_counter() - start_s

    def close(self) -> int:
        self._process.communicate(timeout=60)
        return self._process.returncode


def main() -> None:
    """Report sharing, then offloading."""
    with attempt("sharing weights"):
        share()
    with attempt("offloading"):
        offload()


# --- Sharing ----------------------------------------------------------------------------------------------------------


def share() -> None:
    """Send buckets and compare digests."""
    how = "CUDA IPC" if ON_GPU else "/dev/shm, without a GPU"
    report("weights are shared by", how)
    gpus = [[str(torch.cuda.get_device_properties(DEVICE).uuid)]] if ON_GPU else ()
    reader: Any = ReadingProcess()
    transport = TensorTransport(["http://127.0.0.1:1"], control=reader, holders=[[0]], gpus=gpus)
    transport.start("1")
    generator = torch.Generator().manual_seed(0)
    before = torch.cuda.memory_allocated() if ON_GPU else 0
    matches = []
    for number in range(3):
        tensors = [torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16) for shape in SHAPES]
        specs = (WeightSpec(f"weight.{i}", "bfloat16", tuple(one.shape)) for i, one in enumerate(tensors))
        transport.send(Bucket(tuple(specs)), tensors, last=number == 2)
        transport.drain()
        matches.append(reader.answer == digest(tensors))
    report_equal("buckets that the other process reads", all(matches))
    size = f"{sum(tensor.nbytes for tensor in tensors) / 2**20:.3g} MiB"
    report("open, read and digest of a bucket", reader.seconds, "s", expected=size)
    del tensors
    status = reader.close()
    report("the other process ends", status, expected="0", ok=status == 0)
    transport.close()
    if ON_GPU:
        torch.cuda.ipc_collect()
        free_memory()
        left = torch.cuda.memory_allocated() - before
        report("GPU memory that stays after sharing", left, "bytes", expected="0", ok=left == 0)
    else:
        files = [file.name for file in Path("/dev/shm").glob(f"torch_{os.getpid()}_*")]
        report("files of this process that stay in /dev/shm", len(files), expected="0", ok=not files)


def read() -> None:
    """Answer each line of the input, a payload, with the digest of its weights."""
    original: Any = reductions.rebuild_cuda_tensor

    def rebuild(*arguments: Any) -> Any:
        """Replace the UUID of a GPU by its number here."""
        uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
        number = uuids.index(arguments[DEVICE_ARGUMENT])
        return original(*arguments[:DEVICE_ARGUMENT], number, *arguments[DEVICE_ARGUMENT + 1 :])

    reductions.rebuild_cuda_tensor = rebuild
    print("ready", flush=True)
    for line in sys.stdin:
        received = pickle.loads(base64.b64decode(line))
        flat = received["flattened_tensor"]
        weights = [flat[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape) for one in received["metadata"]]
        answer = digest(weights)
        del received, flat, weights
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()
        print(answer, flush=True)


# --- Offloading -------------------------------------------------------------------------------------------------------


def offload() -> None:
    """Offload a learner after a step, load it again, and train on."""
    folder, loop = write_model(DENSE)
    del loop
    shard = shard_of(draw(length=SHORT, total=TOKENS), LONG)
    with built(folder, LONG, "full") as trained:
        learner = trained.learner
        state = sum(trained.plan.parts[name] for name in ("weights", "gradients", "optimizer"))
        learner.train(shard)
        before = digest(weight for _, weight in learner.export_weights())
        start_s = time.perf_counter()
        some, released = learner.offload(keeps_weights=True), learner.offload()
        report("seconds of offloading, page-locking included", time.perf_counter() - start_s, "s")
        report("offloaded, all but the weights", some / GIB, "GiB", expected="gradients and Adam's state")
        report("offloaded", released / GIB, "GiB", expected=f"plan without activations: {state / GIB:.4g}")
        if ON_GPU:
            report_limit("GPU memory of tensors that stays", torch.cuda.memory_allocated() / GIB, 0.1, "GiB")
            report_limit("GPU memory that the allocator keeps", torch.cuda.memory_reserved() / GIB, 0.5, "GiB")
            free, total = torch.cuda.mem_get_info()
            report("GPU memory in use, context included", (total - free) / GIB, "GiB", expected="about 1")
            pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
            report("page-locked memory", pinned / GIB, "GiB", expected="1.0 to 1.3 times what is offloaded")
        start_s = time.perf_counter()
        learner.onload()
        report("seconds of loading", time.perf_counter() - start_s, "s")
        report_equal("weights after loading", before == digest(weight for _, weight in learner.export_weights()))
        norm = learner.train(shard)["train/grad_norm"]
        report("gradient norm of the next step", norm, expected="finite", ok=0 < norm < float("inf"))


if __name__ == "__main__":
    read() if sys.argv[1:] == ["read"] else main()
